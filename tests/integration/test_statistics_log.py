"""A line of statistics for each source with changes, and the times of tables in the metrics."""

from structlog.testing import capture_logs

from tests.support.postgres import Database, database
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until

TABLES = ["t", "h"]


async def test_busy_sources_have_a_line_and_idle_sources_have_none(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    rules = "{t: {initial: none}, h: {initial: none}}"
    with database(source.server, "second") as second:
        for db in (source, second):
            db.execute("create table t (id int primary key); create table h (id int primary key)")
        for table in TABLES:
            target.execute(f"create table {table} (sid text, id int, primary key (sid, id))")
        with capture_logs() as logs:
            async with stream(
                rules, settings="statistics_interval: 0.05", sid="a", others={"b": second}
            ) as streamer:
                await streamer.caught_up()
                source.execute("insert into t values (1)")
                source.execute("insert into t values (2); insert into h values (1)")
                await streamer.caught_up()
                registry = streamer.engine.metrics.registry

                def lines() -> list[dict[str, object]]:
                    return [dict(line) for line in logs if line["event"] == "statistics"]

                await until(lambda: sum(int(str(line["changes"])) for line in lines()) == 3)
                for table in TABLES:
                    labels = {"database": "shop", "sid": "a", "table": f"public.{table}"}
                    value = registry.get_sample_value("streamer_apply_seconds_sum", labels)
                    assert value is not None
                    assert value > 0
    assert {line["source"] for line in lines()} == {"shop:a"}
    assert sum(int(str(line["transactions"])) for line in lines()) == 2
    first, *_ = lines()
    assert {"lag_seconds", "retained_wal_bytes", "target_seconds", "seconds"} <= first.keys()
