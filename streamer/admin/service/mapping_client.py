"""The mapping, for the command line: over the API of the running process, or in the file.

A command calls the running process with the same mapping database, or edits the file if no such
process runs.
"""

import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import httpx

from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.mapping.mapping_rows import Row
from streamer.admin.service.access import is_loopback
from streamer.admin.service.admin_service import database_path, open_service
from streamer.admin.service.local_client import PER_PAGE, LocalClient
from streamer.commands.table_requests import command_actor
from streamer.config.settings import Settings
from streamer.errors.error_classes import (
    AdminConnectionError,
    AdminError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    SettingsError,
    ThrottledError,
    UnauthenticatedError,
    UnreadyError,
)
from streamer.mapping.rules import Mapping
from streamer.postgres.secret import Secret
from streamer.util.listen_address import local_url

SECONDS_MAX: Final = 300.0
"""A plan reads every server."""
PROBE_SECONDS: Final = 3.0
EVENT_SECONDS: Final = 60.0
"""A process sends an event or comment every quarter of a minute."""


class MappingClient(Protocol):
    """The operations that the command line needs."""

    async def rows(self, kind: str, filters: Row) -> list[Row]: ...

    async def create(self, kind: str, fields: Row) -> Row: ...

    async def patch(self, kind: str, number: int, changes: Row) -> Row: ...

    async def delete(self, kind: str, number: int) -> None: ...

    async def is_changed(self) -> bool: ...

    async def plan(self) -> Row: ...

    async def apply(self, *, force: bool) -> Row: ...

    async def export(self) -> tuple[str, list[str]]: ...

    async def import_text(self, path: Path, text: str, *, excludes_missing: bool) -> list[str]: ...


