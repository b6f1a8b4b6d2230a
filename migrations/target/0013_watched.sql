-- What the guard of a source compares, so that changes made while no process runs are noticed as well.
alter table streamer.relation
    -- What old rows are told by, as published: 'full', 'key …' or 'none'; null before the first time.
    add column identity text,
    -- Changes are missing for good, and a person decides when the table is copied again.
    add column needs_resync boolean not null default false,
    -- For each of `leaves`, the transactions that made it and the partitions above it partitions: others
    -- if it was detached and attached again.
    add column leaf_joins text[];
