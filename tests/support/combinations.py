"""Settings and versions that must not matter, in combinations.

``make matrix`` runs whole suites with a few combinations: every pair of settings with the oldest and
the newest server, and every version at each side. A test marked ``combinations`` runs with those few
in each run, and with all settings and servers if TEST_COMBINATIONS is ``all``. Tests read the
environment (`tests.support.streamer`, `tests.support.postgres`), so any test can run with any
combination.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.support.postgres import versions


@dataclass(frozen=True)
class Combination:
    """A choice of all settings, and of the versions of both sides."""

    source: str
    target: str
    workers: int = 8
    streaming: bool = True
    transport: str = "binary"

    def __str__(self) -> str:
        streaming = "streaming" if self.streaming else "whole"
        return f"{self.source}-to-{self.target}-{self.workers}-{streaming}-{self.transport}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "TEST_POSTGRES": self.source,
            "TEST_TARGET_POSTGRES": self.target,
            "TEST_WORKERS": str(self.workers),
            "TEST_STREAMING": "true" if self.streaming else "false",
            "TEST_TRANSPORT": self.transport,
        }

    @property
    def pairs(self) -> set[tuple[tuple[str, str], ...]]:
        """Every pair of choices."""
        return set(itertools.combinations(self.environment.items(), 2))


def all_combinations(majors: Sequence[str]) -> list[Combination]:
    """Return every combination of settings, with the same version at both sides."""
    choices = itertools.product(majors, (1, 8), (True, False), ("text", "binary"))
    return [
        Combination(major, major, workers, streaming, transport)
        for major, workers, streaming, transport in choices
    ]


def chosen_combinations(*, are_all: bool) -> list[Combination]:
    """Return the combinations with the servers of this machine, in the same order in each process."""
    majors = sorted(versions())
    oldest, newest = majors[0], majors[-1]
    mixed = [(major, newest) for major in majors[:-1]] + [(newest, major) for major in majors[:-1]]
    if are_all:
        same = all_combinations(majors)
    else:
        same = sorted(covering(all_combinations([oldest, newest])), key=str)
    return same + [Combination(*sides) for sides in mixed]


def covering(combinations: Sequence[Combination]) -> Iterator[Combination]:
    """Yield as few of *combinations* as necessary to cover every pair of choices."""
    uncovered = set().union(*(combination.pairs for combination in combinations))
    while uncovered:
        best = max(combinations, key=lambda combination: len(combination.pairs & uncovered))
        uncovered -= best.pairs
        yield best


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("combinations"):
        chosen = chosen_combinations(are_all=os.environ.get("TEST_COMBINATIONS") == "all")
        metafunc.parametrize("combination", chosen, ids=str, indirect=True)


@pytest.fixture
def combination(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a test marked ``combinations``."""
    chosen: Combination | None = getattr(request, "param", None)
    for name, value in chosen.environment.items() if chosen else ():
        monkeypatch.setenv(name, value)
