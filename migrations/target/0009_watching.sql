-- Copies and waiting changes, for `status`.

-- Only the process knows this. It says so when it has changed, every few seconds at most.
create table streamer.held (
    relation_id bigint primary key references streamer.relation on delete cascade,
    changes bigint not null,
    bytes bigint not null,
    -- The source has to keep its WAL from here on for them.
    behind_lsn pg_lsn
);

-- Size of the part at the source.
alter table streamer.sync_partition add column size_bytes bigint not null default 0;
