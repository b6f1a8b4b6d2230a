-- Written by the session that takes the source's advisory lock. Writes for a source carry their
-- token, and count only while it is the present one.
alter table streamer.source add column lock_token text;

-- Tells this installation's slots and publications from those of another.
create table streamer.installation (id text primary key);
insert into streamer.installation
select md5(concat(random(), clock_timestamp(), current_database(), pg_backend_pid()));
