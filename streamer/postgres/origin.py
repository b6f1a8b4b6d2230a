"""Replication origins: what is written here carries a mark that says it came by replication.

Where a target is a source too (two databases that feed each other), changes that arrived must not
travel back. PostgreSQL marks the transactions of a session that has set up a replication origin,
and decoding leaves marked ones out: the server itself from 16 on (``origin = none``), streamer by
their Origin message before. So every connection that writes rows sets one up, where the role may.

One session at a time may use an origin, so each takes one of its own: ``streamer_<oid of the
database>_<number>``. An advisory lock on the number keeps others off it, and is gone with the
session. Origins stay when their session ends and are used again. Each that was ever used takes one
of the server's places for origins (``max_active_replication_origins``; before 18 as many as
``max_replication_slots``), so those of databases that were dropped are removed when no place is
left.

A marked transaction must be stamped too: without a stamp PostgreSQL gives it the time of the
session's former stamp as its commit time (RecordTransactionCommit in xact.c), in
``pg_xact_commit_timestamp`` and, worse, to whoever decodes it.

SQL for both drivers. Pure.
"""

from typing import Final

FUNCTIONS: Final = (
    "pg_replication_origin_create(text)",
    "pg_replication_origin_session_setup(text)",
    "pg_replication_origin_xact_setup(pg_lsn, timestamptz)",
    "pg_replication_origin_drop(text)",
)
"""What a role must be allowed to execute; superusers are, and from 14 on others may be."""

NUMBER_MAX: Final = 64
"""So many connections of one target have an origin; those beyond it have none."""

_LOCK: Final = 0x6F726967  # "orig"
_NAMES: Final = ", ".join(f"'{function.partition('(')[0]}'" for function in FUNCTIONS)

# A block, because errors that are expected stay out of the server's log when they are caught there.
SET_UP_SQL: Final = f"""
do $$
declare
    prefix text := 'streamer_' || (select oid from pg_catalog.pg_database
                                   where datname = pg_catalog.current_database()) || '_';
    origin text;
    reason text := '{NUMBER_MAX} connections have one';
begin
    perform pg_catalog.set_config('streamer.origin', '', false);
    if exists (select from pg_catalog.pg_proc
               where pronamespace = 'pg_catalog'::regnamespace and proname in ({_NAMES})
                 and not pg_catalog.has_function_privilege(oid, 'execute')) then
        perform pg_catalog.set_config(
            'streamer.untagged', 'the role may not use the functions for it', false);
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
"""Whether the session has an origin now, and if not, why."""

STAMP_SQL: Final = (
    "select pg_catalog.pg_replication_origin_xact_setup('0/0', pg_catalog.clock_timestamp())"
)
"""To be run before each COMMIT of a session that has an origin."""

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
"""Drop the origins of this database that nobody uses and we may drop."""

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
"""Whether the role may mark what it writes, for how many connections there is place, and whether
anybody could want that: nobody decodes a database without publications.
"""


def grants_sql(role: str) -> list[str]:
    """Return what lets *role* (quoted) mark what it writes."""
    return [f"grant execute on function {function} to {role}" for function in FUNCTIONS]
