"""The server and the timeline that a session of a source reached.

A url with several hosts, or a name that moved, can lead two sessions to two servers. Spark ships
this module to its executors, so it imports nothing. Pure.
"""

from typing import Final

PLACE_SQL: Final = """
select c.system_identifier::text as systemid,
       case when not pg_catalog.pg_is_in_recovery() then pg_catalog.pg_walfile_name(
           pg_catalog.pg_current_wal_lsn()) end as segment
from pg_catalog.pg_control_system() c
"""
"""An ordinary role may lack the privilege to run this."""

Place = tuple[str, int]
"""System identifier and timeline."""


def place_of(system_identifier: str, segment: str | None, expected: Place) -> Place:
    """Return the place that a row of `PLACE_SQL` names. A standby does not tell its timeline."""
    return system_identifier, expected[1] if segment is None else int(segment[:8], 16)


def find_difference(expected: Place, reached: Place) -> str | None:
    """Return a message if the two places are not the same server and timeline."""
    if expected == reached:
        return None
    return (
        "connections to the source reach different servers: one has system identifier "
        f"{expected[0]} and timeline {expected[1]}, another {reached[0]} and {reached[1]}"
    )
