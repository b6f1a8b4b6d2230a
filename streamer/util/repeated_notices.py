"""Notices that many sources give at each start: a line of the log names all sources of a notice.

A notice is a line about a lasting condition of a source, such as missing privileges. Sixty sources
of a server would give the notice sixty times, and again after each lost connection. While an engine
runs, a notice waits a moment for further sources, and no source repeats a notice.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

GATHER_SECONDS: Final = 2.0
"""How long a notice waits for further sources."""

Write = Callable[..., Any]
"""A method of a logger, which takes an event and fields."""
Facts = frozenset[tuple[str, Any]]
"""The fields of a notice apart from its sources."""


class RepeatedNotices:
    """Collects notices, and logs each notice once with the names of all its sources. The owner runs
    `run`, and calls `flush` at the end.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], set[Facts]] = {}
        """The facts of the logged notices, by event and source."""
        self._waiting: dict[tuple[str, Facts], tuple[Write, dict[str, None]]] = {}
        """The writer and the sources of each notice that waits."""
        self._arrived = asyncio.Event()

    def gather(self) -> None:
        """Gather the notices of this task and of later subtasks."""
        _notices.set(self)

    def add(self, write: Write, event: str, source: str, facts: dict[str, Any]) -> None:
        """Log a notice soon, unless the source has already given that notice."""
        stated = frozenset(facts.items())
        logged = self._known.setdefault((event, source), set())
        if stated not in logged:
            logged.add(stated)
            self._waiting.setdefault((event, stated), (write, {}))[1][source] = None
            self._arrived.set()

    def forget(self, event: str, source: str) -> None:
        """Allow *event* of *source* again, because the condition has ended."""
        self._known.pop((event, source), None)

    async def run(self) -> None:
        """Log notices until cancelled."""
        while True:
            await self._arrived.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self.flush()

    def flush(self) -> None:
        """Log the notices that wait."""
        self._arrived.clear()
        waiting, self._waiting = self._waiting, {}
        for (event, facts), (write, sources) in waiting.items():
            first, *others = sources
            subject = {"sources": [first, *others]} if others else {"source": first}
            write(event, **subject, **dict(sorted(facts)))


_notices: ContextVar[RepeatedNotices | None] = ContextVar("notices", default=None)


def give_notice(write: Write, event: str, source: str, **facts: Any) -> None:
    """Log *event* by *write*, once for all sources with equal *facts*. Without an engine, log at
    once.
    """
    notices = _notices.get()
    if notices is None:
        write(event, source=source, **facts)
    else:
        notices.add(write, event, source, facts)


def end_notice(event: str, source: str) -> None:
    """Allow *event* of *source* again, because the condition has ended."""
    if (notices := _notices.get()) is not None:
        notices.forget(event, source)
