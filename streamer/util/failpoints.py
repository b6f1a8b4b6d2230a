"""Named places where tests make the program fail, without a cost in production.

``STREAMER_FAILPOINTS=apply.before_commit=kill@3,sync.copied=error`` arms two failpoints: the first
kills the process with SIGKILL at the third pass, the second raises an error at each pass. Actions:
``kill``, ``error``, ``sleep`` (forever, blocking), ``stop`` (once, with SIGSTOP until SIGCONT).
Only tests set this variable.
"""

import os
import signal
import threading
from typing import Final

from streamer.errors.error_classes import StreamerError

VARIABLE: Final = "STREAMER_FAILPOINTS"

NAMES: Final = frozenset(
    {
        "apply.write",
        "apply.before_commit",
        "apply.after_commit",
        "apply.lane_moved",
        "execute.stored",
        "execute.announced",
        "execute.source_committed",
        "execute.before_commit",
        "execute.after_commit",
        "cutover.step_stored",
        "cutover.writes_stopped",
        "cutover.marked",
        "cutover.sequences_set",
        "cutover.reversed",
        "cutover.undone",
        "acknowledge.before_store",
        "acknowledge.after_store",
        "acknowledge.after_send",
        "ddl.applied",
        "rename.followed",
        "rename.stored",
        "join.registered",
        "join.published",
        "drop.forgetting",
        "drop.forgotten",
        "attach.requesting",
        "attach.requested",
        "drain.piece_written",
        "journal.slot_taken",
        "journal.created",
        "journal.written",
        "journal.segment_begun",
        "journal.flushed",
        "journal.acknowledged",
        "journal.read",
        "journal.trimmed",
        "journal.finished",
        "journal.discarding",
        "publication.relisted",
        "purge.deleted",
        "purge.stored",
        "reader.dispatched",
        "expressions.stored",
        "requests.taken",
        "requests.ended",
        "slot.checked",
        "sync.slot_created",
        "sync.slot_stored",
        "sync.table_created",
        "sync.prepared",
        "sync.guarded",
        "sync.compared",
        "sync.planned",
        "sync.indexes_dropped",
        "sync.job_started",
        "sync.part_copied",
        "sync.copied",
        "sync.chunk_stored",
        "sync.at_point",
        "sync.exchanged",
        "sync.index_restored",
        "sync.catching_up",
        "sync.drained",
        "compare.range_done",
        "compare.keys_read",
        "indexes.before_build",
        "delete_limit.found",
        "delete_limit.stored",
        "definitions.planned",
        "definitions.before_make",
        "definitions.part_made",
    }
)


class _Armed:
    def __init__(self, action: str, after: int) -> None:
        self.action = action
        self.remaining = after


def _parse(text: str) -> dict[str, _Armed]:
    armed = {}
    for item in filter(None, text.split(",")):
        name, _, action = item.partition("=")
        action, _, after = action.partition("@")
        if name not in NAMES or action not in ("kill", "error", "sleep", "stop"):
            raise ValueError(f"{VARIABLE}: {item!r} is not a failpoint")
        armed[name] = _Armed(action, int(after or 1))
    return armed


_armed = _parse(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """Fail here if a test armed *name*."""
    if _armed and (armed := _armed.get(name)) is not None:
        _fail(name, armed)


def _fail(name: str, armed: _Armed) -> None:
    armed.remaining -= 1
    if armed.remaining > 0:
        return
    match armed.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            del _armed[name]
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            threading.Event().wait()
        case _:
            raise StreamerError(f"failpoint {name}")
