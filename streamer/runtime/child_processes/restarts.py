"""Decisions of the parent about a process that ended. Pure.

A process that was killed or ended unexpectedly starts again after a back-off. A wrong configuration
ends all processes at once. Any other StreamerError ends all processes if a process exits with a
StreamerError a few times in a row.
"""

from collections.abc import Mapping
from typing import Final

FIRST_SECONDS: Final = 0.5
SECONDS_MAX: Final = 30.0
LASTING_SECONDS: Final = 60.0
"""A process that ran this long had started successfully, so its exit starts the back-off again."""
ERROR_CODES: Final = range(1, 5)
"""The exit codes of StreamerErrors."""
WRONG_CONFIGURATION: Final = 2
ERROR_EXITS_MAX: Final = 3
"""After this many consecutive exits of a process with a StreamerError, all processes end."""


class Restarts:
    """The restarts of one process."""

    def __init__(self) -> None:
        self._exits = 0
        self._error_exits = 0

    def next_seconds(self, code: int, lived_seconds: float) -> float | None:
        """Return the delay before the next start; None if all processes must end.

        *code*: negative for a signal, as `asyncio.subprocess.Process.returncode` has it.
        """
        if lived_seconds >= LASTING_SECONDS:
            self._exits = self._error_exits = 0
        self._exits += 1
        if code not in ERROR_CODES:
            self._error_exits = 0
        else:
            self._error_exits += 1
            if code == WRONG_CONFIGURATION or self._error_exits >= ERROR_EXITS_MAX:
                return None
        doublings = min(self._exits - 1, 10)
        return min(FIRST_SECONDS * 2.0**doublings, SECONDS_MAX)


def choose_acceptor(started_at: Mapping[int, float]) -> int | None:
    """Return the live process to accept connections: the oldest, because it answers at once."""
    return min(started_at, key=lambda number: (started_at[number], number), default=None)
