"""The overview: sources, their progress, and problems."""

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from streamer.admin.page import view
from streamer.admin.page.attention import attention
from streamer.admin.page.frame import Frame, Row, row_number
from streamer.error_reports import ErrorReport, error_fields
from streamer.errors import NotFoundError, StreamerError
from streamer.mapping.rules import SourceLabel
from streamer.runtime.target_watch import TargetState

KEEP_SECONDS: Final = 2.0
"""The maximum age of a status: many pages may be open, and each status asks every source."""
TABLES_PER_PAGE: Final = 200
_WITHOUT_STATUS: Final = (
    TargetState.UNREACHABLE,
    TargetState.REFUSED,
    TargetState.ERROR,
)
"""States of the target without readable bookkeeping."""
WAIT_SECONDS: Final = 3.0
"""How long a page waits for it; a source that is out of reach keeps it much longer."""


class StatusReader:
    """Reads the status for every page, once at a time."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._task: asyncio.Task[Row] | None = None
        self._read_at = float("-inf")
        self._last: Row | None = None

    async def read(self) -> tuple[list[Row], str | None]:
        """Return the sources, and why they may not be as they are now."""
        if self._task is None and self._now() - self._read_at > KEEP_SECONDS:
            self._task = asyncio.create_task(self._frame.service.status(), name="status")
        reason = None
        if (task := self._task) is not None:
            await asyncio.wait([task], timeout=WAIT_SECONDS)
            if not task.done():
                reason = "a server takes long to answer"
            else:
                if self._task is task:
                    self._task, self._read_at = None, self._now()
                try:
                    self._last = task.result()
                except StreamerError as exc:
                    self._last, self._read_at = None, float("-inf")
                    return self._known(), str(exc)
                if self._last["target"]["state"] in _WITHOUT_STATUS:
                    reason, self._last = str(self._last["target"]["error"]), None
                    return self._known(), reason
        if self._last is None or not self._is_current(self._last):
            return self._known(), reason
        sources: list[Row] = self._last["sources"]
        return sources, reason

    def forget(self) -> None:
        """Let the next page read the status again, because it has changed."""
        self._read_at = float("-inf")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _is_current(self, status: Row) -> bool:
        """Whether it is of the mapping that runs."""
        labels = [source.label for source in self._frame.service.mapping.sources]
        read = [SourceLabel(row["database"], row["sid"]) for row in status["sources"]]
        return read == labels

    def _known(self) -> list[Row]:
        """Return the facts that only this process has."""
        states = self._frame.events.known_states()
        found = []
        for source in self._frame.service.mapping.sources:
            state, error = states.get((source.label, None), ("not started", None))
            tables = [
                _known_table(table, *known)
                for (label, table), known in states.items()
                if label == source.label and table is not None
            ]
            found.append(
                {
                    "database": source.database,
                    "sid": source.sid,
                    "state": state,
                    "slot": source.slot,
                    **error_fields(error),
                    "hint": None,
                    "lag_bytes": None,
                    "lag_seconds": None,
                    "retained_wal_bytes": None,
                    "confirmed_flush_lsn": None,
                    "process": None,
                    "tables": sorted(tables, key=lambda table: str(table["source"])),
                }
            )
        return found


def _known_table(table: str, state: str, error: ErrorReport | None) -> Row:
    return {
        "source": table,
        "target": None,
        "type": None,
        "state": state,
        **error_fields(error),
        "end_lsn": None,
        "rows_copied": None,
        "rows_total": None,
        "quarantined": 0,
    }


def routes(frame: Frame, status: StatusReader) -> APIRouter:
    router = frame.router()

    @router.get("/")
    async def overview(request: Request) -> Response:
        sources, reason = await status.read()
        is_empty = not sources and not frame.service.is_static
        databases: list[Row] = []
        if is_empty:
            databases = (await frame.service.store.content())["databases"]
        target = frame.events.target
        state = _wanted_state(request)
        sources = view.with_own_state(sources, frame.events.known_states())
        return await frame.page(
            request,
            "overview.html",
            target=target,
            sources=[
                view.with_activity(
                    view.source_view(source, target=target, state=state), frame.events.activity
                )
                for source in sources
            ],
            attention=attention(sources, target),
            states=view.state_filter(sources, state, "/"),
            copies=view.copy_progress(sources),
            state_wanted=state,
            summary=view.summary(sources, target),
            reason=reason,
            is_empty=is_empty,
            databases=databases,
            given={},
            failure=None,
        )

    @router.get("/source")
    async def one_source(request: Request) -> Response:
        source, reason = await find_source(frame, status, request.query_params)
        target = frame.events.target
        (source,) = view.with_own_state([source], frame.events.known_states())
        label = SourceLabel(source["database"], source["sid"])
        wanted = request.query_params.get("q", "")[:200]
        number = row_number(request.query_params.get("page", "1"), "page")
        state = _wanted_state(request)
        shown = view.source_view(source, target=target, is_whole=True, state=state)
        found = view.matching(shown["tables"], wanted)
        part = found[(number - 1) * TABLES_PER_PAGE : number * TABLES_PER_PAGE]
        given = {"database": source["database"], "sid": source["sid"], "q": wanted or None}
        return await frame.page(
            request,
            "source.html",
            source=view.with_activity(shown | {"tables": part}, frame.events.activity),
            trends=frame.events.trends(label),
            attention=attention([source], target),
            states=view.state_filter([source], state, "/source", **given),
            copies=view.copy_progress([source]),
            state_wanted=state,
            here=view.address("/source", **given, state=state or None),
            errors=frame.events.errors(label),
            reason=reason,
            wanted=wanted,
            count=len(found),
            total=len(source["tables"]),
            number=number,
            has_more=number * TABLES_PER_PAGE < len(found),
        )

    return router


def _wanted_state(request: Request) -> str:
    """Return the requested state of tables; any other word means all."""
    state = request.query_params.get("state", "")
    return state if state in view.FILTER_STATES else ""


async def find_source(
    frame: Frame, status: StatusReader, parameters: Any
) -> tuple[Row, str | None]:
    """Return the source that a page is about. Raises NotFoundError."""
    database, sid = parameters.get("database", ""), parameters.get("sid") or None
    sources, reason = await status.read()
    for source in sources:
        if (source["database"], source["sid"]) == (database, sid):
            return source, reason
    raise NotFoundError(
        f'no source "{SourceLabel(database, sid)}" runs',
        hint="the overview lists the running sources",
    )
