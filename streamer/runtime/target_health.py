"""The state of the target, for readiness, page, status and metrics.

A separate connection checks whether the target answers and accepts writes, and receives operators'
requests. The state therefore does not depend on changes in flight: idle and busy sources
learn of an outage at the same time. An answer that takes longer than `ANSWER_SECONDS` counts as an
outage, so a network that swallows packets is an outage as well.

States: `starting` until the first answer, then `reachable`, `unreachable` (no connection, or no
answer in time), `refused` (authentication, privileges, or too many connections), `read-only`,
`error`.
"""

import asyncio
import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from streamer.bookkeeping.requests import has_requests
from streamer.errors.connection_limits import TargetConnectionLimitError
from streamer.errors.error_classes import (
    StreamerError,
    TargetConnectionError,
    TargetError,
    TargetReadOnlyError,
    TargetRejectedError,
)
from streamer.errors.error_reports import ErrorReport, error_fields
from streamer.errors.remedies import Remedy
from streamer.postgres.conninfo import reach_hint, server_name
from streamer.report.problem_facts import ReportedTarget
from streamer.target.catalog import Unlogged, read_unlogged
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.target.session_waits import SessionWaits, read_waits
from streamer.target.standby_target import standby_error
from streamer.util.waiting import wait_for_event

log = structlog.get_logger()

# The process detects an outage within the sum of these times. The page adds its polling interval
# and its wait for a status. The total stays below 12 s.
CHECK_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 5.0
REQUEST_POLL_SECONDS: Final = 5.0
"""The task also polls for requests, because a lost connection loses its notifications."""

# default_transaction_read_only does not matter, because each session of streamer sets the parameter
# to off.
_IS_READ_ONLY_SQL: Final = "select pg_catalog.pg_is_in_recovery()"


class TargetState(enum.StrEnum):
    STARTING = "starting"
    REACHABLE = "reachable"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    READ_ONLY = "read-only"
    ERROR = "error"


@dataclass(slots=True)
class TargetHealth:
    """One process's view of the target. ``confirmed_at``: the monotonic time of the last answer."""

    name: str = "target"
    state: TargetState = TargetState.STARTING
    error: str | None = None
    error_code: str | None = None
    remedy: Remedy | None = None
    since: datetime | None = None
    """When the state began; None if the state is older than this process."""
    confirmed_at: float | None = None
    unlogged: Unlogged = field(default_factory=dict)
    waits: SessionWaits = field(default_factory=SessionWaits)

    @property
    def is_well(self) -> bool:
        return self.state is TargetState.REACHABLE

    @property
    def is_read_only(self) -> bool:
        """Whether the target accepts reads but no writes."""
        return self.state is TargetState.READ_ONLY

    @property
    def silent_seconds(self) -> float:
        """Seconds since the target last confirmed that it accepts writes; 0 while it does."""
        if self.is_well or self.confirmed_at is None:
            return 0.0
        return time.monotonic() - self.confirmed_at

    @property
    def hint(self) -> str | None:
        return None if self.remedy is None else str(self.remedy)

    @property
    def report(self) -> ErrorReport | None:
        """The error with its remedy; None while the target accepts writes."""
        if self.error is None:
            return None
        return ErrorReport(self.error, self.error_code or TargetError.code, self.remedy)

    @property
    def facts(self) -> ReportedTarget:
        return ReportedTarget(self.name, self.state.value, self.report, self.waits.standby)

    def confirm(self, waits: SessionWaits | None = None) -> None:
        self.confirmed_at, self.waits = time.monotonic(), waits or SessionWaits()
        self._enter(TargetState.REACHABLE, None)

    def record_error(self, error: StreamerError, address: TargetAddress) -> None:
        """Enter the state for *error*, with the operator's next step."""
        match error:
            case TargetRejectedError() | TargetConnectionLimitError():
                state = TargetState.REFUSED
            case TargetConnectionError():
                state = TargetState.UNREACHABLE
            case TargetReadOnlyError():
                state = TargetState.READ_ONLY
            case _:
                state = TargetState.ERROR
        self.remedy = error.remedy
        if state is TargetState.UNREACHABLE and error.remedy is None:
            self.remedy = reach_hint(address.dsn.reveal())
        self.error_code = error.code
        self.waits = SessionWaits()
        self._enter(state, error.message)

    def record_refusal(self, refusal: ErrorReport) -> None:
        """Enter `refused` because the target refuses new sessions; an older session may live on."""
        self.error_code, self.remedy, self.waits = refusal.code, refusal.remedy, SessionWaits()
        self._enter(TargetState.REFUSED, refusal.message)

    def _enter(self, state: TargetState, error: str | None) -> None:
        if state is TargetState.REACHABLE:
            self.error_code, self.remedy = None, None
        if state is not self.state:
            self.since = datetime.now(UTC)
        self.state, self.error = state, error

    def to_json(self) -> dict[str, Any]:
        """Return the state for status, readiness and page."""
        return {
            "name": self.name,
            "state": self.state.value,
            **error_fields(self.report),
            "hint": self.hint,
            "commands": [] if self.remedy is None else [c.line for c in self.remedy.commands],
            "since": self.since and self.since.isoformat(timespec="seconds"),
            "wait": None if self.waits.standby is None else self.waits.standby.to_json(),
        }


