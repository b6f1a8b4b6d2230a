-- Operators' acts: resync, pause, resume, and requests about rows in quarantine. Each row is written in
-- the transaction of its request, whether the page, the API or the command line made it.
create table streamer.audit (
    id bigint generated always as identity primary key,
    at timestamptz not null default pg_catalog.clock_timestamp(),
    -- The user of the page or the API, or that of the command line.
    actor text not null,
    action text not null,
    -- The source and its table. No reference: an act is remembered when its source is not.
    label text not null,
    options jsonb not null
);
