"""The tenants of each group: add, remove, purge, and where their definitions differ."""

from fastapi import APIRouter, Request, Response

from streamer.admin.access import actor_of
from streamer.admin.page import view
from streamer.admin.page.frame import Frame, Row, form_text
from streamer.admin.page.overview import StatusReader
from streamer.commands.scope import Scope
from streamer.commands.tenants.drift import deviations
from streamer.commands.tenants.listing import PURGING, REMOVED
from streamer.errors import AdminError, StreamerError
from streamer.mapping.rules import SourceLabel


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
            groups=sorted({row["database"] for row in rows if row["state"] not in _LEFT}),
            failure=failure,
        )

    @router.get("/tenants/drift")
    async def drift(request: Request) -> Response:
        database = request.query_params.get("database") or None
        failure, report, items = None, None, []
        try:
            report = await tenants.drift(Scope(database=database))
            items = [
                {"item": item, "who": deviations(item)}
                for item in report.items
                if not item.is_equal
            ]
        except StreamerError as exc:
            failure = exc
        return await frame.page(
            request, "drift.html", report=report, items=items, database=database, failure=failure
        )

    @router.post("/tenants/{action}")
    async def act(request: Request, action: str) -> Response:
        form = await request.form()
        database, sid = form_text(form, "database").strip(), form_text(form, "sid").strip()
        label, actor = SourceLabel(database, sid), actor_of(request)
        try:
            if action == "add":
                done = await tenants.add(database, form_text(form, "url").strip(), sid, actor)
                note = f"{label} is added"
            elif action == "remove":
                done = await tenants.remove(database, sid, actor)
                note = f"{label} is removed; its rows stay until they are purged"
            else:
                await tenants.purge(database, sid, actor)
                done, note = {"next_step": None}, f"The rows of {label} are being deleted"
        except AdminError as exc:
            return frame.redirect("/tenants", str(exc), "bad")
        status.forget()
        if done["next_step"]:
            return frame.redirect("/tenants", f"{note}; {done['next_step']}", "warning")
        return frame.redirect("/tenants", note)

    return router


_LEFT = (REMOVED, PURGING)


def _shown(row: Row) -> Row:
    return row | {
        "label": SourceLabel(row["database"], row["sid"]),
        "address": view.address("/source", database=row["database"], sid=row["sid"]),
        "is_left": row["state"] in _LEFT,
    }
