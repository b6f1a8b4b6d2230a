"""The routes of ``/api``, and what stands before all of them.

`Gate` is ASGI middleware: whatever is under ``/api``, also what is still to be written, asks it
first, so no route can forget to. It also bounds what is sent and says what browsers may do with an
answer. Answers of errors have one shape, made in one place.
"""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import structlog
from fastapi import APIRouter, Body, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamer import __version__
from streamer.admin import models
from streamer.admin import store as store_module
from streamer.admin.access import (
    COOKIE,
    CSRF_COOKIE,
    SAFE_METHODS,
    Access,
    Identity,
    Session,
    check_origin,
)
from streamer.admin.events import Events
from streamer.admin.service import AdminService
from streamer.commands.quarantine import Choice
from streamer.config.settings import Role
from streamer.errors import (
    AdminError,
    ConfigurationError,
    StoreError,
    StreamerError,
    TargetError,
    ThrottledError,
    UnauthenticatedError,
)
from streamer.mapping.resync import Resync
from streamer.observability.logs import redact

log = structlog.get_logger()

BODY_BYTES_MAX: Final = 8_000_000
PREFIX: Final = "/api"
OPEN_PATHS: Final = frozenset({"/api/openapi.json", "/api/login"})
"""What needs no credentials: a description without data, and the way to get them."""

PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
DATA_POLICY: Final = "default-src 'none'; frame-ancestors 'none'"


# ---- errors ------------------------------------------------------------------------------------


def status_of(error: StreamerError) -> int:
    """Return the HTTP status that says best what is wrong."""
    match error:
        case AdminError():
            return error.status
        case StoreError():
            log.error("the mapping database cannot be used", error=redact(str(error)))
            return 503
        case ConfigurationError():
            return 422
        case TargetError():
            return 503 if error.exit_code == 3 else 409
        case _:
            return 422 if error.exit_code == 3 else 409


def error_answer(error: StreamerError) -> JSONResponse:
    """Say what is wrong in the shape that all errors have."""
    headers = {}
    if isinstance(error, ThrottledError):
        headers["Retry-After"] = str(error.seconds)
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = 'Bearer realm="streamer"'
    return _problem(error.code, error.message, error.hint, status_of(error), headers)


def _problem(
    code: str,
    message: str,
    hint: str | None,
    status: int,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    problem = {
        "code": code,
        "message": _sendable(redact(message)),
        "hint": _sendable(redact(hint)) if hint else None,
    }
    return JSONResponse({"error": problem}, status, headers)


def _sendable(text: str) -> str:
    return text.encode(errors="replace").decode()


_HTTP_CODES: Final = {404: "not_found", 405: "not_allowed", 413: "too_large", 415: "not_json"}


def _install_errors(app: FastAPI) -> None:
    @app.exception_handler(StreamerError)
    async def streamer_error(request: Request, exc: StreamerError) -> Response:
        return error_answer(exc)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, exc: RequestValidationError) -> Response:
        details = exc.errors()
        return _problem(
            "invalid",
            models.fault(details[0]) if details else "the request is not valid",
            "/api/openapi.json says what is expected",
            422,
        )

    @app.exception_handler(AnyHTTPException)
    async def http_error(request: Request, exc: AnyHTTPException) -> Response:
        code = _HTTP_CODES.get(exc.status_code, "http")
        message = f"{request.method} {request.url.path}: {exc.detail}".lower()
        if exc.status_code == 404:
            message = f"nothing at {request.url.path}"
        return _problem(code, message, None, exc.status_code, dict(exc.headers or {}))

    @app.exception_handler(Exception)
    async def defect(request: Request, exc: Exception) -> Response:
        log.error("a request failed", path=request.url.path, error=type(exc).__name__)
        return _problem("internal", "a defect; the log has more", None, 500)


# ---- the gate ----------------------------------------------------------------------------------


