-- The obstacle of a waiting table, with the session's pid, role and query age where it is a lock.
-- Not an error: the table goes on by itself.
alter table streamer.relation add column waiting_for text;

-- The source's columns with their numbers, as they were when the table was last in step: a column
-- that is renamed keeps its number, one that is dropped and added again gets another.
alter table streamer.relation add column columns jsonb;
