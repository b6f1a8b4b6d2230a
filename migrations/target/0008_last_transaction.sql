-- A transaction that is in the target, by which the source's history is recognised when it sends it
-- again: {"end_lsn", "xid", "commit_time"}.
alter table streamer.source add column last_transaction jsonb;
