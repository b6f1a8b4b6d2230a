-- What is known of the WAL that a source keeps for us, and of the journal of its changes: shown by
-- `status`, and {"throttled"} tells copies whether to go slower.
alter table streamer.source add column backlog jsonb;
