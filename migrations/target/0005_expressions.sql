-- `filter` and `set` as the rows of a relation were written with; null for none. With others they
-- are written anew.
alter table streamer.relation add column expressions text;
