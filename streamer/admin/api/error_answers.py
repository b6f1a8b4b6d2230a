"""Answers of the API to errors: the HTTP status, and a JSON body of a common shape."""

from typing import Final

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from streamer.admin.mapping import api_models
from streamer.errors.error_classes import (
    AdminError,
    ConfigurationError,
    StoreError,
    StreamerError,
    TargetError,
    ThrottledError,
    UnauthenticatedError,
)
from streamer.errors.error_reports import runbook_address
from streamer.observability.logs import redact

log = structlog.get_logger()


def status_of(error: StreamerError) -> int:
    """Return the HTTP status of an error."""
    match error:
        case AdminError():
            return error.status
        case StoreError():
            log.error("the mapping database is unusable", error=redact(str(error)))
            return 503
        case ConfigurationError():
            return 422
        case TargetError():
            return 503 if error.exit_code == 3 else 409
        case _:
            return 422 if error.exit_code == 3 else 409


def error_answer(error: StreamerError) -> JSONResponse:
    """Return the answer to an error, in the common shape."""
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
        "runbook": runbook_address(code) or runbook_address(AdminError.code),
    }
    return JSONResponse({"error": problem}, status, headers)


def _sendable(text: str) -> str:
    return text.encode(errors="replace").decode()


_HTTP_CODES: Final = {404: "not_found", 405: "not_allowed", 413: "too_large", 415: "not_json"}


def install_errors(app: FastAPI) -> None:
    """Make *app* answer every error in the common shape."""

    @app.exception_handler(StreamerError)
    async def streamer_error(request: Request, exc: StreamerError) -> Response:
        return error_answer(exc)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, exc: RequestValidationError) -> Response:
        details = exc.errors()
        return _problem(
            "invalid",
            api_models.fault(details[0]) if details else "the request is not valid",
            "/api/openapi.json describes the request",
            422,
        )

    @app.exception_handler(AnyHTTPException)
    async def http_error(request: Request, exc: AnyHTTPException) -> Response:
        code = _HTTP_CODES.get(exc.status_code, "http")
        message = f"{request.method} {request.url.path}: {exc.detail}".lower()
        if exc.status_code == 404:
            message = f"no page or resource has the path {request.url.path}"
        return _problem(code, message, None, exc.status_code, dict(exc.headers or {}))

    @app.exception_handler(Exception)
    async def defect(request: Request, exc: Exception) -> Response:
        log.error("a request failed", path=request.url.path, error=type(exc).__name__)
        return _problem("internal", "internal error; the log has details", None, 500)
