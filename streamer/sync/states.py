"""The life of one relation's copy: init → copying → catching_up → ready, and error or paused from
any.

A state is stored before the work it names begins, so a crash always leaves the truth behind. What
each means when a process finds it at its start:

- ``init``: nothing of this source is in the target yet, or what is there is to be replaced. Begin.
- ``copying``: its snapshot died with the process that exported it. Raise the attempt, so that a
  task which still runs can no longer commit, clear what finished parts have copied, and begin
  again.
- ``catching_up``: the copy is complete and ``end_lsn`` is where it was taken. The stream, read
  again from the acknowledged position, brings the rest; this is the same as ``ready`` except for
  the name.
- ``ready``: in step with the stream.
- ``paused``: an operator said so. Changes are held; the source's WAL is retained. A copy that was
  under way is finished, one that was not waits.
- ``error``: the target refuses something. Tried again now and then, and when an operator says so.

Whether a copy is still to be made in the last two tells ``snapshot_lsn``: it is null until one is
complete.

Pure.
"""

import enum
from typing import Final


class State(enum.StrEnum):
    """The states of contract.md, as stored in streamer.relation."""

    INIT = "init"
    COPYING = "copying"
    CATCHING_UP = "catching_up"
    READY = "ready"
    PAUSED = "paused"
    ERROR = "error"


TURN: Final = "its turn: "
"""How ``waiting_for`` begins where nobody needs to act: the copy begins by itself."""


def is_turn(waiting_for: str) -> bool:
    """Whether a table waits only for other copies, or for Spark to start."""
    return waiting_for.startswith(TURN)


def needs_copy(state: State, *, has_snapshot: bool) -> bool:
    """Whether a relation found in *state* at start has a copy still to be made."""
    match state:
        case State.INIT | State.COPYING:
            return True
        case State.ERROR | State.PAUSED:
            return not has_snapshot
        case _:
            return False
