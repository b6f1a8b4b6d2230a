"""The server and the timeline that a session of a source reached.

A url with several hosts, or a DNS name that moved, can lead two sessions to two servers. Spark
ships this module to executors, so the module imports only the standard library. Pure.
"""

from typing import Final

STARTED_SQL: Final = "(extract(epoch from pg_catalog.pg_postmaster_start_time()) * 1000000)::int8"
"""The start time of the server, which differs between a primary and each standby."""

TIMELINE_SQL: Final = """case when pg_catalog.pg_is_in_recovery()
    then (select timeline_id from pg_catalog.pg_control_checkpoint())
    else ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8)
         )::bit(32)::int4 end"""
"""The timeline of the server; for a standby, the timeline of its last restart point."""

IDENTITY_SQL: Final = f"""
select c.system_identifier::text as systemid,
       case when not pg_catalog.pg_is_in_recovery() then pg_catalog.pg_walfile_name(
           pg_catalog.pg_current_wal_lsn()) end as segment,
       {STARTED_SQL} as started
from pg_catalog.pg_control_system() c
"""
"""Reads a `ServerIdentity`. An ordinary role may lack the privilege to run this query."""

ServerIdentity = tuple[str, int, int]
"""System identifier, timeline, and start time of the server; the start time is 0 if unknown."""


def identity_of(
    system_identifier: str, segment: str | None, started: int, expected: ServerIdentity
) -> ServerIdentity:
    """Return the server in a row of `IDENTITY_SQL`. A standby does not report its timeline."""
    timeline = expected[1] if segment is None else int(segment[:8], 16)
    return system_identifier, timeline, started if expected[2] else 0


def find_difference(expected: ServerIdentity, reached: ServerIdentity) -> str | None:
    """Return a message if *reached* is not the server and timeline of *expected*."""
    if expected == reached:
        return None
    if expected[:2] == reached[:2]:
        return (
            "connections to the source reach different servers of one cluster, or the server has "
            f"restarted: one was started at {expected[2]}, another at {reached[2]}"
        )
    return (
        "connections to the source reach different servers: one has system identifier "
        f"{expected[0]} and timeline {expected[1]}, another {reached[0]} and {reached[1]}"
    )
