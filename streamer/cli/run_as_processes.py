"""``streamer run`` as the parent of several processes, and as a process with a parent."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from fastapi import FastAPI

from streamer.cli.terminal import GLOBALS
from streamer.config.settings import HttpSettings, Settings
from streamer.observability.http_server import listen, make_app, serving, serving_in_turn
from streamer.runtime.child_processes.child_process import (
    RELOAD,
    SERVE,
    STOP,
    Membership,
    obey,
    read_commands,
)
from streamer.runtime.child_processes.parent_process import Parent
from streamer.runtime.process.engine import Engine


def make_parent(
    settings: Settings,
    path: Path,
    only: Sequence[str],
    take_over: Sequence[str],
    max_sources: int | None,
) -> Parent:
    """Return the parent of processes that run with the same options. Raises SettingsError."""
    arguments = ["--config", str(path), "--log-level", GLOBALS.log_level]
    arguments += ["--log-format", GLOBALS.log_format, "run"]
    for option, names in (("--only", only), ("--take-over", take_over)):
        for name in names:
            arguments += [option, name]
    if max_sources is not None:
        arguments += ["--max-sources", str(max_sources)]
    # Detached: the socket lives as long as the parent.
    port = listen(settings.http.listen).detach() if settings.http.listen else None
    return Parent(settings.processes, arguments, port)


@contextlib.asynccontextmanager
async def obeying(
    membership: Membership | None, stop: Callable[[str], None], reload: Callable[[], None]
) -> AsyncIterator[asyncio.Event]:
    """Run the commands of the parent, if any, during a block; yield the event that lets the process
    serve HTTP.
    """
    turn = asyncio.Event()
    if membership is None:
        yield turn
        return
    acts: dict[str, Callable[[], None]] = {
        STOP: lambda: stop(STOP),
        RELOAD: reload,
        SERVE: turn.set,
    }
    task = asyncio.create_task(
        obey(await read_commands(), lambda command: acts[command]()), name="commands"
    )
    try:
        yield turn
    finally:
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def serving_as(
    membership: Membership | None,
    turn: asyncio.Event,
    settings: HttpSettings,
    make: Callable[[], Awaitable[FastAPI]],
    engine: Engine,
) -> AsyncIterator[None]:
    """Serve an application during a block; a process with a parent does so once *turn* is set.

    *make*: makes the application, while the engine starts. A process with a parent also answers its
    siblings, on a separate socket. Raises SettingsError.
    """
    async with contextlib.AsyncExitStack() as stack:
        if membership is None:
            port = listen(settings.listen)
            turn.set()
        else:
            inner = make_app(
                engine.metrics.render, engine.readiness, other_problems=engine.other_problems
            )
            await stack.enter_async_context(serving(membership.listen(), inner))
            port = socket.socket(fileno=membership.port)
        proxies = settings.trusted_proxies
        await stack.enter_async_context(
            serving_in_turn(turn, port, make, engine.stop, trusted_proxies=proxies)
        )
        yield