class Gate:
    """Stands before the application: who asks, how much is sent, what browsers may do."""

    def __init__(self, app: ASGIApp, access: Access, service: AdminService) -> None:
        self._app = app
        self._access = access
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        is_api = path == PREFIX or path.startswith(f"{PREFIX}/")
        send = _with_headers(send, is_api=is_api)
        if is_api:
            request = Request(scope)
            try:
                scope.setdefault("state", {})["identity"] = self._let_in(request, path)
            except StreamerError as exc:
                await error_answer(exc)(scope, receive, send)
                return
        await self._app(scope, _bounded(receive), send)

    def _let_in(self, request: Request, path: str) -> Identity | None:
        if path in OPEN_PATHS:
            if self._access.is_open:
                self._access.identify(request)  # refuses other hosts
            if request.method not in SAFE_METHODS:
                check_origin(request)
            return None
        needed = Role.VIEWER if path == "/api/logout" else Role.ADMIN
        identity = self._access.authorize(request, request.method, needed)
        if request.method not in SAFE_METHODS and path not in _NOT_OF_THE_MAPPING:
            self._service.check_writable()
        return identity


_NOT_OF_THE_MAPPING: Final = frozenset({"/api/logout", "/api/discover"})
"""What may be asked for in static mode all the same."""


def _bounded(receive: Receive) -> Receive:
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > BODY_BYTES_MAX:
            raise HTTPException(413, f"more than {BODY_BYTES_MAX} bytes")
        return message

    return bounded


def _with_headers(send: Send, *, is_api: bool) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            is_page = headers.get("content-type", "").startswith("text/html")
            headers.setdefault("Content-Security-Policy", PAGE_POLICY if is_page else DATA_POLICY)
            headers.setdefault("X-Content-Type-Options", "nosniff")
            # With no-referrer browsers would not say, either, that our own forms are our own.
            headers.setdefault("Referrer-Policy", "same-origin" if is_page else "no-referrer")
            headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
            if is_api or is_page:
                headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return with_headers


# ---- routes ------------------------------------------------------------------------------------

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": models.ErrorAnswer, "description": text}
    for status, text in {
        401: "Nobody is logged in, or the token is wrong",
        403: "Not with this role, or from another site",
        404: "Not there",
        409: "Not as things are: taken, read-only, not ready",
        422: "A field is wrong; the message names it",
    }.items()
}

Number = Annotated[int, PathParameter(ge=1, le=models.ID_MAX)]
PageNumber = Annotated[int, Query(ge=1, le=1_000_000, description="Counted from 1.")]
PerPage = Annotated[int, Query(ge=1, le=500)]
Order = Annotated[Literal["asc", "desc"], Query()]
Sort = Annotated[str, Query(max_length=100, description="A field of the rows.")]
Search = Annotated[
    str | None, Query(max_length=200, description="Text that some field of a row contains.")
]
Text = Annotated[str | None, Query(max_length=300)]
IdFilter = Annotated[int | None, Query(ge=1, le=models.ID_MAX)]

_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "database": {"name": "shop"},
    "url": {
        "database_id": 1,
        "url": "postgresql://streamer:${SHOP_EU_PASSWORD}@eu-db.example/shop",
        "sid": "eu",
    },
    "table": {
        "database_id": 1,
        "schema": "public",
        "name": "orders",
        "target": "sales.orders",
        "type": "history",
    },
}


def actor_of(request: Request) -> str:
    """Return who asks, as the audit names them."""
    identity: Identity | None = getattr(request.state, "identity", None)
    return identity.name if identity is not None else "nobody"


def make_router(service: AdminService, access: Access, events: Events) -> APIRouter:
    """Make all routes."""
    router = APIRouter(prefix=PREFIX, responses=_ERRORS)
    _add_lists(router, service)
    _add_rows(
        router, service, "database", models.DatabaseBody, models.DatabasePatch, models.DatabaseRow
    )
    _add_rows(router, service, "url", models.UrlBody, models.UrlPatch, models.UrlRow)
    _add_rows(router, service, "table", models.TableBody, models.TablePatch, models.TableRow)
    _add_draft(router, service)
    _add_servers(router, service, access, events)
    _add_sessions(router, access)
    return router


def _page(rows: tuple[list[Any], int], query: store_module.Query, response: Response) -> Any:
    items, total = rows
    response.headers["X-Total-Count"] = str(total)
    return {"items": items, "total": total, "page": query.page, "per_page": query.per_page}


