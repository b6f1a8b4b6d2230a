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
- ``paused``: an operator said so. Changes are held; the source's WAL is retained.
- ``error``: the target refuses something. Tried again now and then, and when an operator says so.
  Whether a copy is still to be made tells ``snapshot_lsn``: it is null until one is complete.

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


_NEXT: Final = {
    State.INIT: {State.COPYING, State.CATCHING_UP, State.PAUSED, State.ERROR},
    State.COPYING: {State.INIT, State.COPYING, State.CATCHING_UP, State.PAUSED, State.ERROR},
    State.CATCHING_UP: {State.INIT, State.READY, State.PAUSED, State.ERROR},
    State.READY: {State.INIT, State.PAUSED, State.ERROR},
    State.PAUSED: {State.INIT, State.READY},
    State.ERROR: {State.INIT, State.COPYING, State.CATCHING_UP, State.READY, State.PAUSED},
}


def may_follow(state: State, following: State) -> bool:
    """Whether a relation may go from *state* to *following*."""
    return following is state or following in _NEXT[state]


def needs_copy(state: State, *, has_snapshot: bool) -> bool:
    """Whether a relation found in *state* at start has a copy still to be made."""
    match state:
        case State.INIT | State.COPYING:
            return True
        case State.ERROR:
            return not has_snapshot
        case _:
            return False
