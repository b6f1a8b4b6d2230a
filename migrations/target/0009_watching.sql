-- What `status` shows of copies and of changes that have to wait.

-- Only the process knows this. It says so when it has changed, every few seconds at most.
create table streamer.held (
    relation_id bigint primary key references streamer.relation on delete cascade,
    changes bigint not null,
    bytes bigint not null,
    -- The source has to keep its WAL from here on for them.
    behind_lsn pg_lsn
);

-- What a part is of the source's table, as large as it is there.
alter table streamer.sync_partition add column size_bytes bigint not null default 0;
