"""The path of a change: the stage where the time goes, and the work of the workers."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamer.admin.live.path_of_change import PathFacts, PathStage, held_of, path_of
from streamer.admin.live.work_samples import Work, WorkSamples
from streamer.observability.metrics import Metrics


@pytest.mark.parametrize(
    ("facts", "slow", "text"),
    [
        ({"lag_seconds": 0.4, "use": [1.0]}, None, ""),
        ({"lag_seconds": 9.0}, None, ""),
        ({"target_error": "no route", "use": [1.0]}, "target", "the target accepts no changes"),
        (
            {"waits": "locks at the target", "use": [1.0], "undelivered_seconds": 9.0},
            "target",
            "the workers wait for locks at the target",
        ),
        (
            {"use": [0.1, 0.97], "undelivered_seconds": 9.0},
            "workers",
            "the busiest worker writes 97 % of the time",
        ),
        (
            {"use": [0.5], "is_full": True, "undelivered_seconds": 9.0},
            "workers",
            "the busiest worker writes 50 % of the time",
        ),
        (
            {"use": [0.2], "undelivered_seconds": 12.0, "held_tables": 1},
            "source",
            "a source has not sent the changes of the last 12 s",
        ),
        (
            {"held_tables": 1},
            "lanes",
            "1 table holds changes for a copy, an operator or the target",
        ),
        (
            {"held_tables": 3},
            "lanes",
            "3 tables hold changes for a copy, an operator or the target",
        ),
    ],
)
def test_the_first_stage_that_explains_the_lag_is_slow(
    facts: dict[str, Any], slow: str | None, text: str
) -> None:
    path = path_of(PathFacts(**({"lag_seconds": 9.0} | facts)))
    assert (path.slow, path.text) == (slow and PathStage(slow), text)


def test_tables_with_held_changes_are_counted_over_all_sources() -> None:
    held = {"held_changes": 2, "held_bytes": 50}
    idle = {"held_changes": 0, "held_bytes": 0}
    assert held_of([{"tables": [held, idle]}, {"tables": [held, {}]}]) == (2, 100)


def test_the_work_of_a_minute_is_the_share_of_seconds_in_which_a_worker_writes() -> None:
    workers = [SimpleNamespace(is_writing=False, queued_bytes=n) for n in (3, 4)]
    engine: Any = SimpleNamespace(workers=[], metrics=Metrics())
    times = iter(range(100))
    samples = WorkSamples(engine, lambda: float(next(times)))
    samples.sample()
    assert samples.summarize() == Work([], None, 0)
    engine.workers = workers  # the process has connected to the target
    assert samples.summarize() == Work([0.0, 0.0], None, 7)
    for number in range(60):
        workers[1].is_writing = number % 4 == 0
        engine.metrics.commits.labels("1").inc(2)
        samples.sample()
    assert samples.summarize() == Work([0.0, 0.25], 2.0, 7)