class RemoteClient:
    """Sends the operations to the running process."""

    def __init__(self, url: str, token: Secret | None) -> None:
        self._url = url.rstrip("/")
        # A proxy of the environment cannot reach this machine's own names, and must not see a token
        # in plain text.
        self._http = httpx.AsyncClient(
            base_url=f"{self._url}/api",
            headers=None if token is None else {"Authorization": f"Bearer {token.reveal()}"},
            timeout=SECONDS_MAX,
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def rows(self, kind: str, filters: Row) -> list[Row]:
        rows: list[Row] = []
        while True:
            numbers = {"page": len(rows) // PER_PAGE + 1, "per_page": PER_PAGE}
            answer = await self._request("GET", f"/{kind}s", params=filters | numbers)
            rows += answer["items"]
            if len(rows) >= answer["total"] or not answer["items"]:
                return rows

    async def create(self, kind: str, fields: Row) -> Row:
        row: Row = await self._request("POST", f"/{kind}s", json=fields)
        return row

    async def patch(self, kind: str, number: int, changes: Row) -> Row:
        row: Row = await self._request("PATCH", f"/{kind}s/{number}", json=changes)
        return row

    async def delete(self, kind: str, number: int) -> None:
        await self._send("DELETE", f"/{kind}s/{number}")

    async def is_changed(self) -> bool:
        return bool((await self.draft())["changed"])

    async def plan(self) -> Row:
        plan: Row = await self._request("GET", "/plan")
        return plan

    async def apply(self, *, force: bool) -> Row:
        answer: Row = await self._request("POST", "/apply", json={"force": force})
        return answer

    async def export(self) -> tuple[str, list[str]]:
        response = await self._send("GET", "/export")
        variables = response.headers.get("x-streamer-variables", "")
        return response.text, [name for name in variables.split(", ") if name]

    async def import_text(self, path: Path, text: str, *, excludes_missing: bool) -> list[str]:
        body = {"yaml": text, "exclude_missing": excludes_missing}
        notes: list[str] = (await self._request("POST", "/import", json=body))["notes"]
        return notes

    async def events(self) -> AsyncGenerator[tuple[str, Any]]:
        """Yield the events of the process, a snapshot first, until the process ends."""
        try:
            async with self._http.stream("GET", "/events", timeout=EVENT_SECONDS) as response:
                if response.is_error:
                    raise _refusal(response.status_code, await response.aread(), self._url)
                name = ""
                async for line in response.aiter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        yield name, json.loads(value)
        except httpx.ConnectError as exc:
            raise self._unreachable(exc) from None
        except httpx.HTTPError:
            return

    async def draft(self, seconds: float = SECONDS_MAX) -> Row:
        """Return the state of the draft. Raises NotFoundError if a different program answers."""
        draft: Any = await self._request("GET", "/draft", timeout=seconds)
        if not isinstance(draft, dict) or "mapping_database" not in draft:
            raise NotFoundError(f"{self._url} is not streamer")
        return draft

    async def _request(self, method: str, path: str, **options: Any) -> Any:
        response = await self._send(method, path, **options)
        try:
            return response.json()
        except ValueError:
            raise NotFoundError(f"{self._url} is not streamer") from None

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = await self._http.request(method, path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise self._unreachable(exc) from None
        if not response.is_success:
            raise _refusal(response.status_code, response.content, self._url)
        return response

    def _unreachable(self, error: BaseException) -> AdminConnectionError:
        reason = "no answer in time" if isinstance(error, httpx.TimeoutException) else error
        # The library names the operating system's error only in the chain of causes.
        while isinstance(reason, BaseException) and reason.__cause__ is not None:
            reason = reason.__cause__
        return AdminConnectionError(
            f"cannot reach {self._url}: {reason}", hint="check that `streamer run` is running there"
        )


_BY_STATUS: Final[dict[int, type[AdminError]]] = {
    401: UnauthenticatedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: UnreadyError,
    422: InvalidError,
}


def _refusal(status: int, body: bytes, url: str) -> AdminError:
    """Return the error that an answer of the API stands for."""
    try:
        problem = json.loads(body)["error"]
        message, hint = str(problem["message"]), problem["hint"]
    except (ValueError, KeyError, TypeError):
        return NotFoundError(f"{url} answers {status}, so it is not streamer")
    if status == 429:
        return ThrottledError(message, seconds=0, hint=hint)
    if status == 401:
        hint = "export STREAMER_ADMIN__TOKEN, as admin.token of that process"
    return _BY_STATUS.get(status, AdminError)(message, hint=hint)


@asynccontextmanager
async def open_client(
    settings: Settings, config: Path, mapping: Mapping, url: str | None
) -> AsyncIterator[MappingClient]:
    """Yield the client of the command line: for the process at *url*, the running process, or the
    file.

    Raises AdminError, ConfigurationError.
    """
    async with find_process(settings, url) as remote:
        if remote is not None:
            yield remote
            return
    service = await open_service(settings, config, mapping)
    try:
        yield LocalClient(service, command_actor())
    finally:
        await service.close()


@asynccontextmanager
async def find_process(
    settings: Settings, url: str | None, *, may_be_static: bool = False
) -> AsyncIterator[RemoteClient | None]:
    """Yield the process at *url*, or the process of this configuration; None without a process.

    *may_be_static*: also yield a process without a mapping database, which accepts no edits.
    Raises AdminError.
    """
    is_static = settings.mapping_database is None
    if url is not None:
        _check_address(url)
        address = url
    elif not settings.http.listen or (is_static and not may_be_static):
        yield None
        return
    else:
        address = local_url(settings.http.listen)
    remote = RemoteClient(address, settings.admin.token)
    try:
        if url is not None:
            await remote.draft()
            yield remote
        else:
            yield remote if await _is_ours(remote, settings) else None
    finally:
        await remote.close()


async def _is_ours(remote: RemoteClient, settings: Settings) -> bool:
    """Return whether a process answers with the mapping database of these settings."""
    try:
        draft = await remote.draft(PROBE_SECONDS)
    except (AdminConnectionError, NotFoundError):
        return False
    return bool(draft["mapping_database"] == await in_admin_thread(database_path, settings))


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not host:
        raise SettingsError("--url: not an address", hint="write http://127.0.0.1:8000")
    if parts.scheme == "http" and not is_loopback(host):
        raise SettingsError(
            "--url: a token would cross the network in plain text",
            hint="use https, or a tunnel to the machine itself",
        )
