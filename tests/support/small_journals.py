"""`python -m streamer` with small journal files and records, and a backlog measured often."""

from streamer.cli.main import main
from streamer.runtime.wal_retention import backlog_guard as backlog
from streamer.source.journal import gather_records


def shrink() -> None:
    """Let a few hundred rows be several records and files."""
    setattr(gather_records, "RECORD_BYTES", 2_000)  # noqa: B010  # they are Final
    setattr(gather_records, "SEGMENT_BYTES", 10_000)  # noqa: B010
    setattr(backlog, "MEASURE_SECONDS", 0.2)  # noqa: B010


if __name__ == "__main__":
    shrink()
    main()
