"""The work of this process in the last minute: busy time, commits and queued bytes of its workers.

A sample reads each worker once a second, so the workers themselves count nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from streamer.apply.write.worker import Worker
from streamer.observability.metrics import Metrics

SAMPLES_MAX: Final = 60


class Working(Protocol):
    """The sampled object, which is an engine."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    @property
    def metrics(self) -> Metrics: ...


@dataclass(frozen=True, slots=True)
class Work:
    """``use``: the share of the last minute in which each worker wrote. ``queued_bytes``: the
    changes that wait for workers now.
    """

    use: list[float] = field(default_factory=list)
    commits_per_second: float | None = None
    queued_bytes: int = 0


class WorkSamples:
    """The samples of the last minute."""

    def __init__(self, engine: Working, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._samples: deque[tuple[float, float, list[bool]]] = deque(maxlen=SAMPLES_MAX)
        """Time, number of commits, and whether each worker writes."""

    def sample(self) -> None:
        """Add a sample."""
        is_writing = [worker.is_writing for worker in self._engine.workers]
        self._samples.append((self._clock(), self._engine.metrics.commit_count, is_writing))

    def summarize(self) -> Work:
        """Return the work of the last minute."""
        workers = self._engine.workers
        samples = [sample for sample in self._samples if len(sample[2]) == len(workers)]
        queued = sum(worker.queued_bytes for worker in workers)
        if len(samples) < 2:
            return Work([0.0] * len(workers), None, queued)
        (begin, first, _), (end, last, _) = samples[0], samples[-1]
        columns = zip(*(is_writing for _, _, is_writing in samples), strict=True)
        use = [sum(column) / len(samples) for column in columns]
        return Work(use, (last - first) / max(end - begin, 1.0), queued)
