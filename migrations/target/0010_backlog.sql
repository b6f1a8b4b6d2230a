-- The WAL that a source retains for streamer, and the journal of its changes: shown by
-- `status`, and {"throttled"} tells copies whether to go slower.
alter table streamer.source add column backlog jsonb;
