-- When the oldest change of the table that is not visible was committed at its source; null while
-- the table is in step, or nearly so.
alter table streamer.relation add column lag_since timestamptz;
-- Everything of the table up to there is visible; stored when a session waits for the table.
alter table streamer.relation add column visible_lsn pg_lsn;
