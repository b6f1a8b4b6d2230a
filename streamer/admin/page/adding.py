"""A source in three steps: its connection, its tables, the plan.

What is said goes into the draft at once, so each step can be left and come back to, and a password
is sent once and never comes back.
"""

from typing import Any

from fastapi import APIRouter, Request, Response

from streamer.admin.page import forms
from streamer.admin.page.frame import Frame, Row, actor_of, form_text, row_number
from streamer.admin.page.mapping import (
    FIELDS,
    Number,
    full_url,
    of_database,
    plainly,
    server_line,
    shown_url,
)
from streamer.errors import AdminError, InvalidError, StreamerError


def routes(frame: Frame) -> APIRouter:
    router = frame.router()
    _add_connection(router, frame)
    _add_tables(router, frame)
    return router


def _add_connection(router: APIRouter, frame: Frame) -> None:
    service = frame.service

    async def show(
        request: Request, given: Row, failure: Row | None = None, status: int = 200
    ) -> Response:
        databases = (await service.store.content())["databases"]
        return await frame.page(
            request,
            "connection.html",
            status=status,
            databases=databases,
            given=given,
            failure=failure,
        )

    @router.get("/sources/new")
    async def new_source(request: Request) -> Response:
        return await show(request, {"database": request.query_params.get("database", "")[:200]})

    @router.post("/sources/new")
    async def add_source(request: Request) -> Response:
        form = await request.form()
        given = {name: form_text(form, name) for name in ("database", "url", "sid")}
        note = "It is in the draft, and was not tested"
        try:
            name = given["database"].strip()
            if not name:
                raise InvalidError("database: a name is required")
            sid = given["sid"].strip() or None
            url = full_url(given["url"], form_text(form, "password"))
            if form_text(form, "do") != "keep":
                note = server_line(await service.discover(url, None))
            row = await _add_source(frame, name, url, sid, actor_of(request))
        except AdminError as exc:
            field = forms.faulty_field(exc.message, given)
            failure = {"message": str(exc), "field": field, "may_keep": False}
            return await show(request, _without_password(given), failure, exc.status)
        except StreamerError as exc:
            failure = {"message": plainly(exc), "field": "url", "may_keep": True}
            return await show(request, _without_password(given), failure, 422)
        path = f"/databases/{row['database_id']}/tables/new?url_id={row['id']}"
        return frame.redirect(path, note)


async def _add_source(frame: Frame, name: str, url: str, sid: str | None, who: str) -> Row:
    """Add a url, and its database if that is new. Raises AdminError."""
    service = frame.service
    content = await service.store.content()
    known = [row["id"] for row in content["databases"] if row["name"] == name]
    number = known[0] if known else (await service.create("database", {"name": name}, who))["id"]
    try:
        return await service.create("url", {"database_id": number, "url": url, "sid": sid}, who)
    except AdminError:
        if not known:
            await service.delete("database", number, who)
        raise


def _without_password(given: Row) -> Row:
    """Return what was typed, with a password in the url masked: pages hold none."""
    return given | {"url": shown_url(given["url"])}


def _add_tables(router: APIRouter, frame: Frame) -> None:
    service = frame.service

    async def show(
        request: Request,
        number: int,
        url_id: int | None,
        failure: AdminError | None = None,
        given: Row | None = None,
    ) -> Response:
        row = await service.store.get("database", number)
        urls = await of_database(frame, "url", number)
        chosen = next((url for url in urls if url["id"] == url_id), urls[0] if urls else None)
        found, trouble = None, None
        if chosen is not None:
            try:
                found = await service.discover(None, chosen["id"])
            except StreamerError as exc:
                trouble = plainly(exc)
        return await frame.page(
            request,
            "tables.html",
            status=200 if failure is None else failure.status,
            row=row,
            urls=urls,
            chosen=chosen,
            found=found,
            trouble=trouble,
            tables=await of_database(frame, "table", number),
            types=next(field.choices for field in FIELDS["table"] if field.name == "type"),
            failure=failure,
            given=given or {},
        )

    def url_id_of(request: Request) -> int | None:
        text = request.query_params.get("url_id")
        return None if text is None else row_number(text, "url_id")

    @router.get("/databases/{number}/tables/new")
    async def new_tables(request: Request, number: Number) -> Response:
        return await show(request, number, url_id_of(request))

    @router.post("/databases/{number}/tables/new")
    async def add_tables(request: Request, number: Number) -> Response:
        form = await request.form()
        wanted = list(_wanted(form, number))
        url_id = url_id_of(request)
        if not wanted:
            failure = InvalidError("choose at least one table, or write a name or a pattern")
            return await show(request, number, url_id, failure, {"name": form_text(form, "name")})
        refused = []
        for values in wanted:
            try:
                await service.create("table", values, actor_of(request))
            except AdminError as exc:
                refused.append((values, exc))
        if refused:
            values, first = refused[0]
            message = f"{values['name']}: {first.message}"
            if len(wanted) > 1:
                message += f" ({len(wanted) - len(refused)} of {len(wanted)} tables were added)"
            failure = InvalidError(message, hint=first.hint)
            return await show(request, number, url_id, failure, {"name": form_text(form, "name")})
        return frame.redirect("/plan", _added(len(wanted)))


def _added(number: int) -> str:
    return f"{number} {'table is' if number == 1 else 'tables are'} in the draft; nothing runs yet"


def _wanted(form: Any, number: int) -> list[Row]:
    """Return the tables that a form picks, and the one that it names."""
    common = form_text(form, "type")
    wanted = []
    for index in form.getlist("pick"):
        if not isinstance(index, str):
            continue
        values = {
            "database_id": number,
            "schema": form_text(form, f"schema-{index}"),
            "name": form_text(form, f"name-{index}"),
            "type": form_text(form, f"type-{index}") or common,
            "target": form_text(form, f"target-{index}").strip() or None,
        }
        wanted.append(values)
    if name := form_text(form, "name").strip():
        target = form_text(form, "target").strip() or None
        wanted.append({"database_id": number, "name": name, "type": common, "target": target})
    return [{key: value for key, value in row.items() if value != ""} for row in wanted]
