"""Replication origins, which tag streamer's transactions as replicated.

If a target is also a source (two databases that feed each other), replicated changes must not
travel back. PostgreSQL tags the transactions of a session that has set up a replication origin, and
decoding leaves tagged transactions out. From PostgreSQL 16 on the server drops them (``origin =
none``); before 16, streamer drops them by their Origin message. So every connection that writes
rows sets up an origin, if the role may.

Only one session at a time can use an origin, so each session uses a separate origin:
``streamer_<oid of the database>_<number>``. An advisory lock on the number reserves the origin and
ends with the session. Origins outlive their session, and later sessions use them again. Every used
origin occupies one of the server's slots for origins (``max_active_replication_origins``; before 18
``max_replication_slots``). When no slot is free, streamer removes the origins of dropped databases.

A tagged transaction also needs a timestamp. Without a timestamp PostgreSQL uses the session's
previous timestamp as its commit time (RecordTransactionCommit in xact.c), in
``pg_xact_commit_timestamp`` and for decoding.

SQL for both drivers. Pure.
"""

from typing import Final

FUNCTIONS: Final = (
    "pg_replication_origin_create(text)",
    "pg_replication_origin_session_setup(text)",
    "pg_replication_origin_xact_setup(pg_lsn, timestamptz)",
    "pg_replication_origin_drop(text)",
)
"""Functions that the role must be able to execute: as a superuser, or from PostgreSQL 14 on by a
GRANT.
"""

NUMBER_MAX: Final = 64
"""The maximum number of connections of a target with an origin; further connections have no
origin.
"""

_LOCK: Final = 0x6F726967  # "orig"
_NAMES: Final = ", ".join(f"'{function.partition('(')[0]}'" for function in FUNCTIONS)

# A block catches expected errors, which would otherwise appear in the server's log.
SET_UP_SQL: Final = f"""
do $$
declare
    prefix text := 'streamer_' || (select oid from pg_catalog.pg_database
                                   where datname = pg_catalog.current_database()) || '_';
    origin text;
    reason text := '{NUMBER_MAX} connections use replication origins';
begin
    perform pg_catalog.set_config('streamer.origin', '', false);
    if exists (select from pg_catalog.pg_proc
               where pronamespace = 'pg_catalog'::regnamespace and proname in ({_NAMES})
                 and not pg_catalog.has_function_privilege(oid, 'execute')) then
        perform pg_catalog.set_config(
            'streamer.untagged',
            'the role may not execute the functions of replication origins', false);
        return;
    end if;
    for attempt in 1..2 loop
        for number in 1..{NUMBER_MAX} loop
            continue when not pg_catalog.pg_try_advisory_lock({_LOCK}, number);
            origin := prefix || number;
            begin
                if not exists (select from pg_catalog.pg_replication_origin
                               where roname = origin) then
                    perform pg_catalog.pg_replication_origin_create(origin);
                end if;
                perform pg_catalog.pg_replication_origin_session_setup(origin);
                perform pg_catalog.pg_replication_origin_xact_setup(
                    '0/0', pg_catalog.clock_timestamp());
                perform pg_catalog.set_config('streamer.origin', origin, false);
                return;
            exception
                when object_in_use then null;  -- by a session that is about to end
                when others then
                    reason := sqlerrm;
                    perform pg_catalog.pg_advisory_unlock({_LOCK}, number);
                    exit when sqlstate = '53400';
                    perform pg_catalog.set_config('streamer.untagged', reason, false);
                    return;
            end;
            perform pg_catalog.pg_advisory_unlock({_LOCK}, number);
        end loop;
        -- No place is left: what belongs to databases that are gone needs none.
        for origin in
            select o.roname from pg_catalog.pg_replication_origin o
            where o.roname ~ '^streamer_[0-9]+_[0-9]+$'
              and not exists (select from pg_catalog.pg_database d
                              where d.oid::text = pg_catalog.split_part(o.roname, '_', 2))
        loop
            begin
                perform pg_catalog.pg_replication_origin_drop(origin);
            exception when others then null;
            end;
        end loop;
    end loop;
    perform pg_catalog.set_config('streamer.untagged', reason, false);
end $$
"""

RESULT_SQL: Final = (
    "select pg_catalog.current_setting('streamer.origin', true) <> '' as tagged,"
    " pg_catalog.current_setting('streamer.untagged', true) as reason"
)
"""Whether the session has an origin, or the reason why not."""

STAMP_SQL: Final = (
    "select pg_catalog.pg_replication_origin_xact_setup('0/0', pg_catalog.clock_timestamp())"
)
"""Required before each COMMIT of a session with an origin."""

DROP_SQL: Final = """
do $$
declare
    prefix text := 'streamer_' || (select oid from pg_catalog.pg_database
                                   where datname = pg_catalog.current_database()) || '_';
    origin text;
begin
    for origin in select roname from pg_catalog.pg_replication_origin
                  where pg_catalog.starts_with(roname, prefix)
    loop
        begin
            perform pg_catalog.pg_replication_origin_drop(origin);
        exception when object_in_use or undefined_object or insufficient_privilege then null;
        end;
    end loop;
end $$
"""
"""Drop the origins of this database that no session uses and that the role may drop."""

CAPACITY_SQL: Final = f"""
with places as (
  select coalesce(pg_catalog.current_setting('max_active_replication_origins', true),
                  pg_catalog.current_setting('max_replication_slots'))::int4 as origins_max,
         (select pg_catalog.count(*) from pg_catalog.pg_replication_origin
           where roname !~ '^streamer_[0-9]+_[0-9]+$'
              or pg_catalog.split_part(roname, '_', 2) in (
                   select oid::text from pg_catalog.pg_database
                    where datname <> pg_catalog.current_database()))::int4 as taken)
select not exists (select from pg_catalog.pg_proc
                   where pronamespace = 'pg_catalog'::regnamespace and proname in ({_NAMES})
                     and not pg_catalog.has_function_privilege(oid, 'execute'))
         as may_set_origin,
       origins_max, origins_max - taken as free_origins,
       exists (select from pg_catalog.pg_publication) as is_source
from places
"""
"""Whether the role may tag its writes, the number of connections that can, and whether the database
is a source.

Without publications the database cannot be a source, and the tag has no use.
"""


def grants_sql(role: str) -> list[str]:
    """Return the statements that let *role* (quoted) tag its writes."""
    return [f"grant execute on function {function} to {role}" for function in FUNCTIONS]
