"""Adds a source in three steps: the connection, the tables, the plan.

The process remembers the connection until the operator has chosen the tables; then connection and
tables go into the draft in a single transaction. An abandoned wizard writes no row. The browser
gets a random name for the connection, and never receives the password.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from streamer.admin.live.status_view import address
from streamer.admin.page import settings_forms
from streamer.admin.page.mapping_page import (
    FIELDS,
    Number,
    error_text,
    full_url,
    of_database,
    server_line,
    shown_url,
)
from streamer.admin.page.page_frame import Frame, Row, form_text, row_number
from streamer.admin.service.access import actor_of
from streamer.errors.error_classes import AdminError, InvalidError, StreamerError
from streamer.postgres.secret import Secret

CONNECTIONS_MAX: Final = 100
CONNECTION_SECONDS: Final = 3600.0
"""How long the process remembers a connection without tables."""
_NONE_CHOSEN: Final = "choose at least one table, or enter a name or a pattern"


@dataclass(frozen=True, slots=True)
class Connection:
    """The first step of the wizard."""

    actor: str
    database: str
    url: Secret
    sid: str | None
    at: float

    def to_row(self) -> Row:
        """Return the url as a row of the draft, with the password."""
        return {"url": self.url.reveal(), "sid": self.sid}


class Connections:
    """Connections whose tables the operator has yet to choose, by random names; in memory only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, Connection] = OrderedDict()

    def add(self, actor: str, database: str, url: str, sid: str | None) -> str:
        """Keep a connection in memory; return the name for `find`."""
        name = secrets.token_urlsafe(16)
        self._known[name] = Connection(actor, database, Secret(url), sid, self._clock())
        self._forget_old()
        return name

    def find(self, name: str, actor: str) -> Connection | None:
        """Return a connection of *actor*; None if too old, or made by another user."""
        self._forget_old()
        connection = self._known.get(name)
        return connection if connection is not None and connection.actor == actor else None

    def remove(self, name: str) -> None:
        self._known.pop(name, None)

    def _forget_old(self) -> None:
        oldest = self._clock() - CONNECTION_SECONDS
        for name, connection in list(self._known.items()):
            if connection.at < oldest or len(self._known) > CONNECTIONS_MAX:
                del self._known[name]


def routes(frame: Frame) -> APIRouter:
    router = frame.router()
    connections = Connections()
    _add_connection(router, frame, connections)
    _add_first_tables(router, frame, connections)
    _add_tables(router, frame)
    return router


def _add_connection(router: APIRouter, frame: Frame, connections: Connections) -> None:
    service = frame.service

    async def show(
        request: Request, typed: Row, failure: Row | None = None, status: int = 200
    ) -> Response:
        databases = (await service.store.content())["databases"]
        return await frame.page(
            request,
            "connection.html",
            status=status,
            databases=databases,
            given=typed,
            failure=failure,
        )

    @router.get("/sources/new")
    async def new_source(request: Request) -> Response:
        return await show(request, {"database": request.query_params.get("database", "")[:200]})

    @router.post("/sources/new")
    async def add_source(request: Request) -> Response:
        form = await request.form()
        typed = {name: form_text(form, name) for name in ("database", "url", "sid")}
        note = "The connection was not tested"
        try:
            database = typed["database"].strip()
            if not database:
                raise InvalidError("database: a name is required")
            sid = typed["sid"].strip() or None
            url = full_url(typed["url"], form_text(form, "password"))
            await service.check_source(database, {"url": url, "sid": sid})
            if form_text(form, "do") != "keep":
                note = server_line(await service.discover(url, None, actor_of(request)))
        except AdminError as exc:
            field = settings_forms.faulty_field(exc.message, typed)
            failure = {"message": str(exc), "field": field, "may_keep": False}
            return await show(request, _without_password(typed), failure, exc.status)
        except StreamerError as exc:
            failure = {"message": error_text(exc), "field": "url", "may_keep": True}
            return await show(request, _without_password(typed), failure, 422)
        name = connections.add(actor_of(request), database, url, sid)
        return frame.redirect(address("/sources/new/tables", connection=name), note)


