"""Synchronous mode: commits at the source wait until the target contains the changes.

An operator lists streamer's application name in ``synchronous_standby_names`` of the source
(PostgreSQL documentation, "Synchronous Replication"). Then a commit at the source returns once
streamer confirms the commit's position. Commits of streamer's own sessions must not wait, because
at a start no stream runs yet that could confirm a position.
"""

from typing import Final

# The syntax of syncrep_scanner.l: names are words or quoted, "*" is any standby, and upper and
# lower case are the same. FIRST, ANY and the number match no name of streamer.
LISTED_SQL: Final = r"""
exists (
    select from pg_catalog.regexp_matches(
        pg_catalog.current_setting('synchronous_standby_names'),
        '"((?:[^"]|"")+)"|([^\s,()"]+)', 'g') m (name)
    where pg_catalog.lower(coalesce(pg_catalog.replace(m.name[1], '""', '"'), m.name[2]))
       in ('*', pg_catalog.lower(pg_catalog.current_setting('application_name'))))
"""
"""Whether commits wait for a walsender with this session's application name."""

COMMIT_AT_ONCE_SQL: Final = f"""
select pg_catalog.set_config('synchronous_commit', 'local', false)
where pg_catalog.current_setting('synchronous_commit') not in ('off', 'local') and {LISTED_SQL}
"""
