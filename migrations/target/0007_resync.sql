-- The options of a requested resync, until it ends; and the rows that a copy may remove.

alter table streamer.relation
    -- The options of a resync.
    add column resync jsonb,
    -- All rows of this source in the target were written by streamer, so a copy may replace them.
    add column owns_rows boolean not null default false;

update streamer.relation set owns_rows = target_created or attempt > 0;
