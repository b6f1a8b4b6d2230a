"""The mapping, for the command line: over the API of the running process, or in its file.

The user does not choose: a command asks a running process, and without one it edits the file. A
process counts only if it has the same mapping database.
"""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlencode, urlsplit

from streamer.admin.access import is_loopback
from streamer.admin.local_client import PER_PAGE, LocalClient
from streamer.admin.mapping_rows import Row
from streamer.admin.service import database_path, open_service
from streamer.commands.requests import command_actor
from streamer.config.settings import Settings
from streamer.errors import (
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

SECONDS_MAX: Final = 300.0
"""A plan looks at every server."""
PROBE_SECONDS: Final = 3.0
EVENT_SECONDS: Final = 60.0
"""A process says something every quarter of a minute."""


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
    """Asks the process that runs."""

    def __init__(self, url: str, token: Secret | None) -> None:
        self._url = url.rstrip("/")
        self._token = token
        # The environment's proxy is not for this machine, and never for a token in plain text.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def rows(self, kind: str, filters: Row) -> list[Row]:
        rows: list[Row] = []
        while True:
            page = len(rows) // PER_PAGE + 1
            query = urlencode(filters | {"page": page, "per_page": PER_PAGE})
            answer = await self._ask("GET", f"/{kind}s?{query}")
            rows += answer["items"]
            if len(rows) >= answer["total"] or not answer["items"]:
                return rows

    async def create(self, kind: str, fields: Row) -> Row:
        row: Row = await self._ask("POST", f"/{kind}s", fields)
        return row

    async def patch(self, kind: str, number: int, changes: Row) -> Row:
        row: Row = await self._ask("PATCH", f"/{kind}s/{number}", changes)
        return row

    async def delete(self, kind: str, number: int) -> None:
        await self._ask("DELETE", f"/{kind}s/{number}")

    async def is_changed(self) -> bool:
        return bool((await self.draft())["changed"])

    async def plan(self) -> Row:
        plan: Row = await self._ask("GET", "/plan")
        return plan

    async def apply(self, *, force: bool) -> Row:
        answer: Row = await self._ask("POST", "/apply", {"force": force})
        return answer

    async def export(self) -> tuple[str, list[str]]:
        text, headers = await self._send("GET", "/export", None)
        variables = headers.get("x-streamer-variables", "")
        return text, [name for name in variables.split(", ") if name]

    async def import_text(self, path: Path, text: str, *, excludes_missing: bool) -> list[str]:
        body = {"yaml": text, "exclude_missing": excludes_missing}
        answer = await self._ask("POST", "/import", body)
        notes: list[str] = answer["notes"]
        return notes

    async def events(self) -> AsyncGenerator[tuple[str, Any]]:
        """Yield the events of the process, a snapshot first, until it ends."""
        response = await asyncio.to_thread(
            self._open, self._request("GET", "/events"), EVENT_SECONDS
        )
        lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                for line in response:
                    loop.call_soon_threadsafe(lines.put_nowait, line)
                loop.call_soon_threadsafe(lines.put_nowait, None)
            except OSError:
                loop.call_soon_threadsafe(lines.put_nowait, None)
            except RuntimeError:  # the reader has gone
                return

        # A thread that waits for a line cannot be stopped, and no other thread may wait for it.
        threading.Thread(target=read, name="events", daemon=True).start()
        name = ""
        while (line := await lines.get()) is not None:
            field, _, value = line.decode().rstrip("\r\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)

    async def draft(self, seconds: float = SECONDS_MAX) -> Row:
        """Return the state of the draft. Raises NotFoundError if the answer is not our API's."""
        draft: Any = await self._ask("GET", "/draft", seconds=seconds)
        if not isinstance(draft, dict) or "mapping_database" not in draft:
            raise NotFoundError(f"{self._url} is not streamer")
        return draft

    async def _ask(
        self, method: str, path: str, body: Row | None = None, seconds: float = SECONDS_MAX
    ) -> Any:
        text, _ = await self._send(method, path, body, seconds)
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise NotFoundError(f"{self._url} is not streamer") from None

    async def _send(
        self, method: str, path: str, body: Row | None, seconds: float = SECONDS_MAX
    ) -> tuple[str, dict[str, str]]:
        return await asyncio.to_thread(self._send_now, method, path, body, seconds)

    def _send_now(
        self, method: str, path: str, body: Row | None, seconds: float
    ) -> tuple[str, dict[str, str]]:
        with self._open(self._request(method, path, body), seconds) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            try:
                return response.read().decode(), headers
            except (OSError, ValueError) as exc:
                raise self._away(exc) from None

    def _request(self, method: str, path: str, body: Row | None = None) -> urllib.request.Request:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/api{path}", data, method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if self._token is not None:
            request.add_header("Authorization", f"Bearer {self._token.reveal()}")
        return request

    def _open(self, request: urllib.request.Request, seconds: float) -> Any:
        try:
            return self._opener.open(request, timeout=seconds)
        except urllib.error.HTTPError as exc:
            raise _refusal(exc.code, exc.read(), self._url) from None
        except (OSError, ValueError) as exc:
            raise self._away(exc) from None

    def _away(self, error: Exception) -> AdminConnectionError:
        reason = getattr(error, "reason", error)
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
    """Return an answer that is an error as the error it was."""
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
    """Return the client of the command line: for the process at *url*, or the running one, or the
    file.

    Raises AdminError, ConfigurationError.
    """
    remote = await find_process(settings, url)
    if remote is not None:
        yield remote
        return
    service = await open_service(settings, config, mapping)
    try:
        yield LocalClient(service, command_actor())
    finally:
        await service.close()


async def find_process(
    settings: Settings, url: str | None, *, may_be_static: bool = False
) -> RemoteClient | None:
    """Return the process at *url*, or the one that this configuration is of; None if none runs.

    Without a mapping database there is nothing to edit: such a process counts only if it
    *may_be_static*. Raises AdminError.
    """
    token = settings.admin.token
    if url is not None:
        _check_address(url)
        remote = RemoteClient(url, token)
        await remote.draft()
        return remote
    is_static = settings.mapping_database is None
    if not settings.http.listen or (is_static and not may_be_static):
        return None
    host, _, port = settings.http.listen.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}.get(host, host)
    remote = RemoteClient(f"http://{host}:{port}", token)
    try:
        draft = await remote.draft(PROBE_SECONDS)
    except (AdminConnectionError, NotFoundError):
        return None
    path = None if is_static else await asyncio.to_thread(database_path, settings)
    is_ours = draft["mapping_database"] == path
    return remote if is_ours else None


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
