"""A defect in the work for one table or source ends that work, and never the process."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from streamer.errors import DefectError, StreamerError

log = structlog.get_logger()


@contextmanager
def contained(work: str) -> Iterator[None]:
    """Turn any exception that is none of ours into a DefectError of *work*."""
    try:
        yield
    except StreamerError:
        raise
    except Exception as exc:
        log.exception("internal error", work=work)
        raise DefectError(f"internal error in {work}: {type(exc).__name__}") from exc
