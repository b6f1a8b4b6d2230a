"""The right to run sources: advisory locks in the target, which one session of the process holds.

A process that loses the session loses the right to all its sources. So the process stores
acknowledgements over this session alone (`streamer.bookkeeping.positions`), and the session never
runs a slow statement. The holder of a lock stores a token, with which all connections of this
process prove that they are on the same server (`streamer.target.fencing_token`). Earlier tokens
are no longer valid.

A lock belongs to an attempt to stream a source. A replica reserves its sources, whose locks then
stay between two attempts. Otherwise a second replica would take over a source that waits for its
next attempt.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from streamer.bookkeeping.sources import read_valid_tokens, register_source, set_source
from streamer.compiled import choice
from streamer.errors.error_classes import StreamerError, TargetConnectionError, TargetFencedError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.blocking_sessions import END_OWN_SQL
from streamer.target.connection import TargetAddress, TargetConnection, target_connection
from streamer.target.fencing_token import FENCE_SQL, LOCK_CLASS, LOCK_SQL, FencingToken, signed
from streamer.util.waiting import wait_while_idle

CHECK_SECONDS: Final = 5.0
ENDING_SECONDS: Final = 0.2
"""The time to wait until a session of streamer ends after pg_terminate_backend."""

_UNLOCK_SQL: Final = "select pg_catalog.pg_advisory_unlock($1::int4, $2::int4)"
_LOST: Final = "target: the session that held the source's lock was lost"

_PURGE: Final = "purge "
"""The first word of the holder of a lock for a purge."""

Result = TypeVar("Result")
P = ParamSpec("P")


def _alone(
    method: Callable[Concatenate["LockSession", P], Awaitable[Result]],
) -> Callable[Concatenate["LockSession", P], Coroutine[Any, Any, Result]]:
    """Run *method* in a task with exclusive use of the session, even if the caller is cancelled."""

    @wraps(method)
    async def run(self: "LockSession", /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await asyncio.shield(self._start(partial(method, self, *args, **kwargs)))

    return run


def purge_holder(process: str) -> str:
    """Return the holder of a lock for a purge. *process*: host and pid. Pure."""
    return f"{_PURGE}{process}"


def purging_process(holder: str) -> str | None:
    """Return host and pid of the process if *holder* is a purge. Pure."""
    return holder.removeprefix(_PURGE) if holder.startswith(_PURGE) else None


class LockSession:
    """The session that holds the locks of a process's sources; the first lock opens the session.

    Statements run in separate tasks, so that the end of a source's attempt interrupts no statement.
    An interrupted statement would lose the session for all sources.
    """

    def __init__(self, address: TargetAddress, holder: str) -> None:
        """*holder*: host and pid of this process."""
        self.holder = holder
        self._address = address
        self._name = f"streamer lock {holder}"
        self._session: TargetConnection | None = None
        self._session_mark = ""
        """A value that no other session has."""
        self._former_pid: int | None = None
        """The pid of the former session, which the server may not have ended yet."""
        self._lost = asyncio.Event()
        """Set when ``_session`` is lost; each session has an event."""
        self._is_doubted = False
        self._using = asyncio.Lock()
        self._held: dict[FencingToken, TargetConnection] = {}
        """The fencing tokens, with the sessions that stored them."""
        self._locked: set[int] = set()
        """The ids of the sources whose locks the session holds."""
        self._reserved: dict[str, int] = {}
        """The sources, by label, whose locks stay between attempts."""
        self._checked_at = 0.0
        self._ours: set[str] = set()
        """The tokens of the bookkeeping at the last check."""
        self._running: set[asyncio.Task[Any]] = set()

    async def acquire(self, source: SourceMapping) -> FencingToken | str:
        """Register *source* and take its lock; return the fencing token, or the holder of the lock.

        Raises TargetConnectionError, TargetRejectedError.
        """
        taking = self._start(partial(self._acquire, source))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back)
            raise

    def _give_back(self, taking: "asyncio.Task[FencingToken | str]") -> None:
        is_done = not taking.cancelled() and taking.exception() is None
        if is_done and isinstance(fence := taking.result(), FencingToken):
            self._start(partial(self._unlock, fence))

    @_alone
    async def reserve(self, source: SourceMapping) -> str | None:
        """Acquire the lock of *source* until `give_up`; return None, or the holder of the lock.

        Raises TargetConnectionError, TargetRejectedError.
        """
        session = await self._connected()
        source_id, holder = await self._lock(session, source)
        if holder is None:
            self._reserved[source.label] = source_id
            await set_source(session, source_id, holder=self.holder)
        return holder

    @_alone
    async def give_up(self, label: str) -> None:
        """Release the lock of a reserved source: now, or at the end of its attempt."""
        source_id = self._reserved.pop(label, None)
        is_held = any(fence.source_id == source_id for fence in self._held)
        if source_id is not None and not is_held:
            await self._unlock_source(source_id)

    @_alone
    async def use(self, work: Callable[[TargetConnection], Awaitable[Result]]) -> Result:
        """Run quick statements over the session, and open the session if necessary.

        Raises the errors of *work*, TargetConnectionError, TargetRejectedError.
        """
        return await work(await self._connected())

    def report_moved_server(self) -> None:
        """Record that a new connection did not reach the server of the session.

        The next `acquire` checks the server, and opens the session again if necessary.
        """
        self._is_doubted = True

    @_alone
    async def release(self, fence: FencingToken) -> None:
        """Release a lock; a lost lock needs no release."""
        await self._unlock(fence)

    @_alone
    async def _is_ours(self, fence: FencingToken) -> bool:
        """Whether the bookkeeping stores the token of *fence*; a single statement checks all
        tokens.

        Raises TargetConnectionError.
        """
        session = self.require(fence)
        if not self._is_checked(fence):
            self._ours = await read_valid_tokens(session, self._held)
            self._checked_at = time.monotonic()
        return fence.token in self._ours

    def _is_checked(self, fence: FencingToken) -> bool:
        """Whether a recent check, for any of the sources, found that *fence* is valid."""
        is_recent = time.monotonic() - self._checked_at < CHECK_SECONDS / 2
        return is_recent and fence.token in self._ours and self._is_held(fence)

    async def guard(self, fence: FencingToken) -> None:
        """Raise TargetConnectionError or TargetFencedError as soon as *fence* is lost."""
        while True:
            if self._is_held(fence):
                await wait_while_idle(self._lost, CHECK_SECONDS, partial(self._is_checked, fence))
            if not (self._is_checked(fence) or await self._is_ours(fence)):
                raise TargetFencedError("target: another process has the lock on this source")

    def use_held(
        self, work: Callable[[Mapping[FencingToken, TargetConnection]], Awaitable[Result]]
    ) -> "asyncio.Task[Result]":
        """Run quick statements over the session. *work* receives the sessions by valid token.

        Several attempts may wait for the task, each behind a shield.
        """
        held = self._held
        return self._start(lambda: work({c: held[c] for c in held if self._is_held(c)}))

    def require(self, fence: FencingToken) -> TargetConnection:
        """Return the session that holds *fence*. Raises TargetConnectionError."""
        if not self._is_held(fence):
            raise TargetConnectionError(_LOST)
        return self._held[fence]

    async def close(self) -> None:
        """Close the session, and release all locks with it."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ---- tasks of the session ------------------------------------------------------------------

    def _start(self, work: Callable[[], Awaitable[Result]]) -> "asyncio.Task[Result]":
        """Start *work* with exclusive use of the session."""

        async def run() -> Result:
            async with self._using:
                return await work()

        task = asyncio.create_task(run(), name=self._name)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio would log the failure if the caller no longer waits

    def _is_held(self, fence: FencingToken) -> bool:
        session = self._held.get(fence)
        return session is not None and session is self._session and not session.is_closed

    async def _connected(self) -> TargetConnection:
        session = self._session
        if session is not None and self._is_doubted and not await self._is_at_target():
            session.terminate()
        self._is_doubted = False
        if session is not None and session.is_outdated:
            # A renewed password restarts all sources, and each restart acquires a new lock.
            await session.close()
        if session is not None and not session.is_closed:
            return session
        self._held.clear()
        self._locked.clear()
        self._lost.set()
        self._session = session = await TargetConnection.connect(self._address, self._name)
        self._session_mark = secrets.token_hex(8)
        self._lost = asyncio.Event()
        session.on_lost(self._lost.set)
        self._checked_at = 0.0
        return session

    async def _is_at_target(self) -> bool:
        """Whether a new connection reaches the server of the session."""
        async with target_connection(self._address, self._name) as probe:
            for fence in self._held:
                if await probe.fetch_value(FENCE_SQL, *fence.parameters):
                    return True
        return False

    async def _acquire(self, source: SourceMapping) -> FencingToken | str:
        session = await self._connected()
        source_id, holder = await self._lock(session, source)
        if holder is not None:
            return holder
        for former in [fence for fence in self._held if fence.source_id == source_id]:
            del self._held[former]  # a cancelled attempt never received this token
        fence = FencingToken(
            source_id, secrets.token_hex(8), session.backend_pid, self._session_mark
        )
        self._held[fence] = session
        values = {"lock_token": fence.token, "implementation": choice.name()}
        try:
            await set_source(session, source_id, holder=self.holder, **values)
        except StreamerError:
            await self._unlock(fence)
            raise
        return fence

    async def _lock(
        self, session: TargetConnection, source: SourceMapping
    ) -> tuple[int, str | None]:
        """Register and lock a source; return its id, and the process that holds its lock."""
        source_id, holder = await register_source(session, source)
        is_locked = await self._try_lock(session, source_id)
        if not is_locked and self._former_pid not in (None, session.backend_pid):
            await session.execute(END_OWN_SQL, self._former_pid, self._name)
            await asyncio.sleep(ENDING_SECONDS)
            is_locked = await self._try_lock(session, source_id)
        if not is_locked:
            return source_id, holder or "another process"
        self._former_pid = session.backend_pid
        return source_id, None

    async def _try_lock(self, session: TargetConnection, source_id: int) -> bool:
        if source_id not in self._locked and await session.fetch_value(
            LOCK_SQL, signed(LOCK_CLASS), source_id
        ):
            self._locked.add(source_id)
        return source_id in self._locked

    async def _unlock(self, fence: FencingToken) -> None:
        is_held = self._is_held(fence)
        self._held.pop(fence, None)
        if is_held and fence.source_id not in self._reserved.values():
            await self._unlock_source(fence.source_id)

    async def _unlock_source(self, source_id: int) -> None:
        if self._session is not None and source_id in self._locked:
            self._locked.discard(source_id)
            with contextlib.suppress(StreamerError):  # a lost session held the lock
                await self._session.fetch_value(_UNLOCK_SQL, signed(LOCK_CLASS), source_id)
