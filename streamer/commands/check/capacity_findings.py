"""Compares the slots, walsenders and connections that `run` needs with those of the servers.

Pure.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from streamer.apply.lanes.hot_lanes import hot_worker_count
from streamer.commands.check.findings import (
    TARGET,
    Finding,
    Place,
    at_source,
    at_target,
    error,
    warning,
)
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.source_findings import copied
from streamer.commands.check.target_facts import TargetFacts
from streamer.config.settings import Settings
from streamer.runtime.start_limit import STARTS_AT_ONCE
from streamer.target.session_counts import DRAINERS_MAX, FINISHING_MAX

TARGET_FEW = 8
"""Sessions that a process opens at the target for any number of sources and tables: locks,
bookkeeping, plans, notifications, liveness, definitions, indexes, scripts.
"""
SOURCE_EACH = 3
"""Sessions for each source beside its walsender: guard, observations, backlog or start."""
WALSENDERS_OF_STANDBY = 1
"""The walsenders for each source on a standby beside the walsender of the stream: one reads the
timeline.
"""
COPY_SESSIONS = 2
"""Sessions at the source for each source that copies: its snapshot, and the lock on a table."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The number that streams need all the time, and the additional number for copies."""

    always: int
    copies: int

    @property
    def most(self) -> int:
        return self.always + self.copies


def target_needs(settings: Settings, source_count: int) -> Needs:
    """Return the connections that all processes open at the target."""
    copying = min(settings.sync.sources_at_once, source_count)
    always = settings.workers + hot_worker_count(settings.workers) + DRAINERS_MAX + TARGET_FEW
    return Needs(
        settings.processes * (always + min(STARTS_AT_ONCE, source_count)),
        settings.processes * (settings.sync.jobs + copying * (1 + FINISHING_MAX)),
    )


def check_connections(target: TargetFacts, needs: Needs) -> Iterable[Finding]:
    """Whether the target has the connections that a `streamer run` needs."""
    server = target.server
    yield from _check_free(
        TARGET,
        "max_connections",
        server.max_connections,
        server.max_connections - server.connections_reserved - server.connections_used,
        needs,
        is_copying=needs.copies > 0,
    )


def check_capacity(
    sources: Iterable[SourceFacts], target: TargetFacts | None, settings: Settings
) -> Iterable[Finding]:
    """Check free slots, walsenders and connections, for all sources of a server together.

    A source that a process streams already occupies a slot and a walsender.
    """
    servers: dict[tuple[str, int, int], list[SourceFacts]] = defaultdict(list)
    for facts in sources:
        if facts.server is not None and facts.is_complete:
            servers[facts.server.place].append(facts)
    for group in servers.values():
        yield from _check_server(group, target, settings)


def _check_server(
    group: list[SourceFacts], target: TargetFacts | None, settings: Settings
) -> Iterable[Finding]:
    server, usage = group[0].server, group[0].usage
    assert server is not None
    assert usage is not None
    sync = settings.sync
    per_server = sync.sources_per_server or sync.sources_at_once
    at_once = settings.processes * min(sync.sources_at_once, per_server)
    jobs = settings.processes * settings.sync.jobs
    place = Place(", ".join(facts.label for facts in group))
    idle = [facts for facts in group if facts.slot is None or facts.slot.active_pid is None]
    copies = [facts for facts in idle if copied(facts, target)]
    # The first copy uses the snapshot of the new main slot; later copies create a temporary one.
    later = [facts for facts in copies if facts.slot is not None]
    yield from _check_free(
        place,
        "max_replication_slots",
        server.max_replication_slots,
        server.max_replication_slots - usage.slots,
        Needs(sum(facts.slot is None for facts in idle), max(1, min(at_once, len(later)))),
        is_copying=bool(later),
    )
    senders_each = 1 + (WALSENDERS_OF_STANDBY if server.in_recovery else 0)
    yield from _check_free(
        place,
        "max_wal_senders",
        server.max_wal_senders,
        server.max_wal_senders - usage.walsenders,
        Needs(senders_each * len(idle), max(1, min(at_once, len(copies)))),
        is_copying=bool(copies),
    )
    copying = COPY_SESSIONS * min(at_once, len(copies)) + jobs
    yield from _check_free(
        place,
        "max_connections",
        usage.max_connections,
        usage.max_connections - usage.connections_reserved - usage.connections_used,
        Needs(SOURCE_EACH * len(group), copying if copies else 0),
        is_copying=bool(copies),
    )


def _check_free(
    place: Place, setting: str, most: int, free: int, needs: Needs, *, is_copying: bool
) -> Iterable[Finding]:
    """Check whether *free* of *most* are enough. *is_copying*: copies of tables are due."""
    free = max(0, free)
    if free >= needs.most:
        return
    statement = f"alter system set {setting} = {most - free + needs.most}"
    words = "then restart that server"
    fix = (at_target if place is TARGET else at_source)(statement, words=words)
    more = "one more" if needs.copies == 1 else f"{needs.copies} more"
    while_copying = f", and {more} while tables are copied" if needs.copies else ""
    problem = f"{setting} is {most}, of which {free} are free: {needs.always} needed{while_copying}"
    is_short = free < needs.always or is_copying
    yield (error if is_short else warning)(place, problem, fix)
