-- `filter` and `set` as the rows of a relation were written with; null for none. With others,
-- the rows are copied again.
alter table streamer.relation add column expressions text;
