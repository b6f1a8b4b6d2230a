"""``streamer run``: the long-running process."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from streamer.config import static_mapping
from streamer.config.settings import Settings
from streamer.copy.early_spark import begin_spark
from streamer.errors.error_classes import ConfigurationError, MappingError, StreamerError
from streamer.mapping.rules import Mapping, SourceMapping
from streamer.observability import build_facts
from streamer.postgres.conninfo import server_name
from streamer.postgres.credentials import is_same_login
from streamer.runtime.child_processes.child_process import Membership
from streamer.runtime.configuration_watch import watching
from streamer.runtime.shutdown import stop_on_signals
from streamer.util.lsn import Lsn

if TYPE_CHECKING:
    from fastapi import FastAPI

    from streamer.admin.admin_server import AdminServer
    from streamer.admin.live.events import Events
    from streamer.observability.http_server import RenderMetrics
    from streamer.runtime.process.engine import Engine

log = structlog.get_logger()

_ADOPTED: Final = ("sources", "notify")
"""Settings that `run` adopts as a whole, without a restart."""


def select_sources(mapping: Mapping, only: list[str], *, may_miss: bool = False) -> Mapping:
    """Return the sources that ``--only`` names: ``DATABASE`` or ``DATABASE:SID``.

    Raises MappingError for a missing source, unless *may_miss*.
    """
    if not only:
        return mapping
    chosen: list[SourceMapping] = []
    for name in only:
        matches = [s for s in mapping.sources if name in (s.database, s.label)]
        if not matches and not may_miss:
            labels = ", ".join(source.label for source in mapping.sources)
            raise MappingError(f"--only {name}: no such source", hint=f"the sources are: {labels}")
        chosen += [source for source in matches if source not in chosen]
    return Mapping(tuple(chosen), mapping.target_namespace)


async def run(
    path: Path,
    overrides: dict[str, Any],
    only: list[str],
    at_lsn: Lsn | None,
    *,
    when_caught_up: bool,
    take_over: Collection[str],
    max_sources: int | None,
    membership: Membership | None,
    watches_file: bool,
) -> int:
    """Run until a signal, or until the stream reaches *at_lsn* or is caught up; return the exit
    code. *membership*: the membership of a process that a parent started. *watches_file*: read
    the configuration again whenever the file changes; a parent watches the file for its processes.

    Raises StreamerError for an error that ends the process.
    """
    early_signals: list[str] = []
    handlers: dict[str, Callable[[], None]] = {
        name: partial(early_signals.append, name) for name in ("stop", "reload")
    }
    # Handle signals before any other step, because an unhandled signal ends the process.
    stop = stop_on_signals(lambda: handlers["stop"](), lambda: handlers["reload"]())
    async with AsyncExitStack() as stack:
        if watches_file:
            await stack.enter_async_context(watching(path, lambda: handlers["reload"]()))
        settings, mapping = _load(path, overrides, membership)
        count = 1 if when_caught_up or at_lsn is not None else settings.processes
        is_single_process = membership is None and count == 1
        selected = select_sources(mapping, only, may_miss=True).sources
        launcher = await begin_spark(settings, selected) if is_single_process else None
        if launcher is not None:
            stack.push_async_callback(launcher.stop)
        # Spark starts during these imports.
        from streamer.admin.admin_server import opened_admin
        from streamer.apply.lanes.spool import prepare_parent
        from streamer.cli.run_as_processes import make_parent, obeying
        from streamer.runtime.child_processes.orphaned_journals import gather_journals
        from streamer.runtime.process.engine import Engine, StopCondition
        from streamer.runtime.replicas.mapping_follower import MappingFollower
        from streamer.runtime.replicas.replica import is_known_dead

        gc.freeze()  # so that no garbage collection traverses imported modules
        prepare_parent(settings.spool.path)
        if membership is None and settings.spool.directory is not None:
            gather_journals(settings.spool.directory, count)
        if membership is not None:
            structlog.contextvars.bind_contextvars(process=membership.number)
        elif count > 1:
            parent = make_parent(settings, path, only, list(take_over), max_sources)
            handlers.update(stop=parent.stop, reload=parent.reload)
            for name in early_signals:
                handlers[name]()
            return await parent.run()
        admin = await stack.enter_async_context(opened_admin(settings, path, mapping))
        is_static = settings.mapping_database is None
        admin.select_sources = partial(select_sources, only=only, may_miss=not is_static)
        mapping = admin.select_sources(admin.mapping)
        if is_static:
            static_mapping.require_sources(settings, mapping, f"{path}: ")
        static_mapping.require_usable(mapping)
        if at_lsn is not None and len(mapping.sources) > 1:
            raise MappingError(
                "--stop-at-lsn needs a single source", hint="name the source with --only"
            )
        _log_start(path, settings, mapping)
        engine = Engine(
            settings,
            mapping,
            StopCondition(at_lsn, when_caught_up),
            is_partial=bool(only),
            take_over=take_over,
            max_sources=max_sources,
            launcher=launcher,
        )
        events = admin.attach(engine)
        reloading: set[asyncio.Task[None]] = set()

        def start_reload(on_applied: Callable[[], None]) -> None:
            task = asyncio.create_task(
                _reload(
                    admin,
                    engine,
                    settings,
                    path,
                    partial(_load, path, overrides, membership),
                    on_applied,
                ),
                name="configuration",
            )
            reloading.add(task)
            task.add_done_callback(reloading.discard)

        def reload() -> None:
            start_reload(lambda: None)

        def reload_for_operator() -> None:
            start_reload(engine.following.confirm)

        engine.following = MappingFollower(lambda: admin.mapping, reload, is_known_dead)
        handlers.update(stop=engine.stop, reload=reload_for_operator)
        for name in early_signals:
            handlers[name]()
        async with (
            obeying(membership, stop, reload_for_operator) as turn,
            _served(settings, admin, engine, events, membership, turn),
        ):
            try:
                await engine.run()
            except BaseExceptionGroup as group:
                raise _unwrap(group) from group
            finally:
                await events.close()
    return 0


def _load(
    path: Path, overrides: dict[str, Any], membership: Membership | None
) -> tuple[Settings, Mapping]:
    """Read the configuration of this process. Raises ConfigurationError."""
    settings, mapping = static_mapping.load(path, overrides)
    return settings if membership is None else membership.own_settings(settings), mapping


@asynccontextmanager
async def _served(
    settings: Settings,
    admin: "AdminServer",
    engine: "Engine",
    events: "Events",
    membership: Membership | None,
    turn: asyncio.Event,
) -> AsyncIterator[None]:
    """Serve the page, the API and the metrics during a block. Raises SettingsError.

    Routes and templates take two thirds of the processor time of a start, so a thread creates both
    while the engine starts. Without an address to listen on, the process needs neither.
    """
    if not settings.http.listen:
        yield
        return
    from streamer.cli.run_as_processes import serving_as
    from streamer.observability.http_server import make_app, require_private
    from streamer.observability.joined_metrics import render_all

    if not admin.has_credentials:
        require_private(settings.http.listen)
    render: RenderMetrics = engine.metrics.render
    if membership is not None:
        render = partial(render_all, membership.number, render, membership.siblings)

    async def make() -> "FastAPI":
        app = make_app(
            render,
            lambda: [*admin.reasons(), *engine.readiness()],
            admin.problem,
            engine.other_problems,
            admin.may_see_values,
        )
        await admin.add_routes(app, events)
        return app

    async with serving_as(membership, turn, settings.http, make, engine):
        yield


def _log_start(path: Path, settings: Settings, mapping: Mapping) -> None:
    log.info(
        "starting",
        **build_facts.labels(),
        configuration=str(path.resolve()),
        mapping_database=settings.mapping_database,
        target=server_name(settings.target.url.reveal()),
        page=f"http://{settings.http.listen}/" if settings.http.listen else "off",
        sources=[source.label for source in mapping.sources],
        workers=settings.workers,
    )


async def _reload(
    admin: "AdminServer",
    engine: "Engine",
    current: Settings,
    path: Path,
    load: Callable[[], tuple[Settings, Mapping]],
    on_applied: Callable[[], None],
) -> None:
    """Read the configuration again and switch to its sources and passwords.

    An error in the configuration leaves the process unchanged. *on_applied*: runs once the process
    has the mapping, even if a source has failed. With a mapping database, `run` reads the
    last applied revision again.
    """
    try:
        # A `key_command` may take seconds, during which the stream continues.
        settings, mapping = await asyncio.to_thread(load)
        if settings.mapping_database is None:
            static_mapping.require_sources(settings, mapping, f"{path}: ")
        if settings.mapping_database != current.mapping_database:
            raise MappingError(f"{path}: mapping_database has changed", hint="restart streamer")
        await admin.reload(settings, mapping)
        await engine.renew_passwords(settings.target.url)
    except ConfigurationError as exc:
        log.error("configuration rejected, keeping the current configuration", error=str(exc))
        return
    except StreamerError as exc:
        engine.adopt(settings)
        on_applied()
        log.error("configuration applied only in part", error=str(exc), code=exc.code)
        return
    engine.adopt(settings)
    on_applied()
    restart_settings = [
        name
        for name in type(settings).model_fields
        if name not in _ADOPTED and _differs(name, current, settings)
    ]
    if restart_settings:
        log.warning("these settings need a restart", settings=", ".join(restart_settings))
    log.info("configuration applied", sources=len(admin.mapping.sources))


def _differs(name: str, current: Settings, now: Settings) -> bool:
    """Whether a section differs in more than the target's password, which `run` adopts."""
    old, new = getattr(current, name), getattr(now, name)
    if name == "target" and is_same_login(current.target.url, now.target.url):
        new = now.target.model_copy(update={"url": current.target.url})
    return bool(old != new)


def _unwrap(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the only error of a group of tasks if it is a StreamerError; else the group."""
    exc: BaseException = group
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc if isinstance(exc, StreamerError) else group
