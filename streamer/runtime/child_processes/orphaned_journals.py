"""The journals of processes that ``processes: N`` no longer starts.

Each process keeps its journals in its own spool directory. With a lower N, no process would read
the journals of the last processes, although these may be the only copy of their changes. The next
command moves the journals to the first process before any process starts.
"""

import shutil
from pathlib import Path
from typing import Final

import structlog

from streamer.errors.error_classes import SpoolError
from streamer.runtime.child_processes.child_process import FIRST, process_directory
from streamer.source.journal.journal_files import directory_of, has_journal, move_journal
from streamer.util.owned_directory import remove_stale

log = structlog.get_logger()

_SPOOLS: Final = "streamer-"


def gather_journals(directory: Path, count: int) -> None:
    """Move the journals of processes above number *count* to the first process, and remove their
    spool directories. *directory*: the directory in the configuration.

    A directory stays until the next start if its process still lives, or if the first process has a
    journal of the same slot. Raises SpoolError.
    """
    prefix = process_directory(directory, 0).name[:-1]
    for former in sorted(directory.glob(f"{prefix}*")):
        number = former.name.removeprefix(prefix)
        if not number.isdecimal() or int(number) <= max(count, FIRST):
            continue
        remove_stale(former, _SPOOLS)
        if any(former.glob(f"{_SPOOLS}*")):
            log.warning("a former process still runs; its journals stay", directory=str(former))
        elif _move_all(former, directory):
            shutil.rmtree(former, ignore_errors=True)


def _move_all(former: Path, directory: Path) -> bool:
    """Move journals; return whether the directory is empty."""
    is_empty = True
    for path in sorted(directory_of(former, "-").parent.glob("*")):
        if not has_journal(path):
            continue
        place = directory_of(directory, path.name)
        if has_journal(place):
            is_empty = False
            log.warning(
                "two journals of a slot; the second stays until the first is drained",
                first=str(place),
                second=str(path),
            )
            continue
        try:
            move_journal(path, place)
        except SpoolError as exc:
            exc.add_note(f"the journal belongs in {place}")
            raise
        log.info("journal moved to the first process", directory=str(place))
    return is_empty
