-- The facts that the guard of a source compares, to notice changes made while no process runs.
alter table streamer.relation
    -- The identity of old rows, as published: 'full', 'key …' or 'none'; null before the first time.
    add column identity text,
    -- Changes are missing for good, and a person decides when the table is copied again.
    add column needs_resync boolean not null default false,
    -- For each of `leaves`, the transactions that made it and the partitions above it partitions: others
    -- if it was detached and attached again.
    add column leaf_joins text[];

-- Relations that are no longer mapped, as they were: their rows in the target stay streamer's. One that
-- comes back goes on where it was if nothing was acknowledged since, and is copied otherwise.
create table streamer.former_relation (
    source_id bigint not null references streamer.source on delete cascade,
    source text not null,
    acknowledged_lsn pg_lsn not null,
    relation jsonb not null,
    primary key (source_id, source)
);
