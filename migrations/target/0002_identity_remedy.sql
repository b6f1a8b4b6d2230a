-- needs: 1
-- The statements that give the source's table a usable replica identity, if `identity` is 'none'.
alter table streamer.relation add column identity_remedy jsonb;
