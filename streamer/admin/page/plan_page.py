"""Plan, apply and discard of the draft, and the history of the mapping."""

import hashlib
import hmac
import json
from typing import Final

from fastapi import APIRouter, Request, Response

from streamer.admin.live import status_view
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.mapping.admin_store import Query
from streamer.admin.mapping.mapping_rows import Content
from streamer.admin.page.page_frame import Frame, Row, form_text, row_number
from streamer.admin.service.access import actor_of
from streamer.errors.error_classes import StreamerError

HISTORY_PAGE: Final = 50


def routes(frame: Frame, status: StatusReader) -> APIRouter:
    router = frame.router()
    service = frame.service

    @router.get("/plan")
    async def plan(request: Request) -> Response:
        content = await service.store.content()
        shown, failure = None, None
        try:
            shown = status_view.plan_view((await service.plan()).to_json())
        except StreamerError as exc:
            failure = exc
        return await frame.page(
            request,
            "plan.html",
            plan=shown,
            failure=failure,
            mark=fingerprint_of(content),
            is_empty=not content["databases"],
        )

    @router.post("/apply")
    async def apply(request: Request) -> Response:
        form = await request.form()
        mark = fingerprint_of(await service.store.content())
        if not hmac.compare_digest(form_text(form, "mark").encode(errors="replace"), mark.encode()):
            return frame.redirect(
                "/plan", "The draft has changed in the meantime: this is its new plan", "warning"
            )
        result = await service.apply(actor_of(request), force=form_text(form, "force") == "on")
        status.forget()
        note = f"Revision {result['revision']} is now running"
        if result["warning"]:
            return frame.redirect("/", f"{note}, but: {result['warning']}", "warning")
        return frame.redirect("/", note)

    @router.post("/discard")
    async def discard(request: Request) -> Response:
        await service.discard(actor_of(request))
        return frame.redirect(
            "/mapping", "The draft is discarded: it equals the applied revision again"
        )

    @router.get("/history")
    async def history(request: Request) -> Response:
        page = row_number(request.query_params.get("page", "1"), "page")
        page = min(page, 1_000_000)
        entries, total = await service.audit(Query(page, HISTORY_PAGE))
        return await frame.page(
            request,
            "history.html",
            entries=[entry | {"changes": differences(entry)} for entry in entries],
            number=page,
            has_more=page * HISTORY_PAGE < total,
        )

    @router.get("/export")
    async def export(request: Request) -> Response:
        text, variables = await service.export()
        return await frame.page(request, "export.html", yaml=text, variables=variables)

    return router


def fingerprint_of(content: Content) -> str:
    """Return a fingerprint of a draft: `apply` refuses a draft whose plan the user has not seen."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differences(entry: Row) -> list[tuple[str, str, str]]:
    """Return the changed fields of an audit entry: name, former value, new value."""
    former, latter = entry["before"] or {}, entry["after"] or {}
    names = [name for name in {**former, **latter} if name not in ("id", "database_id", "database")]
    return [
        (name, _shown(former.get(name)), _shown(latter.get(name)))
        for name in names
        if former.get(name) != latter.get(name) and (former.get(name) or latter.get(name))
    ]


def _shown(value: object) -> str:
    if value is None or value in ([], {}, ""):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
