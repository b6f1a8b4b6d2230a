"""Informs a webhook of the beginning, the changes and the end of problems (section ``notify``).

After each check, the notifier compares the present problems with the notified problems. The
bookkeeping stores these, so a restart repeats no notice, and replicas agree. While the target is
away, the memory of the process replaces the bookkeeping, and only a process that starts meanwhile
repeats notices.

A receiver that is away delays only notices. The next attempt sends the changes since the last
notice, so no queue grows.
"""

import time
from asyncio import Event
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.notified_problems import delete_notified, read_notified, store_notified
from streamer.config.notify_section import NotifySection
from streamer.errors.error_classes import TargetError
from streamer.observability.metrics import Metrics
from streamer.observability.webhook import UndeliveredError, Webhook
from streamer.report.notice_duty import NoticeDuty
from streamer.report.problem_notices import (
    Key,
    Notice,
    NotifiedProblem,
    find_notices,
    message,
    message_id,
    notified_after,
)
from streamer.report.problems import Problem, ProblemKind, Severity
from streamer.runtime.target_health import TargetHealth
from streamer.util.backoff import Backoff

log = structlog.get_logger()

RETRY_SECONDS: Final = 5.0
RETRY_SECONDS_MAX: Final = 300.0
ABSENT_SECONDS: Final = 15.0
"""A problem counts as ended after it has been absent for this time. A table in error, for example,
has no error while streamer tries again after a start.
"""
NOTICES_MAX: Final = 100
"""The maximum number of notices in a message."""


class Notifier:
    """Sends notices. `check` gets the problems, the owner runs `run`."""

    def __init__(self, metrics: Metrics, target: TargetHealth) -> None:
        self._metrics = metrics
        self._target = target
        self._settings = NotifySection()
        self._webhook: Webhook | None = None
        self._checked = Event()
        self._latest: tuple[Sequence[Problem], NoticeDuty] = (), NoticeDuty()
        self._since: dict[Key, datetime] = {}
        """When this process first noticed each present problem."""
        self._notified: dict[Key, NotifiedProblem] = {}
        self._unstored: set[Key] = set()
        """Keys whose last notice is not yet in the bookkeeping."""
        self._absent: dict[Key, float] = {}
        """The monotonic time of the first check without the problem."""
        self._retry = Backoff()
        self._retry_at = 0.0

    def adopt(self, settings: NotifySection) -> None:
        """Use *settings* from the next notice on."""
        if settings == self._settings:
            return
        self._settings = settings
        url = settings.webhook
        self._webhook = None if url is None else Webhook(url, settings.key, settings.key_file)
        self._reset_retry()

    def check(self, problems: Sequence[Problem], duty: NoticeDuty) -> None:
        """Report the changes of *problems* soon; *duty*: the part of this process."""
        self._latest = duty.problems(problems), duty
        now = datetime.now(UTC)
        self._since = {p.key: self._since.get(p.key, now) for p in self._latest[0]}
        self._checked.set()

    async def run(self, bookkeeping: Bookkeeping) -> None:
        """Send notices until cancelled."""
        while True:
            await self._checked.wait()
            self._checked.clear()
            webhook, on = self._webhook, self._settings.on  # a reload may change both meanwhile
            if webhook is None or time.monotonic() < self._retry_at:
                continue
            try:
                await self._send(webhook, on, bookkeeping)
            except UndeliveredError as exc:
                self._metrics.notifications.labels("failed").inc()
                self._retry.log(log, "notification not sent; streamer retries", exc)
                self._retry_at = time.monotonic() + self._retry.next_seconds()
            else:
                self._reset_retry()

    def _reset_retry(self) -> None:
        self._retry = Backoff(first=RETRY_SECONDS, most=RETRY_SECONDS_MAX)
        self._retry_at = 0.0

    async def _send(
        self, webhook: Webhook, on: Sequence[Severity | ProblemKind], bookkeeping: Bookkeeping
    ) -> None:
        """Send the notices that are due. Raises UndeliveredError."""
        if not await self._read(bookkeeping):
            return
        notices = self._find_notices(on)
        for start in range(0, len(notices), NOTICES_MAX):
            batch = notices[start : start + NOTICES_MAX]
            content = {"target": self._target.name, **message(batch)}
            await webhook.send(message_id(batch), content)
            self._metrics.notifications.labels("sent").inc()
            self._notified = notified_after(self._notified, batch)
            self._unstored |= {notice.state.key for notice in batch}
            await self._store(bookkeeping)

    def _find_notices(self, on: Sequence[Severity | ProblemKind]) -> list[Notice]:
        problems, duty = self._latest
        current = {problem.key for problem in problems}
        now = time.monotonic()
        self._absent = {
            key: self._absent.get(key, now)
            for key in self._notified
            if key not in current and duty.may_end(key)
        }
        ended = {key for key, since in self._absent.items() if now - since >= ABSENT_SECONDS}
        return find_notices(problems, self._since, self._notified, ended, on)

    async def _read(self, bookkeeping: Bookkeeping) -> bool:
        """Read the notified problems; return False after an error."""
        if not self._target.is_well:
            return True
        try:
            if self._unstored:
                await self._write(bookkeeping)
            self._notified = await read_notified(bookkeeping)
        except TargetError as exc:  # the state of the target shows the failure
            log.debug("streamer cannot read the notices already sent", reason=str(exc))
            return False
        return True

    async def _store(self, bookkeeping: Bookkeeping) -> None:
        if not self._target.is_well:
            return
        try:
            await self._write(bookkeeping)
        except TargetError as exc:  # the next check tries again
            log.debug("streamer cannot store the notices already sent", reason=str(exc))

    async def _write(self, bookkeeping: Bookkeeping) -> None:
        """Store the notices of `_unstored`. Raises TargetError."""
        notified = [self._notified[key] for key in self._unstored if key in self._notified]
        async with bookkeeping.transaction() as transaction:
            await store_notified(transaction, notified)
            await delete_notified(transaction, self._unstored - self._notified.keys())
        self._unstored.clear()
