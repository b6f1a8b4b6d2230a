"""The statements of Spark tasks on the bookkeeping, for psycopg.

The module contains only text, because a remote executor gets this module but not the whole package.
"""

from typing import Final

IS_PENDING_SQL: Final = """
select true from streamer.sync_partition
where relation_id = %s and part = %s and attempt = %s and finished_at is null
"""
LOCK_PART_SQL: Final = """
select finished_at is null, coalesce((s.backlog ->> 'throttled')::boolean, false),
    s.lock_token is not distinct from %s, s.copy_rounds
from streamer.sync_partition p join streamer.relation r on r.id = relation_id
join streamer.source s on s.id = r.source_id
where relation_id = %s and part = %s and p.attempt = %s for update of p
"""
COUNT_TASKS_SQL: Final = """
select count(*) from pg_catalog.pg_stat_activity
where datname = current_database() and backend_type = 'client backend'
  and pg_catalog.starts_with(application_name, 'streamer copy ')
"""
FINISH_PART_SQL: Final = """
update streamer.sync_partition set rows_copied = %s, bytes_copied = %s,
    started_at = now(), finished_at = clock_timestamp(), error = null
where relation_id = %s and part = %s and attempt = %s
"""
FAIL_PART_SQL: Final = """
update streamer.sync_partition set error = %s, failure = %s, failed_constraint = %s
where relation_id = %s and part = %s and attempt = %s
  and exists (select from streamer.source where id = %s and lock_token = %s)
"""
FINISH_RANGE_SQL: Final = """
update streamer.compared_range set source_rows = %s, target_rows = %s
where comparison_id = %s and relation_id = %s and number = %s
"""
IS_THROTTLED_SQL: Final = """
select coalesce((backlog ->> 'throttled')::boolean, false) from streamer.source where id = %s
"""
POSITION_SQL: Final = """
select case when r.state in ('ready', 'catching_up', 'paused') and r.snapshot_lsn is not null
             and not r.needs_resync
       then greatest(r.end_lsn, s.acknowledged_lsn, r.visible_lsn)::text end
from streamer.relation r join streamer.source s on s.id = r.source_id where r.id = %s
"""
