-- Written by the session that takes the source's advisory lock. What is written for a source says by
-- which token, and counts only while that is the present one.
alter table streamer.source add column lock_token text;
