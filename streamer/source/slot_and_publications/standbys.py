"""Reads whether the standbys among the hosts of a source's url synchronize the source's slot.

PostgreSQL documentation, "Replication Slot Synchronization"; view pg_replication_slots.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from streamer.errors.error_classes import SourceError, StandbyWaitError
from streamer.errors.remedies import Remedy, at_source
from streamer.mapping.rules import SourceMapping
from streamer.postgres.conninfo import hosts_of
from streamer.postgres.quoting import quote_literal
from streamer.source.connection import Connection, connection, fetch_all, is_standby
from streamer.source.server.primaries_after_failover import HOST_SECONDS, host_name
from streamer.source.slot_and_publications.slot import Slot, read_slot

_SETTINGS_SQL: Final = """
select name, setting from pg_catalog.pg_settings
where name in ('hot_standby_feedback', 'primary_slot_name', 'sync_replication_slots',
               'synchronized_standby_slots')
"""


_WAIT_SQL: Final = """
select coalesce(pg_catalog.current_setting('synchronized_standby_slots', true), '') as listed,
       array(select p.slot_name::text from pg_catalog.pg_replication_slots p
              where p.slot_type = 'physical' and p.active) as active
from pg_catalog.pg_replication_slots s
join pg_catalog.pg_stat_activity a on a.pid = s.active_pid
where s.slot_name = %s and a.wait_event = 'WaitForStandbyConfirmation'
"""


@dataclass(frozen=True, slots=True)
class StandbyState:
    """The state of a standby. ``error``: the reason why streamer cannot read the state."""

    host: str
    slot: Slot | None = None
    settings: dict[str, str] = field(default_factory=dict)
    error: str | None = None


async def read_replication_settings(connection: Connection) -> dict[str, str]:
    """Return the settings about slots on standbys that the server's version has."""
    return {row["name"]: row["setting"] for row in await fetch_all(connection, _SETTINGS_SQL)}


async def read_standbys(source: SourceMapping) -> list[StandbyState]:
    """Read the state of each host of the url that is a standby."""
    states = []
    for host, port in hosts_of(source.url.reveal()):
        name = host_name(host, port)
        at = {
            "host": host,
            "port": port,
            "target_session_attrs": "any",
            "connect_timeout": HOST_SECONDS,
        }
        try:
            async with connection(source, at=at) as plain:
                if is_standby(plain):
                    slot = await read_slot(plain, source.slot)
                    states.append(StandbyState(name, slot, await read_replication_settings(plain)))
        except SourceError as exc:
            states.append(StandbyState(name, error=exc.message))
    return states


async def find_standby_wait(plain: Connection, source: SourceMapping) -> StandbyWaitError | None:
    """Return an error if the server sends no changes before the standbys have received them."""
    rows = await fetch_all(plain, _WAIT_SQL, source.slot)
    return judge_standby_wait(source, rows[0]["listed"], rows[0]["active"]) if rows else None


def judge_standby_wait(
    source: SourceMapping, listed: str, active: Collection[str]
) -> StandbyWaitError:
    """Return the error, with the slots in the setting that no standby uses. Pure."""
    names = [name.strip(' "') for name in listed.split(",")]
    missing = [name for name in names if name not in active]
    if not missing:
        return StandbyWaitError(
            f'source "{source.label}": its server sends changes only after the standbys of '
            f"synchronized_standby_slots ({listed}) have received them, and these standbys are "
            "behind",
            hint="see pg_stat_replication at the source",
        )
    remaining = quote_literal(", ".join(name for name in names if name in active))
    slots = ", ".join(f'"{name}"' for name in missing)
    setting = f"alter system set synchronized_standby_slots = {remaining}"
    return StandbyWaitError(
        f'source "{source.label}": its server sends no changes, because no standby uses slot '
        f"{slots} of synchronized_standby_slots",
        hint=Remedy.of(
            "start that standby, or correct the name; to continue without the standby, run at the "
            "source: ",
            at_source(setting, "select pg_reload_conf()"),
        ),
    )
