-- needs: 1
-- Why streamer cannot create or remove time partitions of the target table (`partition_by`).
alter table streamer.relation
    add column partition_error text,
    add column partition_error_code text,
    add column partition_error_remedy jsonb;
