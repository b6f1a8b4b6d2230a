"""The jobs of Spark end with the rounds that wanted them, and a Spark that cannot start says
why.
"""

import asyncio
from pathlib import Path

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

TASKS = (
    "select pid from pg_stat_activity"
    " where application_name like 'streamer copy%' and datname = current_database()"
)


async def test_a_round_that_is_given_up_makes_room_for_the_next(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """A task without a purpose would go on for an hour, and there is one place."""
    source.execute("create table t (id int primary key)")
    source.execute("insert into t select generate_series(1, 4000)")
    settings = "sync: {jobs: 1, rows_per_second: 1}"
    async with stream("t:", settings=settings) as streamer:

        async def is_copying() -> bool:
            return bool(source.execute(TASKS))

        await streamer.eventually(is_copying, 120)
        (former,) = source.execute(TASKS)
        source.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'streamer snapshot' and datname = current_database()"
        )

        async def is_another() -> bool:
            return source.execute(TASKS) not in ([], [former])

        await streamer.eventually(is_another, 60)


async def test_a_spark_that_cannot_start_is_said_and_tried_again(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source.execute("create table t (id int primary key); insert into t values (1)")
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\nexit 1\n")
    java.chmod(0o755)
    with monkeypatch.context() as wrong:
        wrong.setenv("JAVA_HOME", str(tmp_path / "java"))
        async with stream("t:") as streamer:

            async def is_said() -> bool:
                tables = (await streamer.status())["tables"]
                errors = [table["error"] or "" for table in tables]
                return any("Java 17" in error and "11.0.2" in error for error in errors)

            await streamer.eventually(is_said, 60)
            # Mended, it goes on by itself.
            wrong.undo()
            await asyncio.wait_for(streamer.caught_up(90), 100)
            assert_same(source, target, "t")
            assert (await streamer.table("public.t"))["error"] is None
