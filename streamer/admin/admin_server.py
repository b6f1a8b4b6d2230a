"""The admin part of `streamer run`: the mapping to run, and API and page on the HTTP server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog
from fastapi import FastAPI, Request

from streamer.admin.api.router import install_api
from streamer.admin.live.events import Events
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.mapping.admin_store import CHECK_SECONDS
from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.page.page_routes import install_page
from streamer.admin.page.render_templates import load
from streamer.admin.service.access import Access
from streamer.admin.service.admin_service import AdminService, open_service
from streamer.config.settings import Settings, UserSettings
from streamer.errors.error_classes import AdminError, StoreError
from streamer.mapping.rules import Mapping
from streamer.report.problems import of_mapping
from streamer.runtime.health.readiness import Reason, reason_of
from streamer.runtime.process.engine import Engine
from streamer.target.connection import TargetAddress

log = structlog.get_logger()

TOKEN_LENGTH_MIN = 16


class AdminServer:
    """The admin of a process."""

    def __init__(self, service: AdminService, access: Access) -> None:
        self._service = service
        self._access = access

    @property
    def mapping(self) -> Mapping:
        """The whole mapping that the last apply made effective."""
        return self._service.mapping

    @property
    def select_sources(self) -> Callable[[Mapping], Mapping]:
        """Returns the sources of a mapping that this process runs."""
        return self._service.select_sources

    @select_sources.setter
    def select_sources(self, select: Callable[[Mapping], Mapping]) -> None:
        self._service.select_sources = select

    def attach(self, engine: Engine) -> Events:
        """Apply mappings to *engine*.

        The caller must close the returned events before the server stops.
        """
        settings = self._service.settings
        address = TargetAddress.parse(settings.target.url)
        events = Events(engine, address, self._service.labels)
        self._service.engine = engine
        self._service.find_lost_mapping = lambda: engine.mapping_problem
        self._service.on_change = events.publish
        engine.metrics.mapping_error.set_function(lambda: float(self._service.problem is not None))
        events.start()
        return events

    async def add_routes(self, app: FastAPI, events: Events) -> None:
        """Add the routes of the API and the page to *app*."""
        await in_admin_thread(load)
        await in_admin_thread(install, app, self._service, self._access, events)

    def may_see_values(self, request: Request) -> bool:
        """Return whether the user behind a request may see values of rows."""
        try:
            return self._access.identify(request) is not None
        except AdminError:
            return False

    @property
    def has_credentials(self) -> bool:
        """Whether every request needs credentials."""
        return not self._access.is_open

    def problem(self) -> str | None:
        """Return the fault of the mapping as a whole."""
        problem = self._service.problem
        return None if problem is None else problem.error

    def reasons(self) -> list[Reason]:
        """Return the reasons why this process is not ready, without the reasons of sources."""
        problem = self._service.store.problem
        return [] if problem is None else [reason_of(of_mapping(problem.report))]

    async def reload(self, settings: Settings, mapping: Mapping) -> None:
        """Switch to the last applied revision, or without a mapping database to *mapping*.

        Raises StreamerError.
        """
        await self._service.reload(settings, mapping)


def install(app: FastAPI, service: AdminService, access: Access, events: Events) -> None:
    """Add the routes of the API and the page to *app*."""
    status = StatusReader(service, events)
    install_api(app, service, access, events, status)
    install_page(app, service, access, events, status)


async def load_users(service: AdminService, access: Access) -> None:
    """Pass the users of the mapping database to *access*. Raises StoreError."""
    access.set_stored([UserSettings(**row) for row in await service.store.users()])


async def _check_periodically(service: AdminService, access: Access) -> None:
    """Check the file and the users of the mapping database periodically."""
    failure = None
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        await service.store.check_file()
        try:
            await load_users(service, access)
            failure = None
        except StoreError as exc:
            if str(exc) != failure:
                failure = str(exc)
                log.warning("streamer cannot read the users", error=failure)


@asynccontextmanager
async def opened_admin(
    settings: Settings, config: Path, mapping: Mapping
) -> AsyncIterator[AdminServer]:
    """Open the mapping database during a block. Raises ConfigurationError."""
    access = Access(settings.admin)
    for name in ("token", "viewer_token"):
        token = getattr(settings.admin, name)
        if token is not None and len(token.reveal()) < TOKEN_LENGTH_MIN:
            log.warning("a token is too short: an attacker could guess it", setting=f"admin.{name}")
    service = await open_service(settings, config, mapping)
    try:
        # Before the users are loaded from the mapping database, a server might accept every client.
        await load_users(service, access)
    except BaseException:
        await service.close()
        raise
    with suppress(StoreError):  # the periodic check reports this error
        await service.store.content()  # cached, in case of later damage
        await service.store.prune_audit()
    watching = asyncio.create_task(_check_periodically(service, access), name="mapping database")
    try:
        yield AdminServer(service, access)
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await service.close()
