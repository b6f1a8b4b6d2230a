-- The partitions of a partitioned source table whose rows are copied or streamed, by their oids there;
-- null before anybody looked. Rows of one that is attached with them never travel.
alter table streamer.relation add column leaves int8[];