def _add_first_tables(router: APIRouter, frame: Frame, connections: Connections) -> None:
    service = frame.service

    async def show(
        request: Request,
        connection: Connection,
        failure: AdminError | None = None,
        typed: Row | None = None,
    ) -> Response:
        databases = (await service.store.content())["databases"]
        number = next((r["id"] for r in databases if r["name"] == connection.database), None)
        discovered, problem = None, None
        try:
            discovered = await service.discover(
                connection.url.reveal(), None, actor_of(request), database=number
            )
        except StreamerError as exc:
            problem = error_text(exc)
        return await frame.page(
            request,
            "tables.html",
            status=200 if failure is None else failure.status,
            row={"id": number, "name": connection.database},
            action=f"/sources/new/tables?{request.url.query}",
            is_new=True,
            urls=[],
            chosen=None,
            found=discovered,
            problem=problem,
            tables=[] if number is None else await of_database(frame, "table", number),
            types=_types(),
            failure=failure,
            given=typed or {},
        )

    def lost() -> Response:
        words = "streamer no longer has the connection; enter it again"
        return frame.redirect("/sources/new", words, "warning")

    @router.get("/sources/new/tables")
    async def first_tables(request: Request) -> Response:
        name = request.query_params.get("connection", "")
        connection = connections.find(name, actor_of(request))
        return lost() if connection is None else await show(request, connection)

    @router.post("/sources/new/tables")
    async def add_first_tables(request: Request) -> Response:
        form = await request.form()
        name = request.query_params.get("connection", "")
        connection = connections.find(name, actor_of(request))
        if connection is None:
            return lost()
        is_alone = form_text(form, "do") == "alone"  # the group already has tables
        picked = [] if is_alone else list(_tables_of_form(form))
        typed = {"name": form_text(form, "name")}
        if not picked and not is_alone:
            return await show(request, connection, InvalidError(_NONE_CHOSEN), typed)
        try:
            await service.add_source(
                connection.database, connection.to_row(), picked, actor_of(request)
            )
        except AdminError as exc:
            return await show(request, connection, exc, typed)
        connections.remove(name)
        words = _added(len(picked)) if picked else "The source is in the draft; nothing runs yet"
        return frame.redirect("/plan", words)


def _types() -> Any:
    return next(field.choices for field in FIELDS["table"] if field.name == "type")


def _without_password(typed: Row) -> Row:
    """Return the typed text with the password masked, because pages contain no passwords."""
    return typed | {"url": shown_url(typed["url"])}


def _add_tables(router: APIRouter, frame: Frame) -> None:
    service = frame.service

    async def show(
        request: Request,
        number: int,
        url_id: int | None,
        failure: AdminError | None = None,
        typed: Row | None = None,
    ) -> Response:
        row = await service.store.get("database", number)
        urls = await of_database(frame, "url", number)
        chosen = next((url for url in urls if url["id"] == url_id), urls[0] if urls else None)
        discovered, problem = None, None
        if chosen is not None:
            try:
                discovered = await service.discover(None, chosen["id"], actor_of(request))
            except StreamerError as exc:
                problem = error_text(exc)
        return await frame.page(
            request,
            "tables.html",
            status=200 if failure is None else failure.status,
            row=row,
            action=f"/databases/{number}/tables/new"
            + (f"?url_id={chosen['id']}" if chosen is not None else ""),
            is_new=False,
            urls=urls,
            chosen=chosen,
            found=discovered,
            problem=problem,
            tables=await of_database(frame, "table", number),
            types=_types(),
            failure=failure,
            given=typed or {},
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
        picked = [{"database_id": number, **values} for values in _tables_of_form(form)]
        url_id = url_id_of(request)
        if not picked:
            failure = InvalidError(_NONE_CHOSEN)
            return await show(request, number, url_id, failure, {"name": form_text(form, "name")})
        refused = []
        for values in picked:
            try:
                await service.create("table", values, actor_of(request))
            except AdminError as exc:
                refused.append((values, exc))
        if refused:
            values, first = refused[0]
            message = f"{values['name']}: {first.message}"
            if len(picked) > 1:
                message += f" ({len(picked) - len(refused)} of {len(picked)} tables were added)"
            failure = InvalidError(message, hint=first.hint)
            return await show(request, number, url_id, failure, {"name": form_text(form, "name")})
        return frame.redirect("/plan", _added(len(picked)))


def _added(number: int) -> str:
    return f"{number} {'table is' if number == 1 else 'tables are'} in the draft; nothing runs yet"


def _tables_of_form(form: Any) -> list[Row]:
    """Return the ticked tables of a form, and the table typed by name."""
    common = form_text(form, "type")
    picked = []
    for index in form.getlist("pick"):
        if not isinstance(index, str):
            continue
        values = {
            "schema": form_text(form, f"schema-{index}"),
            "name": form_text(form, f"name-{index}"),
            "type": form_text(form, f"type-{index}") or common,
            "target": form_text(form, f"target-{index}").strip() or None,
        }
        picked.append(values)
    if name := form_text(form, "name").strip():
        target = form_text(form, "target").strip() or None
        picked.append({"name": name, "type": common, "target": target})
    return [{key: value for key, value in row.items() if value != ""} for row in picked]
