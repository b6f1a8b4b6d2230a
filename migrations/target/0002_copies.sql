-- How a copy goes about it, which must survive the process that makes it.

alter table streamer.relation
    -- `initial: none` has been acted on: the table was declared to be in step. It counts once.
    add column declared boolean not null default false,
    -- A copy fills the target table itself, so the rows of this source there are incomplete.
    add column filling boolean not null default false;

update streamer.relation set
    declared = attempt = 0 and snapshot_lsn is not null,
    filling = attempt > 0 and snapshot_lsn is null;
