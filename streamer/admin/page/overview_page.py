"""The overview: sources, progress, and problems."""

from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from streamer.admin.live import fleet_overview, status_view
from streamer.admin.live.charts import FLEET_CHARTS, SOURCE_CHARTS, ChartView, chart_view
from streamer.admin.live.path_of_change import held_of
from streamer.admin.live.problem_view import problems_for_operator
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.page.page_frame import Frame, Row, form_text, is_refresh, row_number
from streamer.admin.service.access import actor_of
from streamer.errors.error_classes import NotFoundError
from streamer.mapping.rules import SourceLabel

TABLES_PER_PAGE: Final = 200
SOURCES_PER_PAGE: Final = 50
CARDS_MAX: Final = 6
"""With more sources, the overview shows a line for each source instead of a card with tables."""


def routes(frame: Frame, status: StatusReader) -> APIRouter:
    router = frame.router()

    @router.get("/")
    async def overview(request: Request) -> Response:
        count = len(frame.service.mapping.sources)
        if count > CARDS_MAX or request.query_params.get("view") == "wall":
            return await _fleet_page(frame, status, request)
        return await _cards(frame, status, request)

    @router.get("/source")
    async def source_page(request: Request) -> Response:
        source, reason = await find_source(frame, status, request.query_params)
        target = frame.events.target
        (source,) = status_view.with_own_state([source], frame.events.source_states())
        label = SourceLabel(source["database"], source["sid"])
        text = request.query_params.get("q", "")[:200]
        number = row_number(request.query_params.get("page", "1"), "page")
        state = _state_of(request)
        shown = status_view.source_view(source, target=target, is_whole=True, state=state)
        matches = status_view.matching(shown["tables"], text)
        part = matches[(number - 1) * TABLES_PER_PAGE : number * TABLES_PER_PAGE]
        choice = {"database": source["database"], "sid": source["sid"], "q": text or None}
        return await frame.page(
            request,
            "source.html",
            source=status_view.with_activity(shown | {"tables": part}, frame.events.activity),
            trends=None if is_refresh(request) else _source_charts(frame, source),
            attention=problems_for_operator([source], target),
            states=status_view.state_filter([source], state, "/source", **choice),
            copies=status_view.copy_progress([source]),
            shown_state=state,
            page_address=status_view.address("/source", **choice, state=state or None),
            errors=frame.events.errors(label),
            reason=reason,
            search=text,
            count=len(matches),
            total=len(source["tables"]),
            number=number,
            has_more=number * TABLES_PER_PAGE < len(matches),
        )

    @router.post("/source/restart")
    async def restart(request: Request) -> Response:
        form = await request.form()
        database, sid = form_text(form, "database"), form_text(form, "sid") or None
        await frame.service.restart(database, sid, actor_of(request))
        status.forget()
        back = status_view.address("/source", database=database, sid=sid)
        return frame.redirect(back, "Restart requested; the other sources continue")

    return router


def _source_charts(frame: Frame, source: Row) -> ChartView:
    label = SourceLabel(source["database"], source["sid"])
    names = {"database": source["database"], "sid": source["sid"]}
    history = status_view.address("/api/sources/history", **names)
    return chart_view(SOURCE_CHARTS, frame.events.history.columns(label), history, label)


async def _fleet_charts(frame: Frame, request: Request) -> ChartView | None:
    """Return the charts of the fleet; None for a refresh, because a script draws the charts."""
    if is_refresh(request):
        return None
    # The first totals of many sources take a moment, and the event loop also streams.
    columns = await in_admin_thread(frame.events.history.fleet_columns)
    return chart_view(FLEET_CHARTS, columns, "/api/fleet/history")


