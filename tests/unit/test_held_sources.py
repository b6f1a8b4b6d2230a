"""The reason why a process waits for the lock of a source."""

from streamer.bookkeeping.source_lock import purge_holder
from streamer.runtime.session.pipeline import _held_by


def test_the_reason_names_a_process_or_a_purge() -> None:
    assert "to end process 7, run on host: kill 7" in _held_by("host:7")
    purging = _held_by(purge_holder("host:7"))
    assert purging == "a purge by process host:7 deletes rows of this source; this process waits"
