"""Periodic checks that never stop a stream: heartbeats, sequences, new tables, partitions with
rows, and the backlog's size. A check may stop a table.

The checks may wait for a lock of a user's session, though not for long. The guard does not wait for
the checks, see `streamer.runtime.guards.source_monitor`.
"""

import asyncio
from functools import partial
from typing import Final

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_definitions import read_definitions
from streamer.control.table_state import Need, State
from streamer.copy.attached_rows import AttachedRows
from streamer.copy.gap_reports import report_gaps
from streamer.errors.error_classes import SourceContentionError
from streamer.mapping.rule_options import DdlCapture, DdlKind, OnDdl
from streamer.mapping.rules import SourceMapping
from streamer.runtime.guards.table_discovery import Discovery
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.session.sequence_follower import SequenceFollower
from streamer.runtime.session.session import Session
from streamer.runtime.tables.relations import Relations
from streamer.runtime.tables.table_obstacles import Obstacles
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard
from streamer.source.capture.ddl_capture import read_capture, send_baseline
from streamer.source.connection import Connection, fetch_one, plan_once, translating
from streamer.source.server.primary_of_standby import writable
from streamer.source.server.timeline import check_same_server_by_query
from streamer.source.synchronous_commit import LISTED_SQL
from streamer.util.waiting import wait_for_event

log = structlog.get_logger()

CHECK_SECONDS: Final = 5.0
_LOCK_TIMEOUT_SQL: Final = "set lock_timeout = '1s'"
_COMMITS_WAIT_SQL: Final = f"select {LISTED_SQL} as is_listed"


async def check_source(session: Session, heartbeat: Heartbeat, guard: BacklogGuard) -> None:
    """Check the source of *session* until cancelled. Raises SourceConnectionError."""
    source, services, relations = session.tables.source, session.services, session.relations
    bookkeeping, source_id = services.bookkeeping, session.record.source_id
    follower = SequenceFollower(
        source, source_id, bookkeeping, relations, services.target_namespace
    )
    namespace = services.target_namespace
    discovery = Discovery(
        session.tables, services.discovery_interval, services.tables_appeared, namespace
    )
    beats = partial(heartbeat.run, server=session.server, lag=session.lag)
    async with services.sources.connection(source) as plain:  # of the start, whose caches are warm
        await plain.execute(_LOCK_TIMEOUT_SQL)
        await plan_once(plain)
        await check_same_server_by_query(plain, session.server)  # the guard watches this server
        async with asyncio.TaskGroup() as group:
            for name, run in (
                ("heartbeat", beats),
                ("sequences", follower.run),
                ("discovery", discovery.run),
            ):
                group.create_task(run(plain), name=f"{name} {source.label}")
            gaps = _GapCheck(session)
            obstacles = Obstacles(source, bookkeeping, relations)
            while True:
                await obstacles.check_target(services.target.unlogged)
                await gaps.run(plain)
                await _request_unclear_definitions(plain, source, bookkeeping, relations)
                await guard.store(bookkeeping, source_id)
                with translating(source.label):
                    waits = (await fetch_one(plain, _COMMITS_WAIT_SQL))["is_listed"]
                session.position.is_awaited = bool(waits)
                await wait_for_event(session.monitor.changed, session.tables.pause(CHECK_SECONDS))


class _GapCheck:
    """Searches for gaps. Without a gap, searches again only after a change of the catalogs, which
    the guard of the source sees.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._attached = AttachedRows()
        self._complete: tuple[object, ...] | None = None
        """The facts behind the last search, if there was certainly no gap."""

    async def run(self, plain: Connection) -> None:
        session, source = self._session, self._session.tables.source
        session.monitor.changed.clear()
        digest = session.monitor.digest
        relations = {m.relation_id: m for m in session.relations if _may_lack_rows(m)}
        try:
            with translating(source.label):
                captures = source.ddl is DdlCapture.CAPTURE and (
                    (await read_capture(plain, source)).token is not None
                )
                facts = digest, captures, relations.keys()
                if facts == self._complete:
                    return
                copies_rows = captures and source.on_ddl[DdlKind.ATTACH_PARTITION] is OnDdl.APPLY
                is_complete = await report_gaps(
                    session.services.bookkeeping,
                    plain,
                    relations.values(),
                    stop=session.monitor.cases.stop,
                    checks_columns=not captures,
                    attached=self._attached if copies_rows else None,
                )
        except SourceContentionError as exc:
            log.debug("the next check reads the partitions", source=source.label, reason=str(exc))
        else:
            self._complete = facts if is_complete and digest is not None else None


def _may_lack_rows(mapped: MappedRelation) -> bool:
    """Whether to check *mapped* for gaps. With `keys: disjoint`, no change may follow a gap, also
    while the table is behind.
    """
    shown = mapped.state.shown
    is_behind = shown is State.CATCHING_UP and mapped.state.need is Need.NOTHING
    return shown is State.READY or (is_behind and mapped.mapping.rule.is_disjoint)


async def _request_unclear_definitions(
    plain: Connection, source: SourceMapping, bookkeeping: Bookkeeping, relations: Relations
) -> None:
    """Request uncertain definitions.

    The capture lost a message about such a table, or the table's transaction did not see a
    concurrent change of another table.
    """
    doubtful = [mapped for mapped in relations if mapped.is_doubtful]
    if not doubtful:
        return
    async with bookkeeping.connection() as connection:
        stored = await read_definitions(connection, [mapped.relation_id for mapped in doubtful])
    for mapped in doubtful:
        mapped.is_doubtful = False
    definitions = {m.mapping.source: stored.get(m.relation_id) for m in doubtful}
    unsent = set(definitions)
    try:
        with translating(source.label):
            async with writable(source, plain) as writing:
                unsent = await send_baseline(writing, source, definitions)
    finally:  # the next check requests these definitions
        for mapped in doubtful:
            mapped.is_doubtful |= mapped.mapping.source in unsent
