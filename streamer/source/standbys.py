"""The standbys among the hosts of a source's url: whether they keep the source's slot.

PostgreSQL documentation, "Replication Slot Synchronization"; view pg_replication_slots.
"""

from dataclasses import dataclass, field
from typing import Final

from streamer.errors import SourceError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.conninfo import hosts_of
from streamer.source.connection import Connection, connection, fetch_all, is_standby
from streamer.source.primaries import HOST_SECONDS, host_name
from streamer.source.slot import Slot, read_slot

_SETTINGS_SQL: Final = """
select name, setting from pg_catalog.pg_settings
where name in ('hot_standby_feedback', 'primary_slot_name', 'sync_replication_slots',
               'synchronized_standby_slots')
"""


@dataclass(frozen=True, slots=True)
class StandbyLook:
    """A standby as a look at it finds it. ``error``: why it cannot be looked at."""

    host: str
    slot: Slot | None = None
    settings: dict[str, str] = field(default_factory=dict)
    error: str | None = None


async def read_replication_settings(connection: Connection) -> dict[str, str]:
    """Return the settings that decide about slots on standbys, as far as the version has them."""
    return {row["name"]: row["setting"] for row in await fetch_all(connection, _SETTINGS_SQL)}


async def look_at_standbys(source: SourceMapping) -> list[StandbyLook]:
    """Look at each host of the url that is a standby now."""
    looks = []
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
                    looks.append(StandbyLook(name, slot, await read_replication_settings(plain)))
        except SourceError as exc:
            looks.append(StandbyLook(name, error=exc.message))
    return looks
