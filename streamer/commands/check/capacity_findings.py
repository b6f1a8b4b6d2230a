"""Compares the slots, walsenders and connections that `run` needs with those of the servers.

Pure.
"""

from collections import defaultdict
from collections.abc import Iterable

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
from streamer.postgres.quoting import quote_identifier
from streamer.runtime.session_needs import Needs
from streamer.source.connection import COPY_SESSIONS, SESSIONS_EACH

WALSENDERS_OF_STANDBY = 1
"""The walsenders for each source on a standby beside the walsender of the stream: one reads the
timeline.
"""


def check_connections(target: TargetFacts, needs: Needs) -> Iterable[Finding]:
    """Whether server, role and database have the connections that a `streamer run` needs."""
    server = target.server
    yield from _check_free(
        TARGET,
        "max_connections",
        server.max_connections,
        server.max_connections - server.connections_reserved - server.connections_used,
        needs,
        is_copying=needs.copies > 0,
    )
    limits = (
        ("role", server.role, server.role_connections_max, server.role_connections_used),
        (
            "database",
            server.database,
            server.database_connections_max,
            server.database_connections_used,
        ),
    )
    for kind, name, most, used in limits:
        if most is not None:
            yield from _check_free(
                TARGET,
                f"the connection limit of the {kind}",
                most,
                most - used,
                needs,
                is_copying=needs.copies > 0,
                statement=f"alter {kind} {quote_identifier(name)} connection limit ",
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
            servers[facts.server.identity].append(facts)
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
        Needs(SESSIONS_EACH * len(group), copying if copies else 0),
        is_copying=bool(copies),
    )


def _check_free(
    place: Place,
    limit: str,
    most: int,
    free: int,
    needs: Needs,
    *,
    is_copying: bool,
    statement: str | None = None,
) -> Iterable[Finding]:
    """Check that *free* covers *needs*. *most*: the value of *limit*.

    *is_copying*: copies of tables are due.
    *statement*: sets the limit, without the number; by default *limit* is a setting of the server.
    """
    free = max(0, free)
    if free >= needs.most:
        return
    words = "then restart that server" if statement is None else None
    begins = f"alter system set {limit} = " if statement is None else statement
    sql = f"{begins}{most - free + needs.most}"
    fix = (at_target if place is TARGET else at_source)(sql, words=words)
    more = "one more" if needs.copies == 1 else f"{needs.copies} more"
    while_copying = f", and {more} while tables are copied" if needs.copies else ""
    problem = f"{limit} is {most}, of which {free} are free: {needs.always} needed{while_copying}"
    is_short = free < needs.always or is_copying
    yield (error if is_short else warning)(place, problem, fix)
