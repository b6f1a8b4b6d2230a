"""All routes of the page, with those that need no login: the login form and static files."""

from typing import TYPE_CHECKING, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException

from streamer.admin.api.error_answers import status_of
from streamer.admin.api.gate import PREFIX
from streamer.admin.api.login_routes import delete_cookies, set_cookies
from streamer.admin.live.events import Events
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.page import (
    add_source_page,
    bulk_page,
    events_page,
    mapping_page,
    overview_page,
    plan_page,
    table_page,
    tenants_page,
)
from streamer.admin.page.manual_page import HELP, INDEX, manual_page, manual_texts
from streamer.admin.page.page_frame import (
    Frame,
    error_page,
    form_text,
    html,
    own_path,
    problem_page,
)
from streamer.admin.page.render_templates import assets, render
from streamer.admin.service.access import Access, check_origin
from streamer.admin.service.admin_service import AdminService
from streamer.errors.error_classes import StreamerError
from streamer.observability.http_server import add_routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FOREVER = "public, max-age=31536000, immutable"


def install_page(
    app: FastAPI, service: AdminService, access: Access, events: Events, status: StatusReader
) -> None:
    """Add the pages to *app*."""
    frame = Frame(service, access, events)
    add_routes(app, overview_page.routes(frame, status))
    add_routes(app, bulk_page.routes(frame, status))
    add_routes(app, table_page.routes(frame, status))
    add_routes(app, events_page.routes(frame, status))
    add_routes(app, tenants_page.routes(frame, status))
    add_routes(app, mapping_page.routes(frame))
    add_routes(app, add_source_page.routes(frame))
    add_routes(app, plan_page.routes(frame, status))
    _add_logout(app, frame)
    _add_manual(app, frame)
    _add_login(app, access)
    _add_assets(app)
    _install_errors(app)


def _add_logout(app: FastAPI, frame: Frame) -> None:
    router = frame.router()

    @router.post("/logout")
    async def log_out(request: Request) -> Response:
        frame.access.log_out(request)
        response = RedirectResponse("/login", 303)
        delete_cookies(request, response)
        return response

    add_routes(app, router)


def _add_manual(app: FastAPI, frame: Frame) -> None:
    router = frame.router()

    @router.get(HELP)
    @router.get(f"{HELP}/{{name:path}}")
    async def help_page(request: Request, name: str = INDEX) -> Response:
        if name not in manual_texts():
            raise HTTPException(404)
        page = await in_admin_thread(manual_page, name)
        return await frame.page(request, "manual.html", page=page)

    add_routes(app, router)


def _add_login(app: FastAPI, access: Access) -> None:
    def show(after: str, name: str = "", error: StreamerError | None = None) -> Response:
        text = render(
            "login.html",
            after=after,
            name=name,
            error=str(error) if error is not None else None,
            has_users=access.has_users,
        )
        return html(text, 200 if error is None else status_of(error))

    @app.get("/login", include_in_schema=False)
    async def login_page(request: Request) -> Response:
        after = own_path(request.query_params.get("next"))
        try:
            identity = access.identify(request)
        except StreamerError as exc:
            return error_page(exc)
        if identity is not None:
            return RedirectResponse(after, 303)
        return show(after)

    @app.post("/login", include_in_schema=False)
    async def log_in(request: Request) -> Response:
        try:
            check_origin(request)
        except StreamerError as exc:
            return error_page(exc)
        form = await request.form(max_files=0)
        after, name = own_path(form_text(form, "next")), form_text(form, "name")[:200]
        try:
            cookie, session = await access.log_in(request, name, form_text(form, "password")[:1000])
        except StreamerError as exc:
            return show(after, name, exc)
        response = RedirectResponse(after, 303)
        set_cookies(request, response, cookie, session)
        return response


def _add_assets(app: FastAPI) -> None:
    @app.get("/static/{name}", include_in_schema=False)
    async def static_file(request: Request, name: str) -> Response:
        asset = assets().get(name)
        if asset is None:
            raise HTTPException(404)
        is_versioned = request.query_params.get("v") == asset.version
        headers = {"Cache-Control": FOREVER if is_versioned else "no-cache"}
        return Response(asset.content, media_type=asset.media_type, headers=headers)


def _install_errors(app: FastAPI) -> None:
    """Answer a browser with a page for the errors 404, 405 and 500.

    The former handlers answer requests to the API, and requests that do not accept HTML.
    """
    back = "Go back to the overview."
    for key, status, message, hint in (
        (404, 404, "This page does not exist",
         "Its address may have a mistake. The overview leads to every source and table."),
        (405, 405, "This page does not accept such a request", back),
        (Exception, 500, "Internal error; the log has details", back),
    ):  # fmt: skip
        _wrap(app, key, status, message, hint)


def _wrap(app: FastAPI, key: int | type[Exception], status: int, message: str, hint: str) -> None:
    former = cast(
        "Callable[[Request, Exception], Awaitable[Response]]",
        app.exception_handlers.get(key) or app.exception_handlers[HTTPException],
    )

    async def handle(request: Request, exc: Exception) -> Response:
        is_api = request.url.path == PREFIX or request.url.path.startswith(f"{PREFIX}/")
        if is_api or "text/html" not in request.headers.get("accept", ""):
            return await former(request, exc)
        if status == 500:
            await former(request, exc)  # the handler logs the error
        return problem_page(status, message, hint)

    app.add_exception_handler(key, handle)
