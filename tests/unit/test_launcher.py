"""A Spark process that ends in the middle of its work is not started again without a pause."""

import asyncio
from pathlib import Path

import pytest

from streamer.backoff import Backoff
from streamer.errors import SparkJobError
from streamer.sync import launcher as launcher_module
from streamer.sync.launcher import SparkLauncher


def jobs(directory: Path) -> list[Path]:
    return list(directory.glob("job-*"))


async def test_a_crashing_process_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing.py").write_text("raise SystemExit('no memory')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launcher_module, "PROGRAM", "crashing")
    waited: list[float] = []

    async def wait(backoff: Backoff) -> None:
        waited.append(backoff._next)
        backoff.next_seconds()

    monkeypatch.setattr(Backoff, "wait", wait)
    launcher = SparkLauncher("local[1]", 1, tmp_path)
    running = asyncio.create_task(launcher.run())
    for count in range(1, 4):
        with pytest.raises(SparkJobError, match="the Spark process ended: no memory"):
            await launcher.submit({})
        assert len(waited) == count
    assert waited == [1.0, 2.0, 4.0]
    running.cancel()
    await asyncio.wait([running])
    assert jobs(tmp_path) == []
