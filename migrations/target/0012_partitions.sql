-- The partitions of a partitioned source table that were last seen, by their oids there; null before
-- anybody looked. Rows of one that is attached with them never travel.
alter table streamer.relation add column leaves int8[];