def refusal_of(conditions: Iterable[tuple[str, ErrorReport | None]]) -> ErrorReport | None:
    """Return why the target refuses the sessions of every source; None while a source streams.

    *conditions*: states and errors of the sources. Pure.
    """
    refusal = None
    for state, error in conditions:
        if state == "streaming":
            return None
        if error is not None and error.code == TargetConnectionLimitError.code:
            refusal = error
    return refusal


class NoAnswerError(TargetConnectionError):
    """The target does not answer on an open connection, so a new connection would not help."""


async def check_writable(connection: TargetConnection) -> SessionWaits:
    """Return the waits of streamer's sessions. Raise TargetError unless the target answers in time
    and accepts writes.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            is_read_only = await connection.fetch_value(_IS_READ_ONLY_SQL)
            waits = await read_waits(connection)
    except TimeoutError:
        connection.terminate()
        raise NoAnswerError(f"target: no answer for {ANSWER_SECONDS:g} s") from None
    if is_read_only:
        raise standby_error()
    return waits


async def check_once(address: TargetAddress, application_name: str) -> TargetHealth:
    """Connect, check once and return the state: for commands outside the process."""
    health = TargetHealth(server_name(address.dsn.reveal()))
    try:
        connection = await _connect(address, application_name)
        try:
            waits = await check_writable(connection)
        finally:
            await connection.close(ANSWER_SECONDS)
        health.confirm(waits)
    except StreamerError as exc:
        health.record_error(exc, address)
    health.since = None
    return health


class TargetMonitor:
    """Keeps a `TargetHealth` current, and passes operators' requests on."""

    def __init__(
        self,
        address: TargetAddress,
        channel: str,
        is_request: Callable[[str], bool],
        on_request: Callable[[bool], None],
        on_error: Callable[[StreamerError], None],
        find_refusal: Callable[[], ErrorReport | None],
    ) -> None:
        """Calls *on_request* with True after a notification for which *is_request* is true, and
        with False when a poll finds requests.

        *find_refusal* returns why the target refuses the sessions of all sources, if so. The
        monitor's session may be older than the limit that refuses further sessions.
        """
        self.health = TargetHealth(server_name(address.dsn.reveal()))
        self._address = address
        self._channel = channel
        self._is_request = is_request
        self._on_request = on_request
        self._on_error = on_error
        self._find_refusal = find_refusal
        self._woken = asyncio.Event()
        self._was_requested = False
        self._connection: TargetConnection | None = None

    async def run(self) -> None:
        """Check the target until cancelled."""
        polled_at = time.monotonic()
        try:
            while True:
                await self._check()
                await wait_for_event(self._woken, CHECK_SECONDS)
                self._woken.clear()
                was_requested, self._was_requested = self._was_requested, False
                is_due = time.monotonic() - polled_at >= REQUEST_POLL_SECONDS
                if is_due:
                    polled_at = time.monotonic()
                if was_requested or (is_due and await self._poll()):
                    self._on_request(was_requested)
        finally:
            if self._connection is not None:
                await self._connection.close()

    async def _poll(self) -> bool:
        """Read the unlogged tables, and return whether requests exist; False without an answer."""
        connection = self._connection
        if connection is None or connection.is_closed or not self.health.is_well:
            return False
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self.health.unlogged = await read_unlogged(connection)
                return await has_requests(connection)
        except (StreamerError, TimeoutError):
            connection.terminate()  # the next check reports the reason
            return False

    async def _check(self) -> None:
        former = self.health.state
        try:
            try:
                # A single deadline for the whole check, so that the times of its parts do not add
                # up.
                async with asyncio.timeout(ANSWER_SECONDS):
                    waits = await self._reach()
            except TimeoutError:
                if self._connection is not None:
                    self._connection.terminate()
                raise NoAnswerError(f"target: no answer for {ANSWER_SECONDS:g} s") from None
            if (refusal := self._find_refusal()) is None:
                self.health.confirm(waits)
            else:
                self.health.record_refusal(refusal)
        except StreamerError as exc:
            self.health.record_error(exc, self._address)
            self._on_error(exc)
        if self.health.state is not former:
            self._log(former)

    async def _reach(self) -> SessionWaits:
        if self._connection is not None:
            waits = await self._check_session(self._connection)
            if waits is not None:
                return waits
        self._connection = await _connect(self._address, "streamer listener")
        # The pipelines lose their connections as well: the target's state must be the first
        # cause.
        self._connection.on_lost(self._woken.set)
        await self._connection.listen(self._channel, self._notified)
        return await check_writable(self._connection)

    def _notified(self, payload: str) -> None:
        if self._is_request(payload):
            self._was_requested = True
            self._woken.set()

    async def _check_session(self, connection: TargetConnection) -> SessionWaits | None:
        """Return None for a lost connection: the loss alone does not show the server's state."""
        if connection.is_closed:
            return None
        if connection.is_outdated:
            await connection.close()
            return None
        try:
            return await check_writable(connection)
        except NoAnswerError:
            raise
        except TargetConnectionError:
            if not connection.is_closed:
                connection.terminate()
            return None

    def _log(self, former: TargetState) -> None:
        health = self.health
        if not health.is_well:
            log.error(
                "target not available",
                target=health.name,
                state=health.state.value,
                error=health.error,
                hint=health.hint,
            )
        elif former is not TargetState.STARTING:
            log.info("target reachable again", target=health.name, was=former.value)


async def _connect(address: TargetAddress, application_name: str) -> TargetConnection:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await TargetConnection.connect(address, application_name)
    except TimeoutError:
        raise TargetConnectionError(f"target: no answer for {ANSWER_SECONDS:g} s") from None
