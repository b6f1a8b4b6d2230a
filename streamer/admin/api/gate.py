"""The gate before the application: credentials, the size of a request, headers for browsers.

`Gate` is ASGI middleware. Every path under ``/api`` passes it, so no route can skip the check.
"""

from typing import Final

from fastapi import HTTPException, Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamer.admin.access import (
    SAFE_METHODS,
    Access,
    UserIdentity,
    changes_mapping,
    check_origin,
    needed_role,
)
from streamer.admin.api.errors import error_answer
from streamer.admin.service import AdminService
from streamer.errors import StreamerError

BODY_BYTES_MAX: Final = 8_000_000
PREFIX: Final = "/api"
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
        if is_api:
            request = Request(scope)
            try:
                scope.setdefault("state", {})["identity"] = self._let_in(request, path)
            except StreamerError as exc:
                await error_answer(exc)(scope, receive, send)
                return
        await self._app(scope, _bounded(receive), send)

    def _let_in(self, request: Request, path: str) -> UserIdentity | None:
        if path in OPEN_PATHS:
            if self._access.is_open:
                self._access.identify(request)  # refuses other hosts
            if request.method not in SAFE_METHODS:
                check_origin(request)
            return None
        identity = self._access.authorize(request, request.method, needed_role(path))
        if request.method not in SAFE_METHODS and changes_mapping(path):
            self._service.check_writable()
        return identity


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
