-- streamer's memory, in the target, so that it commits together with the data.

create table streamer.source (
    id bigint generated always as identity primary key,
    database text not null,
    sid text check (sid <> ''),
    system_identifier text,
    timeline integer,
    slot text not null,
    publication text not null,
    state text not null default 'starting'
        check (state in ('starting', 'streaming', 'waiting', 'stopped', 'error')),
    error text,
    -- Stored before it is acknowledged to the source: the slot is never ahead of it, unless this
    -- database went back in time or another program moved the slot.
    acknowledged_lsn pg_lsn not null default '0/0',
    -- Everything the source committed up to this time (its clock) is visible here.
    visible_time timestamptz,
    -- The process that streams from this source now, or did last.
    holder text
);
create unique index source_key on streamer.source (database, coalesce(sid, ''));

create table streamer.relation (
    id bigint generated always as identity primary key,
    source_id bigint not null references streamer.source on delete cascade,
    source text not null,
    target text not null,
    type text not null check (type in ('clone', 'append', 'history')),
    state text not null default 'init'
        check (state in ('init', 'copying', 'catching_up', 'ready', 'paused', 'error')),
    -- Where the copied rows were taken: changes up to here are in them.
    snapshot_lsn pg_lsn,
    -- End of the last source transaction whose changes to this relation are in the target.
    end_lsn pg_lsn not null default '0/0',
    -- Raised whenever a copy begins again; the parts of an older attempt no longer count.
    attempt integer not null default 0,
    rows_copied bigint not null default 0,
    bytes_copied bigint not null default 0,
    rows_total bigint,
    error text,
    -- Whether streamer created the target table, and whether its rows there are all streamer's.
    target_created boolean not null default false,
    -- Fingerprint of its membership in the publication; it changes when the membership is re-created.
    publication_mark text,
    changed_at timestamptz not null default now(),
    unique (source_id, source)
);

-- One row per part of a copy. A task locks its row, copies, and marks it in the same transaction, so a
-- part is copied once however often a task for it runs.
create table streamer.sync_partition (
    relation_id bigint not null references streamer.relation on delete cascade,
    part integer not null,
    attempt integer not null,
    description text not null,
    rows_copied bigint,
    bytes_copied bigint,
    started_at timestamptz,
    finished_at timestamptz,
    error text,
    primary key (relation_id, part)
);

-- Indexes that are dropped while a table is filled; written in the transaction that drops them.
create table streamer.deferred_index (
    id bigint generated always as identity primary key,
    target text not null,
    definition text not null
);

-- Operators' requests: a running process acts at once, a stopped one at its next start.
create table streamer.request (
    id bigint generated always as identity primary key,
    relation_id bigint not null references streamer.relation on delete cascade,
    action text not null check (action in ('resync', 'pause', 'resume')),
    options jsonb not null default '{}',
    requested_at timestamptz not null default now()
);
