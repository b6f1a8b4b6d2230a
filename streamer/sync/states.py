"""The life of one relation's copy: init → copying → catching_up → ready, and error or paused from
any.

streamer stores a state before its work begins, so the stored state is true after a crash. A process
that finds a state at its start acts as follows:

- ``init``: the target has no rows of this source yet, or rows to replace. Begin.
- ``copying`` with ``snapshot_lsn``: the table follows the stream, and a copy of some of its rows
  begins again, see `streamer.apply.lane`.
- ``copying``: the snapshot ended with the process that exported it. Raise the attempt, so that a
  task which still runs can no longer commit, clear the rows of finished parts, and begin again.
- ``catching_up``: the copy is complete, and ``end_lsn`` is its consistent point. The stream, read
  again from the acknowledged position, brings the rest; only the name differs from ``ready``.
- ``ready``: the table follows the stream.
- ``paused``: an operator paused it. Changes are held; the source retains its WAL. A copy in
  progress ends, a queued one waits.
- ``error``: the target rejects a change. A drainer retries now and then, and after an operator's
  request.

In the last two too, ``snapshot_lsn`` tells whether the relation still needs a copy: it is null
until one is complete.

Pure.
"""

import enum
from typing import Final

from streamer.error_reports import TableWait


class State(enum.StrEnum):
    """The states of contract.md, as stored in streamer.relation."""

    INIT = "init"
    COPYING = "copying"
    CATCHING_UP = "catching_up"
    READY = "ready"
    PAUSED = "paused"
    ERROR = "error"


TURN: Final = "its turn: "


def turn(reason: str) -> TableWait:
    """Return the wait of a copy that begins by itself: no operator needs to act."""
    return TableWait(f"{TURN}{reason}", is_turn=True)


STARTING_SPARK: Final = turn("Spark starts")


def needs_copy(state: State, *, has_snapshot: bool) -> bool:
    """Whether a relation in *state* at a start still needs a copy."""
    match state:
        case State.INIT:
            return True
        case State.COPYING | State.ERROR | State.PAUSED:
            return not has_snapshot
        case _:
            return False
