"""The gate before the application: credentials, the size of a request, headers for browsers.

`Gate` is ASGI middleware. Every path under ``/api`` passes it, so no route can skip the check.
"""

from typing import Final

from fastapi import HTTPException, Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamer.admin.api.error_answers import error_answer
from streamer.admin.service.access import (
    SAFE_METHODS,
    Access,
    UserIdentity,
    check_origin,
    edits_mapping,
    has_effect,
    needed_role,
)
from streamer.admin.service.admin_service import AdminService
from streamer.errors.error_classes import StreamerError

BODY_BYTES_MAX: Final = 8_000_000
BODY_BYTES_MAX_WITHOUT_LOGIN: Final = 16_000
PREFIX: Final = "/api"
ALIVE: Final = "/healthz"
"""The path that answers every client, even a probe with a foreign name for this machine."""
OPEN_PATHS: Final = frozenset({"/api/openapi.json", "/api/login"})
"""Paths without credentials: a description without data, and the login."""

PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
DATA_POLICY: Final = "default-src 'none'; frame-ancestors 'none'"


class Gate:
    """Checks credentials and size of a request, and sets the headers of its answer."""

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
        request = Request(scope)
        try:
            if path != ALIVE:
                self._access.check_host(request)
            if is_api:
                scope.setdefault("state", {})["identity"] = self._authenticate(request, path)
        except StreamerError as exc:
            await error_answer(exc)(scope, receive, send)
            return
        has_login = self._access.has_login(request)
        most = BODY_BYTES_MAX if has_login else BODY_BYTES_MAX_WITHOUT_LOGIN
        announced = request.headers.get("content-length", "")
        if request.method not in SAFE_METHODS and has_effect(path):
            send = _with_forgetting(send, self._service)
        await self._app(scope, _bounded(receive, most, announced), send)

    def _authenticate(self, request: Request, path: str) -> UserIdentity | None:
        if path in OPEN_PATHS:
            if request.method not in SAFE_METHODS:
                check_origin(request)
            return None
        identity = self._access.authorize(request, request.method, needed_role(path))
        if request.method not in SAFE_METHODS and edits_mapping(path):
            self._service.check_writable()
        return identity


def _bounded(receive: Receive, most: int, announced: str) -> Receive:
    """Refuse a body of more than *most* bytes, at once if the header announces the size."""
    size = 0
    is_too_large = announced.isdecimal() and int(announced) > most

    async def bounded() -> Message:
        nonlocal size
        message: Message = {} if is_too_large else await receive()
        size += len(message.get("body", b""))
        if is_too_large or size > most:
            raise HTTPException(413, f"more than {most} bytes")
        return message

    return bounded


def _with_forgetting(send: Send, service: AdminService) -> Send:
    """Discard cached reads of servers after an accepted request."""

    async def with_forgetting(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            service.reads.forget()
        await send(message)

    return with_forgetting


def _with_headers(send: Send, *, is_api: bool) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            is_page = headers.get("content-type", "").startswith("text/html")
            headers.setdefault("Content-Security-Policy", PAGE_POLICY if is_page else DATA_POLICY)
            headers.setdefault("X-Content-Type-Options", "nosniff")
            # With no-referrer, browsers would also omit the origin of streamer's forms.
            headers.setdefault("Referrer-Policy", "same-origin" if is_page else "no-referrer")
            headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
            if is_api or is_page:
                headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return with_headers
