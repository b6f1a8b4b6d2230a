-- Changes that the target rejected, and later ones of the same rows, in the order the source made them.
-- Values are kept as text under the source's names, so that they can be applied again under
-- the target's later definition; a value that the source did not send (unchanged TOAST) is absent.

create table streamer.quarantine (
    id bigint generated always as identity primary key,
    relation_id bigint not null references streamer.relation on delete cascade,
    operation text not null check (operation in ('insert', 'update', 'delete')),
    -- The key of the row after the change; null without one.
    key json,
    old json,
    new json,
    -- The part of the source table's definition that the change was made under.
    definition json not null,
    -- The source transaction: where its commit is, when that was, and its xid.
    lsn pg_lsn not null,
    commit_time timestamptz not null,
    xid bigint not null,
    error text not null,
    -- SQLSTATE; null if the change only follows an earlier one of its row.
    code text,
    quarantined_at timestamptz not null default now(),
    retried_at timestamptz
);
create index quarantine_relation on streamer.quarantine (relation_id, id);

alter table streamer.request drop constraint request_action_check;
alter table streamer.request add constraint request_action_check
    check (action in ('resync', 'pause', 'resume', 'quarantine_retry', 'quarantine_drop'));
