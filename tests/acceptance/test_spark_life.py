"""The jobs of Spark end with their rounds."""

from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

TASKS = (
    "select pid from pg_stat_activity"
    " where application_name like 'streamer copy%' and datname = current_database()"
)


async def test_a_round_that_is_given_up_makes_room_for_the_next(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """A task without a purpose would go on for an hour, in the only place."""
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
