"""The API in the test's own process, on a real store, with an engine that only records mappings."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from argon2 import PasswordHasher
from fastapi import FastAPI

from streamer.admin import admin_server
from streamer.admin.live.events import Events
from streamer.admin.page.render_templates import load
from streamer.admin.service.access import Access
from streamer.admin.service.admin_service import AdminService, open_service
from streamer.config import static_mapping
from streamer.config.settings import Settings
from streamer.mapping.rules import Mapping
from streamer.observability.http_server import make_app
from streamer.observability.metrics import Metrics
from streamer.runtime.target_health import TargetHealth
from streamer.target.connection import TargetAddress
from tests.support.blocking import never_blocking

if TYPE_CHECKING:
    from streamer.apply.write.worker import Worker
    from streamer.bookkeeping.bookkeeping import Bookkeeping
    from streamer.errors.error_classes import StreamerError
    from streamer.runtime.session.supervisor import Supervisor

TOKEN = "admin-token-of-the-tests"
VIEWER_TOKEN = "viewer-token-of-the-tests"
TARGET = "postgresql://loader:target-password@127.0.0.1:1/dw"
CREDENTIALS = f"admin: {{token: {TOKEN}, viewer_token: {VIEWER_TOKEN}}}"


def quick_hash(password: str) -> str:
    """Return a hash that takes a fraction of a millisecond, for users of configurations in tests."""
    return PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(password)


class FakeEngine:
    """Records the mappings that the service switched to."""

    def __init__(self) -> None:
        self.applied: list[Mapping] = []
        self.refusal: StreamerError | None = None
        self.supervisors: list[Supervisor] = []
        self.workers: list[Worker] = []
        self.metrics = Metrics()
        self.target = TargetHealth()
        self.bookkeeping: Bookkeeping | None = None

    async def apply(self, mapping: Mapping) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.applied.append(mapping)

    def confirm_mapping(self) -> None:
        pass


class Admin:
    """The API of a process."""

    def __init__(
        self,
        service: AdminService,
        app: FastAPI,
        events: Events,
        engine: FakeEngine,
        access: Access,
    ):
        self.service = service
        self.access = access
        self.app = app
        self.events = events
        self.engine = engine

    def client(self, token: str | None = TOKEN, **options: Any) -> httpx.AsyncClient:
        """Return a client that sends *token*."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= options.pop("headers", {})
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        base = options.pop("base_url", "http://127.0.0.1:8000")
        return httpx.AsyncClient(transport=transport, base_url=base, headers=headers, **options)


@contextlib.asynccontextmanager
async def admin(
    directory: Path,
    settings: str = CREDENTIALS,
    *,
    target: str = TARGET,
    sources: str = "",
    is_alone: bool = True,
) -> AsyncIterator[Admin]:
    """Open the API; with *sources* without a mapping database.

    A call that blocks the event loop fails, if the API is the only user of the loop (*is_alone*).
    """
    config = directory / "config.yaml"
    database = "" if sources else f"mapping_database: {directory / 'mapping.sqlite'}"
    config.write_text(f'target: {{url: "{target}"}}\n{database}\n{settings}\n{sources}\n')
    loaded, mapping = static_mapping.load(config)
    access = Access(loaded.admin)
    load()
    with never_blocking() if is_alone else contextlib.nullcontext():
        async with _opened(loaded, config, mapping, access) as opened:
            yield opened


@contextlib.asynccontextmanager
async def _opened(
    loaded: Settings, config: Path, mapping: Mapping, access: Access
) -> AsyncIterator[Admin]:
    service = await open_service(loaded, config, mapping)
    engine = FakeEngine()
    service.engine = engine
    events = Events(engine, TargetAddress.parse(loaded.target.url), service.labels)
    app = make_app(Metrics().render, list)
    admin_server.install(app, service, access, events)
    try:
        yield Admin(service, app, events, engine, access)
    finally:
        await events.close()
        await service.close()


OpenAdmin = Callable[..., contextlib.AbstractAsyncContextManager[Admin]]


@pytest.fixture
def open_admin(tmp_path: Path) -> OpenAdmin:
    """Return a function that opens the API: ``async with open_admin() as a``."""

    def opened(*arguments: Any, **options: Any) -> contextlib.AbstractAsyncContextManager[Admin]:
        return admin(tmp_path, *arguments, **options)

    return opened
