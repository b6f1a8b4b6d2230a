"""Chooses a primary among the hosts of a source's url, because after a failover the old primary may
run again.

Each attempt chooses the host with the newest branch of the source's history, which all connections
then try first. Otherwise a session could reach an old primary that the url names first.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
import structlog

from streamer.errors.error_classes import SourceElsewhereError, SourceError, SourceOldPrimaryError
from streamer.errors.remedies import Remedy, run
from streamer.mapping.rules import SourceMapping
from streamer.postgres.conninfo import hosts_of, parse_conninfo
from streamer.source.catalog import SourceServer, read_server
from streamer.source.connection import (
    Connection,
    connection,
    fetch_one,
    put_host_first,
    require_configured,
)
from streamer.source.reached_server import IDENTITY_SQL, identity_of
from streamer.source.server.timeline import read_branch
from streamer.source.timeline_branches import Branch, KnownServer, is_same_or_continued
from streamer.util.repeated_notices import end_notice, give_notice

log = structlog.get_logger()

HOST_SECONDS: Final = "5"
"""The time for which a check waits for a host."""
_SEVERAL: Final = "several hosts of the url accept writes"
_WRITABLE: Final = ("any", "primary", "read-write")


@dataclass(frozen=True, slots=True)
class Primary:
    """A host of a url that accepts writes."""

    host: tuple[str, str]
    server: SourceServer
    branch: Branch

    def __str__(self) -> str:
        return f"{host_name(*self.host)} (timeline {self.branch.timeline})"


def host_name(host: str, port: str) -> str:
    return f"{host}:{port}" if port else host


async def read_primaries(source: SourceMapping) -> list[Primary]:
    """Check all hosts of the url in parallel; return the hosts that accept writes.

    Return no host for a url with one host or a url that requests standbys, and omit hosts that do
    not answer. Raises SourceConfigurationError.
    """
    require_configured(source)
    url = source.url.reveal()
    if parse_conninfo(url).get("target_session_attrs", "any") not in _WRITABLE:
        return []
    primaries = await asyncio.gather(*(_read_primary(source, host) for host in hosts_of(url)))
    return [primary for primary in primaries if primary is not None]


async def _read_primary(source: SourceMapping, host: tuple[str, str]) -> Primary | None:
    at = {"host": host[0], "port": host[1], "connect_timeout": HOST_SECONDS}
    try:
        async with connection(source, replication=True, at=at) as replication:
            server = await read_server(replication)
            if server.in_recovery:
                return None
            return Primary(host, server, await read_branch(replication, server))
    except SourceError:
        return None


def choose(primaries: Sequence[Primary], stored: KnownServer) -> Primary | None:
    """Return the primary with the newest branch that continues the stored history. Pure.

    If no primary continues the history, prefer the stored system identifier, and then the highest
    timeline. Return None without primaries.
    """

    def rank(primary: Primary) -> tuple[bool, bool, int]:
        return (
            stored.system_identifier in (None, primary.server.system_identifier),
            stored.branch is None or is_same_or_continued(stored.branch, primary.branch),
            primary.branch.timeline,
        )

    return max(primaries, key=rank, default=None)


async def prefer_newest(source: SourceMapping, stored: KnownServer) -> list[Primary]:
    """Make connections to *source* try the newest primary first; return all primaries."""
    primaries = await read_primaries(source)
    chosen = choose(primaries, stored)
    if chosen is not None:
        put_host_first(source, chosen.host)
    if len(primaries) <= 1:
        end_notice(_SEVERAL, source.label)
    else:
        give_notice(
            log.warning,
            _SEVERAL,
            source.label,
            hosts=", ".join(map(str, primaries)),
            chosen=str(chosen),
        )
    return primaries


def require_successor(source: SourceMapping, server: SourceServer, stored: KnownServer) -> None:
    """Refuse a server with an older timeline than *stored*. Raises SourceOldPrimaryError.

    A timeline has a higher number than every ancestor.
    """
    if stored.branch is None or stored.system_identifier != server.system_identifier:
        return
    if server.timeline < stored.branch.timeline:
        back = run("run", None, "--take-over", source.label)
        raise SourceOldPrimaryError(
            f'source "{source.label}": the server that answers is on timeline {server.timeline}, '
            f"and the target follows timeline {stored.branch.timeline}: it is the old primary",
            hint=Remedy.of(
                "start the new primary, and stop the old one; or, to give the new primary up, run "
                "once: ",
                back,
            ),
        )


async def require_server_of_run(
    source: SourceMapping, plain: Connection, stored: KnownServer
) -> None:
    """Refuse any server but the server from which `run` streams. Raises SourceElsewhereError.

    Without the privilege to read the system identifier, the function refuses no server.
    """
    if stored.system_identifier is None or stored.branch is None:
        return
    expected = stored.system_identifier, stored.branch.timeline, 0
    try:
        row = await fetch_one(plain, IDENTITY_SQL)
    except psycopg.errors.InsufficientPrivilege:
        return
    reached = identity_of(row["systemid"], row["segment"], row["started"], expected)
    if reached != expected:
        raise SourceElsewhereError(
            f'source "{source.label}": this command reached another server than `run`: system '
            f"identifier {reached[0]} and timeline {reached[1]}, not {expected[0]} and "
            f"{expected[1]}",
            hint="stop an old primary, or correct the hosts of the url; after a failover, wait "
            "until `run` streams from the new primary",
        )
