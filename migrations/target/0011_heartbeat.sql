-- Heartbeats of a source: how long the last one that arrived took from its commit there until
-- everything before it was durable here; and since when one is on its way that should be here.
alter table streamer.source
    add column heartbeat_seconds double precision,
    add column heartbeat_since timestamptz;
