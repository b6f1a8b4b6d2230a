"""A short run; `make torture` makes long ones."""

import os
from pathlib import Path

import pytest

from tests.torture.schedule import FREQUENT, torture
from tests.torture.world import Options


@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled(server_directory: Path) -> None:
    version = os.environ.get("TEST_POSTGRES", "18")
    options = Options(
        seconds=5,
        seed=1,
        sessions=1,
        source_version=version,
        target_version=version,
        faults=tuple(fault.__name__ for fault, _ in FREQUENT),
    )
    world = torture(options, server_directory / "torture")
    assert world.acknowledged > 100
