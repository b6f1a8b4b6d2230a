-- Every act removes those that are too old, and finds them by this index.
create index audit_at on streamer.audit (at);
