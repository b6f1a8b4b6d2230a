"""Settings that must not matter, in all combinations.

``make matrix`` runs whole suites with a few combinations that cover all pairs. A test marked
``combinations`` runs with those few in each run, and with all if TEST_COMBINATIONS is ``all``.
Tests read the environment (`tests.support.streamer`, `tests.support.postgres`), so any test can run
with any combination.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.support.postgres import versions


@dataclass(frozen=True)
class Combination:
    """A choice of all settings."""

    postgres: str
    workers: int
    streaming: bool
    transport: str

    def __str__(self) -> str:
        streaming = "streaming" if self.streaming else "whole"
        return f"{self.postgres}-{self.workers}-{streaming}-{self.transport}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "TEST_POSTGRES": self.postgres,
            "TEST_WORKERS": str(self.workers),
            "TEST_STREAMING": "true" if self.streaming else "false",
            "TEST_TRANSPORT": self.transport,
        }

    @property
    def pairs(self) -> set[tuple[tuple[str, str], ...]]:
        """Every pair of choices."""
        return set(itertools.combinations(self.environment.items(), 2))


def all_combinations() -> list[Combination]:
    """Return every combination, with the servers of this machine."""
    choices = itertools.product(sorted(versions()), (1, 8), (True, False), ("text", "binary"))
    return [Combination(*choice) for choice in choices]


def covering(combinations: Sequence[Combination]) -> Iterator[Combination]:
    """Yield as few of *combinations* as necessary to cover every pair of choices."""
    uncovered = set().union(*(combination.pairs for combination in combinations))
    while uncovered:
        best = max(combinations, key=lambda combination: len(combination.pairs & uncovered))
        uncovered -= best.pairs
        yield best


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("combinations"):
        chosen = all_combinations()
        if os.environ.get("TEST_COMBINATIONS") != "all":
            chosen = sorted(covering(chosen), key=str)  # the same order in every process
        metafunc.parametrize("combination", chosen, ids=str, indirect=True)


@pytest.fixture
def combination(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a test marked ``combinations``."""
    chosen: Combination | None = getattr(request, "param", None)
    for name, value in chosen.environment.items() if chosen else ():
        monkeypatch.setenv(name, value)
