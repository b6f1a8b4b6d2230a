"""The tenants of each group: add, remove, purge, and differences of their definitions."""

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter, Request, Response

from streamer.admin.live import status_view
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.mapping import api_models
from streamer.admin.page.page_frame import Frame, Row, form_text
from streamer.admin.service.access import actor_of
from streamer.commands.tenants.tenant_drift import deviations
from streamer.commands.tenants.tenant_list import PURGING, REMOVED
from streamer.errors.error_classes import AdminError, StreamerError
from streamer.mapping.rules import SourceLabel
from streamer.mapping.scope import Scope

_REMOVED_STATES: Final = (REMOVED, PURGING)
Work = Callable[[str, str, str, str], Awaitable[str | None]]
"""Changes a tenant, by database, sid, url and actor; returns the operator's next step."""


def routes(frame: Frame, status: StatusReader) -> APIRouter:
    router = frame.router()
    tenants = frame.service.tenants

    @router.get("/tenants")
    async def list_tenants(request: Request) -> Response:
        failure, rows = None, []
        try:
            rows = await tenants.list()
        except StreamerError as exc:
            failure = exc
        return await frame.page(
            request,
            "tenants.html",
            tenants=[_shown(row) for row in rows],
            groups=sorted({row["database"] for row in rows if row["state"] not in _REMOVED_STATES}),
            failure=failure,
        )

    @router.get("/tenants/drift")
    async def drift(request: Request) -> Response:
        database = request.query_params.get("database") or None
        failure, report, items = None, None, []
        try:
            report = await tenants.drift(Scope(database=database))
            items = [
                {"item": item, "deviations": deviations(item)}
                for item in report.items
                if not item.is_equal
            ]
        except StreamerError as exc:
            failure = exc
        return await frame.page(
            request, "drift.html", report=report, items=items, database=database, failure=failure
        )

    async def act(request: Request, work: Work, note: str) -> Response:
        form = await request.form()
        database, sid = form_text(form, "database").strip(), form_text(form, "sid").strip()
        url = form_text(form, "url").strip()
        try:
            next_step = await work(database, sid, url, actor_of(request))
        except AdminError as exc:
            return frame.redirect("/tenants", str(exc), "bad")
        status.forget()
        words = f"{SourceLabel(database, sid)}: {note}"
        if next_step:
            return frame.redirect("/tenants", f"{words}; {next_step}", "warning")
        return frame.redirect("/tenants", words)

    @router.post("/tenants/add")
    async def add(request: Request) -> Response:
        async def work(database: str, sid: str, url: str, actor: str) -> str | None:
            values = {"database": database, "sid": sid, "url": url}
            body = api_models.validate_as(api_models.NewTenantBody, values)
            done = await tenants.add(body["database"], body["url"], body["sid"], actor)
            return next_step_of(done)

        return await act(request, work, "added")

    @router.post("/tenants/remove")
    async def remove(request: Request) -> Response:
        async def work(database: str, sid: str, url: str, actor: str) -> str | None:
            del url
            return next_step_of(await tenants.remove(database, sid, actor))

        return await act(request, work, "removed; its rows stay until they are purged")

    @router.post("/tenants/purge")
    async def purge(request: Request) -> Response:
        async def work(database: str, sid: str, url: str, actor: str) -> str | None:
            del url
            remaining = await tenants.purge(database, sid, actor)
            return "; ".join(map(str, remaining)) or None

        return await act(request, work, "its rows are being deleted")

    return router


def next_step_of(done: Row) -> str | None:
    """Return the operator's next step after a change."""
    step: str | None = done["next_step"]
    return step


def _shown(row: Row) -> Row:
    of_source = {"database": row["database"], "sid": row["sid"]}
    if row["source"] is not None:
        of_source |= {"sid": row["source_sid"], "q": row["sid"]}
    return row | {
        "label": SourceLabel(row["database"], row["sid"]),
        "address": status_view.address("/source", **of_source),
        "is_removed": row["state"] in _REMOVED_STATES,
    }
