"""`run` starts Spark before the imports of the program, if a source waits for a copy."""

from pathlib import Path

import pytest

from streamer.config import static_mapping
from streamer.copy.early_spark import begin_spark
from streamer.copy.spark.launcher import SparkLauncher
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, write_config


async def starts(path: Path) -> bool:
    settings, mapping = static_mapping.load(path)
    return await begin_spark(settings, mapping.sources) is not None


async def test_spark_starts_early_only_for_a_source_that_waits_for_a_copy(
    stream: MakeStreamer,
    source: Database,
    target: Database,
    without_spark: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(self: SparkLauncher) -> None:
        """Starts no process."""

    monkeypatch.setattr(SparkLauncher, "start", start)
    source.execute("create table items (id int primary key)")
    path = tmp_path / "early.yaml"
    write_config(path, source, target, "{items: {initial: none}}")
    assert not await starts(path), "no table has a copy"
    write_config(path, source, target, "{items: }")
    assert await starts(path), "the source is new"

    async with stream("items:") as streamer:
        await streamer.caught_up()
        target.execute("update streamer.relation set state = 'copying', snapshot_lsn = null")
        assert not await starts(path), "a process streams the source"
        target.execute("update streamer.relation set state = 'ready', snapshot_lsn = end_lsn")
    assert not await starts(path), "the copy has ended"
    target.execute("update streamer.relation set state = 'copying', snapshot_lsn = null")
    assert await starts(path), "the copy was interrupted"
    target.execute("update streamer.relation set needs_resync = true")
    assert not await starts(path), "only a request of an operator makes a copy"


async def test_a_target_without_an_answer_is_left_to_the_process(
    source: Database, target: Database, tmp_path: Path
) -> None:
    path = tmp_path / "early.yaml"
    write_config(path, source, target, "{items: }")
    away = path.read_text().replace(target.url, "postgresql://nobody@127.0.0.1:1/none")
    path.write_text(away)
    assert not await starts(path)