def _add_lists(router: APIRouter, service: AdminService) -> None:
    async def listed(
        kind: str, query: store_module.Query, filters: dict[str, Any], response: Response
    ) -> Any:
        query.filters.update({k: v for k, v in filters.items() if v is not None})
        return _page(await service.store.page(kind, query), query, response)

    @router.get("/databases", tags=["mapping"], response_model=models.DatabasePage)
    async def list_databases(
        response: Response,
        page: PageNumber = 1,
        per_page: PerPage = 50,
        sort: Sort = "id",
        order: Order = "asc",
        q: Search = None,
        name: Text = None,
    ) -> Any:
        """List groups of databases."""
        query = store_module.Query(page, per_page, sort, order == "desc", q)
        return await listed("database", query, {"name": name}, response)

    @router.get("/urls", tags=["mapping"], response_model=models.UrlPage)
    async def list_urls(
        response: Response,
        page: PageNumber = 1,
        per_page: PerPage = 50,
        sort: Sort = "id",
        order: Order = "asc",
        q: Search = None,
        database_id: IdFilter = None,
        database: Text = None,
        sid: Text = None,
    ) -> Any:
        """List source databases."""
        query = store_module.Query(page, per_page, sort, order == "desc", q)
        filters = {"database_id": database_id, "database": database, "sid": sid}
        return await listed("url", query, filters, response)

    @router.get("/tables", tags=["mapping"], response_model=models.TablePage)
    async def list_tables(
        response: Response,
        page: PageNumber = 1,
        per_page: PerPage = 50,
        sort: Sort = "id",
        order: Order = "asc",
        q: Search = None,
        database_id: IdFilter = None,
        database: Text = None,
        schema: Text = None,
        name: Text = None,
        target: Text = None,
        type: Text = None,
    ) -> Any:
        """List what is streamed."""
        query = store_module.Query(page, per_page, sort, order == "desc", q)
        filters = {
            "database_id": database_id,
            "database": database,
            "schema": schema,
            "name": name,
            "target": target,
            "type": type,
        }
        return await listed("table", query, filters, response)

    @router.get("/audit", tags=["mapping"], response_model=models.AuditPage)
    async def list_audit(response: Response, page: PageNumber = 1, per_page: PerPage = 50) -> Any:
        """List who changed or asked for what, the newest first."""
        query = store_module.Query(page, per_page)
        return _page(await service.audit(query), query, response)


def _given(body: Any) -> dict[str, Any]:
    """Return what a request said, and nothing that it left out."""
    given: dict[str, Any] = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return given


def _add_rows(
    router: APIRouter, service: AdminService, kind: str, body: Any, patch: Any, row: Any
) -> None:
    path, example = f"/{kind}s", _EXAMPLES[kind]
    examples: Any = {"typical": {"value": example}}
    partial: Any = {"typical": {"value": {list(example)[-1]: list(example.values())[-1]}}}

    async def get(number: Number) -> Any:
        return await service.store.get(kind, number)

    async def create(request: Request, response: Response, values: Any) -> Any:
        created = await service.create(kind, _given(values), actor_of(request))
        response.headers["Location"] = f"{PREFIX}{path}/{created['id']}"
        return created

    async def replace(request: Request, number: Number, values: Any) -> Any:
        return await service.replace(kind, number, _given(values), actor_of(request))

    async def change(request: Request, number: Number, values: Any) -> Any:
        return await service.patch(kind, number, _given(values), actor_of(request))

    async def delete(request: Request, number: Number) -> Response:
        await service.delete(kind, number, actor_of(request))
        return Response(status_code=204)

    create.__annotations__["values"] = Annotated[body, Body(openapi_examples=examples)]
    replace.__annotations__["values"] = Annotated[body, Body(openapi_examples=examples)]
    change.__annotations__["values"] = Annotated[patch, Body(openapi_examples=partial)]
    one = f"{path}/{{number}}"
    for method, where, function, status, summary in (
        ("GET", one, get, 200, f"Get a {kind}"),
        ("POST", path, create, 201, f"Add a {kind} to the draft"),
        ("PUT", one, replace, 200, f"Replace a {kind} of the draft"),
        ("PATCH", one, change, 200, f"Change some fields of a {kind} of the draft"),
    ):
        router.add_api_route(
            where,
            function,
            methods=[method],
            status_code=status,
            response_model=row,
            summary=summary,
            name=f"{function.__name__}_{kind}",
            tags=["mapping"],
        )
    router.add_api_route(
        one,
        delete,
        methods=["DELETE"],
        status_code=204,
        summary=f"Remove a {kind}",
        name=f"delete_{kind}",
        tags=["mapping"],
        response_class=Response,
    )


