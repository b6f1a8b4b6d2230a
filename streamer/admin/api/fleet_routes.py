"""Routes about many sources: the list, the history, and requests for many tables at once."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from streamer.admin.api.request_parameters import PageNumber, PerPage, Search, Text
from streamer.admin.live.events import Events
from streamer.admin.live.fleet_overview import LineFilter, choose
from streamer.admin.live.source_history import Columns
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.mapping import api_models
from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.service.access import actor_of
from streamer.admin.service.act_on_many_sources import act_on_sources
from streamer.admin.service.admin_service import AdminService
from streamer.commands.table_requests import SourceKey
from streamer.control.resync_options import Resync
from streamer.mapping.relation_names import parse_name

Health = Annotated[Literal["bad", "warning", "busy", "good", "quiet"] | None, Query()]
SourceSort = Annotated[
    Literal["need", "name", "lag", "wal"],
    Query(description="`need`: sources with problems first."),
]

Since = Annotated[float, Query(ge=0, description="Unix time.")]


def add_fleet(
    router: APIRouter, service: AdminService, events: Events, status: StatusReader
) -> None:
    """Add the routes about many sources."""
    _add_views(router, service, events, status)
    _add_actions(router, service, status)


def _add_views(
    router: APIRouter, service: AdminService, events: Events, status: StatusReader
) -> None:
    @router.get("/sources", tags=["servers"], response_model=api_models.FleetPage)
    async def list_sources(
        page: PageNumber = 1,
        per_page: PerPage = 50,
        sort: SourceSort = "need",
        q: Search = None,
        health: Health = None,
        database: Text = None,
    ) -> Any:
        """List the sources, without their tables."""
        fleet, _ = await status.fleet()
        lines = choose(fleet, LineFilter(q or "", health or "", database or "", sort))
        part = lines[(page - 1) * per_page : page * per_page]
        return {
            "items": [line.row for line in part],
            "total": len(lines),
            "page": page,
            "per_page": per_page,
            "summary": fleet.summary,
            "healths": fleet.healths,
        }

    @router.get("/sources/history", tags=["servers"], response_model=api_models.HistoryAnswer)
    async def history(
        database: Annotated[str, Query(max_length=300)],
        sid: Text = None,
        since: Since = 0.0,
    ) -> Any:
        """Return lag, rate and retained WAL of a source over the last day."""
        label = service.source(database, sid).label
        return _history(events, events.history.columns(label, since), label)

    @router.get(
        "/sources/history/table", tags=["servers"], response_model=api_models.TableHistoryAnswer
    )
    async def table_history(
        database: Annotated[str, Query(max_length=300)],
        table: Annotated[str, Query(max_length=300)],
        sid: Text = None,
        since: Since = 0.0,
    ) -> Any:
        """Return lag, rate and held bytes of a table over the last day.

        The process keeps the history of 256 tables, from the first request or change of a table on.
        """
        label = service.source(database, sid).label
        name = str(parse_name(table))
        return _history(events, events.history.table_columns(label, name, since), label, name)

    @router.get("/fleet/history", tags=["servers"], response_model=api_models.FleetHistoryAnswer)
    async def fleet_history(since: Since = 0.0) -> Any:
        """Return the highest lag, the rate and the retained WAL of all sources over the last day.

        `p50_seconds` and similar fields are quantiles of the time from a commit to its visibility,
        for the sources of this process.
        """
        columns = await in_admin_thread(events.history.fleet_columns, since)
        return _history(events, columns)


def _history(
    events: Events, columns: Columns, source: str | None = None, table: str | None = None
) -> dict[str, Any]:
    names = {"source": source, "table": table}
    return (
        columns
        | {name: value for name, value in names.items() if value is not None}
        | {"marks": events.marks(source, table)}
    )


def _add_actions(router: APIRouter, service: AdminService, status: StatusReader) -> None:
    async def act(
        request: Request, action: str, values: api_models.BulkBody, options: dict[str, Any] | None
    ) -> dict[str, Any]:
        outcomes = await act_on_sources(
            service,
            action,
            [SourceKey(source.database, source.sid) for source in values.sources],
            actor_of(request),
            tables=values.tables,
            state=values.state,
            options=options,
        )
        status.forget()
        outcomes.sort(key=lambda outcome: outcome.error is None)
        return {
            "action": action,
            "tables": sum(outcome.tables for outcome in outcomes),
            "failed": sum(outcome.error is not None for outcome in outcomes),
            "sources": [outcome.to_json() for outcome in outcomes],
        }

    @router.post("/sources/restart", tags=["servers"], status_code=202)
    async def restart_source(request: Request, values: api_models.SourceName) -> dict[str, Any]:
        """Restart the work on a running source; other sources continue.

        `GET /audit` and `streamer requests` show the outcome.
        """
        requested = await service.restart(values.database, values.sid, actor_of(request))
        status.forget()
        return requested

    @router.post(
        "/sources/pause", tags=["servers"], status_code=202, response_model=api_models.BulkAnswer
    )
    async def pause_sources(request: Request, values: api_models.BulkBody) -> Any:
        """Hold the changes of tables of many sources."""
        return await act(request, "pause", values, None)

    @router.post(
        "/sources/resume", tags=["servers"], status_code=202, response_model=api_models.BulkAnswer
    )
    async def resume_sources(request: Request, values: api_models.BulkBody) -> Any:
        """Resume the paused and failed tables of many sources.

        A table that waits before a mass delete needs a request of its own.
        """
        return await act(request, "resume", values, None)

    @router.post(
        "/sources/resync", tags=["servers"], status_code=202, response_model=api_models.BulkAnswer
    )
    async def resync_sources(request: Request, values: api_models.BulkResyncBody) -> Any:
        """Copy tables of many sources again."""
        resync = Resync(values.mode, values.force, skips_changes=values.skip_changes)
        return await act(request, "resync", values, resync.to_json())
