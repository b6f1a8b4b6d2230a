"""A table: columns on both sides, errors with their fix, quarantine, and requests."""

from typing import Any, Final

from fastapi import APIRouter, Request, Response
from starlette.datastructures import FormData

from streamer.admin.live import status_view
from streamer.admin.live.charts import TABLE_CHARTS, ChartView, chart_view
from streamer.admin.live.problem_view import problems_of_table
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.mapping import api_models
from streamer.admin.page.events_page import outcome_text
from streamer.admin.page.overview_page import find_source
from streamer.admin.page.page_frame import (
    Frame,
    Row,
    form_text,
    is_refresh,
    row_number,
)
from streamer.admin.service.access import actor_of
from streamer.admin.service.end_session import end_session
from streamer.commands.quarantined_rows import Choice
from streamer.control.resync_options import Mode, Resync
from streamer.copy.resync_scope import read_names
from streamer.errors.error_classes import (
    InvalidError,
    MappingError,
    NotFoundError,
    StreamerError,
)
from streamer.mapping.relation_names import parse_name
from streamer.mapping.rules import SourceLabel

QUARANTINE_MAX: Final = 100
_DONE: Final = {
    "pause": "Pause requested",
    "resume": "Resume requested",
    "skip": "Resume requested, without the deletes of the transaction",
    "resync": "Copy requested; the other tables keep streaming",
    "repair": "Repair begun: streamer compares, copies the rows that differ, and compares again",
}


def routes(frame: Frame, status: StatusReader) -> APIRouter:
    router = frame.router()

    @router.get("/table")
    async def table(request: Request) -> Response:
        source, reason = await find_source(frame, status, request.query_params)
        name = _name(request.query_params.get("name", ""))
        shown = status_view.source_view(source, target=frame.events.target, is_whole=True)
        entry = next((t for t in shown["tables"] if t["source"] == name), None)
        if entry is None:
            raise NotFoundError(
                f'"{shown["label"]}" streams no table "{name}"',
                hint="the overview lists its tables",
            )
        (entry,) = status_view.with_activity(shown | {"tables": [entry]}, frame.events.activity)[
            "tables"
        ]
        rows = (await frame.service.store.content())["tables"]
        databases = (await frame.service.store.content())["databases"]
        ids = {row["id"] for row in databases if row["name"] == source["database"]}
        key = (source["database"], source["sid"], name)
        attention = problems_of_table(source, name, frame.events.target)
        return await frame.page(
            request,
            "table.html",
            source=shown,
            table=entry,
            attention=attention,
            repair=frame.service.repairs.state(key),
            repair_failure=frame.service.repairs.failure(key),
            trends=None if is_refresh(request) else _charts(frame, source, name),
            errors=frame.events.errors(shown["label"], name),
            rule=status_view.rule_of((row for row in rows if row["database_id"] in ids), name),
            quarantine=await _quarantine(frame, source, name),
            sides=None if is_refresh(request) else await _sides(frame, source, name, attention),
            reason=reason,
            modes=[mode.value for mode in Mode],
        )

    @router.post("/table/act")
    async def act(request: Request) -> Response:
        form = await request.form()
        database, sid, name = _which(form)
        action = form_text(form, "action")
        options = None
        if action not in _DONE:
            raise InvalidError("action: unknown")
        done = _DONE[action]
        if action == "resync":
            options = _resync(form).to_json()
        if action == "skip":
            action, options = "resume", {"skip_deletes": True}
        if action == "repair":
            await frame.service.repairs.start((database, sid, name), actor_of(request))
        else:
            await frame.service.request_for_table(
                action, database, sid, name, actor_of(request), options
            )
        status.forget()
        return frame.redirect(_address(database, sid, name), done)

    @router.post("/session/end")
    async def end(request: Request) -> Response:
        form = await request.form()
        pid = row_number(form_text(form, "pid"), "pid")
        back = _address(*_which(form)) if form_text(form, "name") else "/"
        await end_session(frame.service, pid, actor_of(request))
        status.forget()
        return frame.redirect(back, f"Session {pid} ends")

    @router.post("/table/quarantine")
    async def quarantine(request: Request) -> Response:
        form = await request.form()
        database, sid, name = _which(form)
        action = form_text(form, "action")
        if action not in ("retry", "drop"):
            raise InvalidError("action: unknown")
        back = f"{_address(database, sid, name)}"
        ids = tuple(row_number(str(text), "id") for text in form.getlist("id"))
        if form_text(form, "which") == "all":
            ids = ()
        elif not ids:
            return frame.redirect(back, "Select changes, or choose all", "warning")
        choice = Choice(str(parse_name(name)), database, sid, ids)
        requested = await frame.service.request_quarantine_action(action, choice, actor_of(request))
        count = sum(relation["changes"] for relation in requested)
        status.forget()
        return frame.redirect(back, outcome_text(action, count))

    return router


def _charts(frame: Frame, source: Row, table: str) -> ChartView:
    label = SourceLabel(source["database"], source["sid"])
    names = {"database": source["database"], "sid": source["sid"], "table": table}
    history = status_view.address("/api/sources/history/table", **names)
    return chart_view(TABLE_CHARTS, frame.events.history.table_columns(label, table), history)


def _name(text: str) -> str:
    try:
        return str(parse_name(text))
    except MappingError as exc:
        raise InvalidError(f"name: {exc.message}", hint=exc.hint) from None


def _which(form: Any) -> tuple[str, str | None, str]:
    """Return database, sid and table of a form."""
    return (
        form_text(form, "database"),
        form_text(form, "sid") or None,
        _name(form_text(form, "name")),
    )


def _resync(form: FormData) -> Resync:
    """Read the resync of a form. Raises InvalidError."""
    values: Row = {
        "mode": form_text(form, "mode") or Mode.RELOAD,
        "force": form_text(form, "force") == "on",
        "skip_changes": form_text(form, "skip_changes") == "on",
        "where": form_text(form, "where").strip() or None,
    }
    if columns := form_text(form, "columns").strip():
        try:
            values["columns"] = list(read_names(columns))
        except MappingError as exc:
            raise InvalidError(exc.message, hint=exc.hint) from None
    return api_models.read_as(api_models.ResyncBody, values).resync()


def _address(database: str, sid: str | None, name: str) -> str:
    return status_view.table_address({"database": database, "sid": sid}, name)


async def _sides(frame: Frame, source: Row, name: str, attention: list[Row]) -> Row:
    """Return the table on both sides, or the reason why it is unavailable.

    The findings of the check omit the problems of *attention*, which the page shows already.
    """
    try:
        seen = await frame.service.read_table_pair(source["database"], source["sid"], name)
    except StreamerError as exc:
        return {"columns": [], "key": [], "identity": None, "findings": [], "error": str(exc)}
    shown = {"; ".join(filter(None, (row["headline"], row["details"]))) for row in attention}
    lines = {
        line for row in attention for part in row["remedy"] for line in part["lines"].splitlines()
    }
    findings = [
        finding
        for finding in seen["findings"]
        if finding["problem"] not in shown
        and not (finding["sql"] and lines.issuperset(f"{sql};" for sql in finding["sql"]))
    ]
    return seen | {"findings": findings, "error": None}


async def _quarantine(frame: Frame, source: Row, name: str) -> Row:
    choice = Choice(name, source["database"], source["sid"])
    try:
        listed = await frame.service.quarantine(choice, QUARANTINE_MAX)
    except StreamerError as exc:
        return {"items": [], "total": 0, "error": str(exc)}
    return listed | {"error": None}