def _add_draft(router: APIRouter, service: AdminService) -> None:
    @router.get("/settings", tags=["mapping"], response_model=models.MappingSettings)
    async def get_settings() -> Any:
        """Get the settings of the mapping as a whole."""
        return await service.store.settings()

    @router.patch("/settings", tags=["mapping"], response_model=models.MappingSettings)
    async def change_settings(request: Request, values: models.MappingSettings) -> Any:
        """Change settings of the mapping as a whole."""
        return await service.set_settings(_given(values), actor_of(request))

    @router.get("/draft", tags=["draft"])
    async def get_draft() -> dict[str, Any]:
        """Say whether the draft differs from what was applied."""
        return await service.draft()

    @router.delete("/draft", tags=["draft"], status_code=204, response_class=Response)
    async def discard_draft(request: Request) -> Response:
        """Let the draft be what was applied last."""
        await service.discard(actor_of(request))
        return Response(status_code=204)

    @router.get("/plan", tags=["draft"])
    async def get_plan() -> dict[str, Any]:
        """Say what applying the draft would do; nothing is changed."""
        return (await service.plan()).to_json()

    @router.post("/apply", tags=["draft"])
    async def apply(request: Request, values: models.ApplyBody | None = None) -> dict[str, Any]:
        """Let the draft be what runs, all of it or nothing."""
        force = values is not None and values.force
        return await service.apply(actor_of(request), force=force)

    @router.get(
        "/export",
        tags=["draft"],
        response_class=Response,
        responses={200: {"content": {"application/yaml": {"schema": {"type": "string"}}}}},
    )
    async def export() -> Response:
        """Return the draft as YAML, with a variable in place of each password."""
        text, variables = await service.export()
        headers = {"X-Streamer-Variables": ", ".join(variables)}
        return Response(text, media_type="application/yaml; charset=utf-8", headers=headers)

    @router.post("/import", tags=["draft"])
    async def import_mapping(request: Request, values: models.ImportBody) -> dict[str, Any]:
        """Let the draft be what a YAML file says."""
        notes = await service.import_text(
            Path("yaml"),
            values.yaml,
            actor_of(request),
            excludes_missing=values.exclude_missing,
        )
        return {"notes": notes, "draft": await service.draft()}


