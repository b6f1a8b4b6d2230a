"""Shared by all pages: the user, the CSRF token of a form, error pages, notes after a redirect.

A `PageRoute` checks the user and the token before every handler, and turns errors into pages. So no
page can omit the checks. A change is a POST that ends in a redirect. The server stores the note
under a random name, which the redirect carries, so that no foreign site can put words on the page.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from starlette.datastructures import FormData

from streamer.admin.api.error_answers import status_of
from streamer.admin.live.events import Events
from streamer.admin.live.problem_view import problem_row
from streamer.admin.mapping import api_models
from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.page.render_templates import render
from streamer.admin.page.target_card import TargetCard
from streamer.admin.service.access import (
    SAFE_METHODS,
    Access,
    UserIdentity,
    edits_mapping,
    needed_role,
)
from streamer.admin.service.admin_service import AdminService
from streamer.config.settings import Role
from streamer.errors.error_classes import (
    InvalidError,
    StreamerError,
    ThrottledError,
    UnauthenticatedError,
)
from streamer.errors.error_reports import runbook_address
from streamer.observability.logs import redact
from streamer.report.problems import of_mapping

Row = dict[str, Any]

NOTES_MAX: Final = 200
REFRESH_HEADER: Final = "x-refresh"
"""The header of the script of an open page, which requests only the parts that change."""


class Frame:
    """Shared by the handlers of pages."""

    def __init__(self, service: AdminService, access: Access, events: Events) -> None:
        self.service = service
        self.access = access
        self.events = events
        self.target_card = TargetCard(service, events)
        self._notes: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def router(self) -> APIRouter:
        """Return a router whose pages require the role of a viewer."""
        return APIRouter(route_class=_route_class(self), include_in_schema=False)

    # ---- answers -------------------------------------------------------------------------------

    async def page(
        self, request: Request, template: str, *, status: int = 200, **values: Any
    ) -> Response:
        """Answer with a page."""
        identity: UserIdentity = request.state.identity
        draft = await self.service.draft()
        may_act = identity.role is Role.ADMIN
        note = self._notes.get(request.query_params.get("note", ""))
        # A long page takes a moment, and the event loop also streams.
        text = await in_admin_thread(
            render,
            template,
            path=request.url.path,
            identity=identity,
            csrf=self.access.csrf_of(identity),
            is_open=self.access.is_open,
            is_static=self.service.is_static,
            may_act=may_act,
            may_change=may_act and not self.service.is_static,
            draft=draft,
            note=note,
            mapping_problem=self._mapping_problem(),
            **values,
        )
        return html(text, status)

    def _mapping_problem(self) -> Row | None:
        problem = self.service.problem
        return None if problem is None else problem_row(of_mapping(problem.report))

    def note(self, text: str, kind: str = "good") -> str:
        """Keep a note in memory for the page after a redirect; return the name of the note."""
        name = secrets.token_urlsafe(12)
        self._notes[name] = (kind, redact(text))
        while len(self._notes) > NOTES_MAX:
            self._notes.popitem(last=False)
        return name

    def redirect(self, path: str, note: str | None = None, kind: str = "good") -> Response:
        """Answer a change: the next page, and the note to show there."""
        if note is not None:
            separator = "&" if "?" in path else "?"
            path += separator + urlencode({"note": self.note(note, kind)})
        return RedirectResponse(path, 303)

    def error(self, request: Request, error: StreamerError) -> Response:
        """Answer with an error as a page."""
        headers = {"Retry-After": str(error.seconds)} if isinstance(error, ThrottledError) else {}
        return error_page(error, headers)


def html(text: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # A name may contain half of a surrogate pair, which is not text.
    return HTMLResponse(text.encode(errors="replace"), status, headers)


def error_page(error: StreamerError, headers: dict[str, str] | None = None) -> Response:
    """Answer any client with a StreamerError, the next step and the runbook."""
    runbook = runbook_address(error.code)
    return problem_page(status_of(error), error.message, error.hint, headers, runbook)


def problem_page(
    status: int,
    message: str,
    hint: str | None,
    headers: dict[str, str] | None = None,
    runbook: str | None = None,
) -> Response:
    """Answer any client with a problem and the next step."""
    text = render(
        "problem.html",
        message=redact(message),
        hint=redact(hint) if hint else None,
        runbook=runbook,
        status=status,
    )
    return html(text, status, headers)


def is_refresh(request: Request) -> bool:
    """Whether the script of an open page sent the request."""
    return REFRESH_HEADER in request.headers


def form_text(form: FormData, name: str) -> str:
    """Return the text of a form's field; files have no text."""
    value = form.get(name)
    return value.replace("\r\n", "\n") if isinstance(value, str) else ""


def row_number(text: str, name: str) -> int:
    """Read a row's number. Raises InvalidError."""
    if text.isascii() and text.isdigit() and 0 < int(text[:20]) <= api_models.ID_MAX:
        return int(text)
    raise InvalidError(f"{name}: expected a number")


def own_path(text: str | None) -> str:
    """Return *text* if it is a path of this server, because a foreign site may put its own address
    into a link.
    """
    try:
        parts = urlsplit(text or "")
    except ValueError:
        return "/"
    is_own = not parts.scheme and not parts.netloc and parts.path.startswith("/")
    if not is_own or text is None or text.startswith("//") or "\\" in text:
        return "/"
    return text if text.isprintable() else "/"


# ---- before every handler ----------------------------------------------------------------------

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def _route_class(frame: Frame) -> type[APIRoute]:
    class PageRoute(APIRoute):
        """A page for viewers; changes need an admin."""

        def get_route_handler(self) -> Handler:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                try:
                    await _authenticate(frame, request)
                    return await handler(request)
                except UnauthenticatedError as exc:
                    if request.method in SAFE_METHODS and exc.message == _WHO:
                        return _to_login(request)
                    return frame.error(request, exc)
                except StreamerError as exc:
                    return frame.error(request, exc)
                except RequestValidationError as exc:
                    details = exc.errors()
                    return frame.error(request, InvalidError(api_models.fault(details[0])))

            return handle

    return PageRoute


_WHO: Final = "no user is logged in"


async def _authenticate(frame: Frame, request: Request) -> None:
    """Raise UnauthenticatedError, ForbiddenError, ThrottledError or ReadOnlyError."""
    identity = frame.access.identify(request)
    if identity is None:
        raise UnauthenticatedError(_WHO, hint="log in, and try again")
    request.state.identity = identity
    if request.method in SAFE_METHODS:
        return
    csrf = form_text(await request.form(max_files=0), "csrf")
    frame.access.authorize_form(request, identity, needed_role(request.url.path), csrf)
    if edits_mapping(request.url.path):
        frame.service.check_writable()


def _to_login(request: Request) -> Response:
    query = f"?{request.url.query}" if request.url.query else ""
    path = request.url.path + query
    return RedirectResponse(f"/login?{urlencode({'next': path})}" if path != "/" else "/login", 303)
