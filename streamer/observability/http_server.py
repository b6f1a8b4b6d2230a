"""The HTTP server with metrics, health and readiness. The admin server adds its routes."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from streamer.errors.error_classes import NotFoundError, SettingsError
from streamer.errors.error_reports import runbook_address
from streamer.observability.http_connections import ACCEPTED_AT_ONCE, Crowd
from streamer.postgres.row_values import hide_values

RenderMetrics = Callable[[], Awaitable[bytes]]
Readiness = Callable[[], list[dict[str, str]]]


def make_app(
    render_metrics: RenderMetrics,
    readiness: Readiness,
    mapping_problem: Callable[[], str | None] = lambda: None,
    other_problems: Readiness = list,
    may_see_values: Callable[[Request], bool] = lambda request: False,
) -> FastAPI:
    """Make the application: ``/metrics``, ``/healthz``, ``/readyz``.

    *other_problems*: problems that leave the process ready.
    """
    app = FastAPI(title="streamer", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(await render_metrics(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        # An answer proves that the event loop runs; a failed task would have ended the process. A
        # restart does not restore a mapping, so the status stays 200 for supervisors that would
        # restart the process.
        problem = mapping_problem()
        return {"status": "ok"} if problem is None else {"status": "ok", "mapping": problem}

    @app.get("/readyz", include_in_schema=False)
    async def readyz(request: Request) -> Response:
        reasons, problems = readiness(), other_problems()
        if not may_see_values(request):
            reasons, problems = [list(map(_masked, entries)) for entries in (reasons, problems)]
        answer = {"ready": not reasons, "reasons": reasons, "problems": problems}
        return JSONResponse(answer, 503 if reasons else 200)

    @app.exception_handler(404)
    async def not_found(request: Request, exc: Exception) -> Response:
        error = {
            "code": NotFoundError.code,
            "message": f"no page or resource has the path {request.url.path}",
            "hint": None,
            "runbook": runbook_address(NotFoundError.code),
        }
        return JSONResponse({"error": error}, 404)

    return app


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Add the routes of *router* to *app*.

    FastAPI's include_router would build every route twice, the second time during a request.
    """
    app.router.routes.extend(router.routes)


def _masked(reason: dict[str, str]) -> dict[str, str]:
    """Return *reason* without the values of rows. Hints contain no values."""
    error, hint = reason.get("error", ""), reason.get("hint")
    # The hint follows the message, so the last occurrence of the separator precedes the hint.
    message, separator, notes = error.rpartition(f"; {hint}") if hint else ("", "", error)
    if not separator:
        return {**reason, "error": hide_values(error)} if error else reason
    return {**reason, "error": hide_values(message) + separator + notes}


class _Server(uvicorn.Server):
    """A server whose process handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def require_private(address: str) -> None:
    """Raise SettingsError if the network can reach *address*: requests need no credentials."""
    if _host(address) not in ("127.0.0.1", "::1", "localhost"):
        raise SettingsError(
            f"http.listen: {address} would serve the network without a password",
            hint="listen on 127.0.0.1, or set admin.token or admin.users",
        )


def listen(address: str) -> socket.socket:
    """Return a socket that listens on ``host:port``. Raises SettingsError if the bind fails."""
    host, port = _host(address), address.rpartition(":")[2]
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family)
    except OSError as exc:
        raise SettingsError(
            f"http.listen: cannot listen on {address}: {exc.strerror}",
            hint="stop the program on that port, or choose another; an empty string switches HTTP "
            "off",
        ) from None


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


@contextlib.asynccontextmanager
async def serving(
    listening: socket.socket, app: FastAPI, *, trusted_proxies: Sequence[str] = ()
) -> AsyncIterator[None]:
    """Serve *app* on a socket during a block, and close it.

    The server trusts the headers X-Forwarded-For and X-Forwarded-Proto of *trusted_proxies*.
    """
    crowd = Crowd()
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", crowd.connection),
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        # The server asks listeners of events to disconnect, and does not wait for the
        # disconnection.
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="http")
    try:
        with crowd.watched():
            yield
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def serving_in_turn(
    turn: asyncio.Event,
    listening: socket.socket,
    make: Callable[[], Awaitable[FastAPI]],
    failed: Callable[[], None],
    *,
    trusted_proxies: Sequence[str] = (),
) -> AsyncIterator[None]:
    """Serve an application as `serving` does, from the time on at which *turn* is set.

    *make*: makes the application. Connections wait meanwhile. *failed*: called before the error of
    the server ends the block.
    """
    ended = asyncio.Event()
    is_serving = False

    async def serve() -> None:
        nonlocal is_serving
        app = await make()
        await turn.wait()
        is_serving = True
        async with serving(listening, app, trusted_proxies=trusted_proxies):
            await ended.wait()

    def check(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            failed()

    task = asyncio.create_task(serve(), name="turn to serve")
    task.add_done_callback(check)
    try:
        yield
    finally:
        ended.set()
        if not is_serving:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