async def _cards(frame: Frame, status: StatusReader, request: Request) -> Response:
    """Show each source with its tables."""
    sources, reason = await status.read()
    is_empty = not sources and not frame.service.is_static
    databases: list[Row] = []
    if is_empty:
        databases = (await frame.service.store.content())["databases"]
    target = frame.events.target
    state = _state_of(request)
    sources = status_view.with_own_state(sources, frame.events.source_states())
    return await frame.page(
        request,
        "overview.html",
        target=target,
        card=await frame.target_card.view(held_of(sources)) if sources else None,
        trends=await _fleet_charts(frame, request) if sources else None,
        sources=[
            status_view.with_activity(
                status_view.source_view(source, target=target, state=state), frame.events.activity
            )
            for source in sources
        ],
        attention=problems_for_operator(sources, target),
        states=status_view.state_filter(sources, state, "/"),
        copies=status_view.copy_progress(sources),
        shown_state=state,
        summary=status_view.summary(sources, target),
        reason=reason,
        is_empty=is_empty,
        databases=databases,
        given={},
        failure=None,
    )


def line_filter(parameters: Any) -> fleet_overview.LineFilter:
    """Return the filter that a page's address names; an unknown value means no filter."""
    health, sort = parameters.get("health", ""), parameters.get("sort", "")
    return fleet_overview.LineFilter(
        text=parameters.get("q", "")[:200],
        health=health if health in fleet_overview.HEALTHS else "",
        database=parameters.get("database", "")[:300],
        sort=sort if sort in fleet_overview.SORTS else "need",
        is_grouped=parameters.get("group") == "database",
    )


def overview_address(choice: fleet_overview.LineFilter, **changes: Any) -> str:
    """Return the address of the fleet overview with *choice*, and *changes* of parameters."""
    parameters = {
        "view": "wall",
        "q": choice.text,
        "health": choice.health,
        "database": choice.database,
        "sort": "" if choice.sort == "need" else choice.sort,
        "group": "database" if choice.is_grouped else "",
    } | changes
    return status_view.address("/", **{name: value or None for name, value in parameters.items()})


async def _fleet_page(frame: Frame, status: StatusReader, request: Request) -> Response:
    """Show a line for each source, first the sources that need an operator."""
    seen, reason = await status.fleet()
    choice = line_filter(request.query_params)
    number = row_number(request.query_params.get("page", "1"), "page")
    shown_lines = fleet_overview.choose(seen, choice)
    part = shown_lines[(number - 1) * SOURCES_PER_PAGE : number * SOURCES_PER_PAGE]
    all_healths = replace(choice, health="")
    counts = fleet_overview.count_healths(fleet_overview.choose(seen, all_healths))
    target = frame.events.target
    return await frame.page(
        request,
        "wall.html",
        target=target,
        card=await frame.target_card.view(seen.held),
        trends=await _fleet_charts(frame, request),
        is_confirmed=not target["error"],
        attention=problems_for_operator([], target),
        lines=[line.row | {"shown_state": line.shown_state} for line in part],
        spark=frame.events.history.spark,
        groups=fleet_overview.groups(shown_lines) if choice.is_grouped else {},
        healths=[
            {
                "health": health,
                "count": count,
                "is_chosen": health == choice.health,
                "address": overview_address(choice, health=health),
            }
            for health, count in [("", sum(counts.values())), *counts.items()]
        ],
        databases=seen.databases,
        is_shared=seen.is_shared,
        sorts={sort: overview_address(choice, sort=sort) for sort in fleet_overview.SORTS},
        choice=choice,
        copies=seen.copies,
        queue=seen.queue,
        summary=seen.summary,
        reason=reason,
        number=number,
        count=len(shown_lines),
        total=len(seen.lines),
        before=overview_address(choice, page=number - 1) if number > 1 else None,
        after=overview_address(choice, page=number + 1)
        if number * SOURCES_PER_PAGE < len(shown_lines)
        else None,
    )


def _state_of(request: Request) -> str:
    """Return the requested state of tables; an unknown value means all states."""
    state = request.query_params.get("state", "")
    return state if state in status_view.SHOWN_STATES else ""


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