def _add_servers(router: APIRouter, service: AdminService, access: Access, events: Events) -> None:
    @router.get("/status", tags=["servers"])
    async def status() -> dict[str, Any]:
        """Return what `streamer status --json` says."""
        return await service.status()

    @router.get("/discover", tags=["servers"])
    async def discover(
        url_id: Annotated[int, Query(ge=1, le=models.ID_MAX)],
    ) -> dict[str, Any]:
        """List the tables of a source, and what would hinder them."""
        return await service.discover(None, url_id)

    @router.post("/discover", tags=["servers"])
    async def discover_url(values: models.DiscoverBody) -> dict[str, Any]:
        """Try a url: the same for a database that need not be stored."""
        return await service.discover(values.url, values.url_id)

    def add_action(action: str, summary: str) -> None:
        async def act(
            request: Request, number: Number, values: models.ActionBody | None = None
        ) -> dict[str, Any]:
            sid = values.sid if values is not None else None
            names = await service.act(action, number, sid, actor_of(request))
            return {"action": action, "tables": names}

        router.add_api_route(
            f"/tables/{{number}}/{action}",
            act,
            methods=["POST"],
            status_code=202,
            summary=summary,
            name=f"{action}_table",
            tags=["servers"],
        )

    @router.post("/tables/{number}/resync", tags=["servers"], status_code=202)
    async def resync(
        request: Request, number: Number, values: models.ResyncBody | None = None
    ) -> dict[str, Any]:
        """Copy a table again while the others keep streaming."""
        given = values or models.ResyncBody()
        options = Resync(given.mode, given.force).to_json()
        return {
            "action": "resync",
            "tables": await service.act("resync", number, given.sid, actor_of(request), options),
        }

    add_action("pause", "Hold a table's changes")
    add_action("resume", "Go on with a table that is paused or in error")

    @router.get("/quarantine", tags=["servers"])
    async def list_quarantine(
        table: Text = None,
        database: Text = None,
        sid: Text = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """List changes that the target refused, the oldest first."""
        return await service.quarantine(Choice(table, database, sid), limit)

    def add_quarantine_action(action: str, summary: str) -> None:
        async def act(request: Request, values: models.QuarantineBody) -> dict[str, Any]:
            choice = Choice(values.table, values.database, values.sid, tuple(values.ids))
            asked = await service.ask_quarantine(action, choice, actor_of(request))
            return {"action": action, "tables": asked}

        router.add_api_route(
            f"/quarantine/{action}",
            act,
            methods=["POST"],
            status_code=202,
            summary=summary,
            name=f"{action}_quarantine",
            tags=["servers"],
        )

    add_quarantine_action("retry", "Apply changes in quarantine again")
    add_quarantine_action("drop", "Give changes in quarantine up")

    @router.get(
        "/events",
        tags=["servers"],
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def listen(request: Request) -> StreamingResponse:
        """Tell what happens, as server-sent events: snapshot, state, lag, progress, draft,
        applied.
        """
        identity: Identity = request.state.identity

        def may_go_on() -> bool:
            return identity.session is None or access.session(request) is not None

        stream = events.stream(events.subscribe(), may_go_on)
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def _add_sessions(router: APIRouter, access: Access) -> None:
    @router.post("/login", tags=["session"], response_model=models.WhoAmI)
    async def log_in(request: Request, response: Response, values: models.Login) -> Any:
        """Begin a session, which lives in a cookie."""
        cookie, session = await access.log_in(request, values.name, values.password)
        set_cookies(request, response, cookie, session)
        return {"name": session.name, "role": session.role, "csrf": session.csrf}

    @router.post("/logout", tags=["session"], status_code=204, response_class=Response)
    async def log_out(request: Request) -> Response:
        """End the session."""
        access.log_out(request)
        response = Response(status_code=204)
        delete_cookies(request, response)
        return response

    @router.get("/session", tags=["session"], response_model=models.WhoAmI)
    async def get_session(request: Request) -> Any:
        """Say who asks."""
        identity: Identity = request.state.identity
        csrf = identity.session.csrf if identity.session is not None else None
        return {"name": identity.name, "role": identity.role, "csrf": csrf}


def set_cookies(request: Request, response: Response, cookie: str, session: Session) -> None:
    """Give a browser its session, and the token that it has to send beside it."""
    # uvicorn says https for X-Forwarded-Proto only where the proxy is one that is trusted.
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", secure=secure)
    response.set_cookie(CSRF_COOKIE, session.csrf, samesite="strict", secure=secure)


def delete_cookies(request: Request, response: Response) -> None:
    """Take from a browser what `set_cookies` gave it."""
    for name in (COOKIE, CSRF_COOKIE):
        response.delete_cookie(name, samesite="strict", secure=request.url.scheme == "https")


# ---- putting it together -----------------------------------------------------------------------


def openapi(app: FastAPI) -> dict[str, Any]:
    """Describe the API."""
    schema = get_openapi(
        title="streamer",
        version=__version__,
        description="The mapping, what it does, and what is to be done with it. Edits gather in a "
        "draft; `POST /api/apply` lets it be what runs.",
        routes=app.routes,
    )
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
    }
    schema["security"] = [{"token": []}, {"session": []}]
    schema["paths"]["/api/login"]["post"]["security"] = []
    return schema


def install_api(app: FastAPI, service: AdminService, access: Access, events: Events) -> None:
    """Add the API to *app*, and the gate before it."""
    app.include_router(make_router(service, access, events))

    @app.get("/api/openapi.json", include_in_schema=False)
    async def describe() -> Response:
        if app.openapi_schema is None:
            app.openapi_schema = openapi(app)
        return JSONResponse(app.openapi_schema)

    _install_errors(app)
    app.add_middleware(Gate, access=access, service=service)
