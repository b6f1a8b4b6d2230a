-- Whom or what the table waits for, with the session's pid, role and query age where it is a lock.
-- Not an error: the table goes on by itself.
alter table streamer.relation add column waiting_for text;
