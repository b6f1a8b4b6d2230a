"""`streamer compare`: every planted difference is found, and live traffic gives no false alarm."""

import asyncio
import contextlib
import io
import itertools
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession
from rich.console import Console
from structlog.testing import capture_logs

from streamer.commands import compare_command, table_requests
from streamer.commands.demo.embedded_servers import Server
from streamer.compare import compared_table as tables_module
from streamer.compare import comparison, cut_ranges, local_program, spark_program, unit_reader
from streamer.compare.compared_table import ALL_PAGES, ComparedTable, cut_pages
from streamer.compare.comparison import ComparisonScope, TableResult
from streamer.compare.local_launcher import LocalProcess
from streamer.compare.readings import KeyJudging, RangeReader, TableError, Unit
from streamer.compare.unit_reader import UnitReader
from streamer.control.resync_options import Mode, Resync
from streamer.errors.error_classes import MappingError
from streamer.postgres.secret import Secret
from streamer.source.tables import distant_keys
from streamer.target.connection import TargetAddress
from tests.support.comparing import Compare
from tests.support.postgres import Database, database
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import eventually

DDL = """
create table t (id int primary key, v text, c char(4), n numeric, j jsonb, d double precision,
                at timestamptz default now());
insert into t select g, 'value ' || g, 'ab', 1.50, '{"a": 1.0}', g / 3.0 from generate_series(1, 300) g;
update t set v = '' where id = 15;
create table padded (id int primary key, c char(4), v varchar);
insert into padded values (1, 'ab', 'ab'), (2, 'ab', 'ab'), (3, null, '');
create table words (word text primary key, n int);
insert into words select 'word ' || g, g from generate_series(1, 300) g;
create table bag (a int, b text);
insert into bag select g % 5, 'same' from generate_series(1, 50) g;
create table log (id int primary key, v text);
insert into log select g, 'line ' || g from generate_series(1, 50) g;
create table price (id int primary key, amount numeric);
insert into price select g, g from generate_series(1, 50) g;
create table part (id int primary key, v text) partition by range (id);
create table part_1 partition of part for values from (0) to (100);
create table part_2 partition of part for values from (100) to (1000);
insert into part select g, 'p' from generate_series(1, 200) g;
create table ident (a int, b text);
alter table ident replica identity full;
insert into ident select g, 'full' from generate_series(1, 20) g;
create table flags (kind "char" primary key, n int);
insert into flags select chr(64 + g)::"char", g from generate_series(1, 20) g;
create table chosen (id int primary key, region text, mail text, secret text, kind "char");
insert into chosen select g, case when g % 2 = 0 then 'EU' else 'US' end, 'm' || g, 's', 'x'
  from generate_series(1, 40) g;
"""
TABLES = """
t:
padded:
words:
bag:
log: {type: append}
price: {type: history}
part:
ident:
flags:
chosen: {target: chosen_ones, columns: {id: item_id, region: region, mail: mail, kind: kind}, exclude: [secret], filter: "region = 'EU' and mail like 'm%'", set: {mail: "md5(mail)"}}
"""
OTHER_DDL = """
create table t (id int primary key, v text, c char(4), n numeric, j jsonb, d double precision,
                at timestamptz default now());
insert into t (id, v) select g, 'theirs' from generate_series(5001, 5005) g;
create table bag (a int, b text);
insert into bag select 3, 'same' from generate_series(1, 5) g;
"""
OTHER_GROUP = """
- database: branch
  urls: [{{url: "{url}", sid: us}}]
  tables: {{t: {{}}, bag: {{}}}}
"""
WITH_STORAGE = "select sum(pg_table_size(oid)) from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace"
PLANTED = {
    "eu t": (
        """
        update t set v = 'changed' where id = 7; delete from t where id = 8;
        insert into t (sid, id, v) values ('eu', 1000, 'extra');
        update t set v = null where id = 9; update t set c = 'abc' where id = 10;
        update t set n = 1.5 where id = 11; update t set j = '{"a": 1}' where id = 12;
        update t set d = d + 1e-15 where id = 13; update t set v = '' where id = 14;
        update t set v = null where id = 15; update t set sid = 'us' where id = 20
        """,
        (2, 1, 8),
    ),
    "us t": ("", (0, 1, 0)),
    "eu padded": (
        "update padded set c = 'ab' where id = 1; update padded set v = 'ab ' where id = 2",
        (0, 0, 2),
    ),
    "eu words": (
        "update words set n = -1 where word = 'word 3'; delete from words where n = 4",
        (1, 0, 1),
    ),
    "eu bag": (
        """
        insert into bag (sid, a, b) values ('eu', 1, 'same');
        delete from bag where ctid = (select min(ctid) from bag where sid = 'eu' and a = 2);
        update bag set sid = 'us'
          where ctid = (select min(ctid) from bag where sid = 'eu' and a = 3)
        """,
        (2, 1, 0),
    ),
    "us bag": ("", (0, 1, 0)),
    "eu log": (
        """
        insert into log (sid, id, v) values ('eu', 900, 'more');
        update log set v = 'x' where id = 3; delete from log where id = 4
        """,
        (1, 0, 1),
    ),
    "eu price": (
        """
        update price set amount = 1.0 where id = 1 and kvsz_end > now();
        insert into price (sid, id, amount) values ('eu', 999, 1)
        """,
        (0, 1, 1),
    ),
    "eu part": ("delete from part where id = 150", (1, 0, 0)),
    "eu ident": ("update ident set b = 'other' where a = 1", (1, 1, 0)),
    "eu flags": (
        """
        update flags set n = -1 where kind = 'C'; delete from flags where kind = 'D';
        insert into flags (sid, kind, n) values ('eu', 'z', 1)
        """,
        (1, 1, 1),
    ),
    "eu chosen": (
        """
        update chosen_ones set mail = 'x' where item_id = 2;
        insert into chosen_ones (sid, item_id, region) values ('eu', 3, 'US')
        """,
        (0, 1, 1),
    ),
}
"""Statements at the target, and the rows that are missing, extra and different then."""


@pytest.mark.timeout(600)
async def test_each_planted_difference_is_found_and_repaired_and_equal_tables_are_equal(
    tmp_path: Path,
    compare: Compare,
    source: Database,
    target: Database,
    shared_server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source.execute(DDL)
    sizes = []
    run = local_program.run

    def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
        sizes.append(job["size_bytes"])
        return run(job)

    monkeypatch.setattr(local_program, "run", measure)
    # As text, a value of char(n) keeps the blanks.
    target.execute("create table padded (sid text, id int, c text, v text, primary key (sid, id))")
    with database(shared_server, "source_us") as other:
        other.execute(OTHER_DDL)
        path = tmp_path / "config.yaml"
        write_config(path, source, target, TABLES, sid="eu")
        path.write_text(path.read_text() + OTHER_GROUP.format(url=other.url))
        async with running(path) as streamer:
            before = await compare(streamer)
            whole = sum(int(str(each.value(WITH_STORAGE))) for each in (source, other))
            for sql, _ in PLANTED.values():
                target.execute(sql or "select")
            after: dict[str, TableResult] = {}
            repaired = await compare(streamer, repairs=True, first=after, with_values=True)
            sources = [
                replace(each, rules=tuple(r for r in each.rules if r.pattern.name != "flags"))
                if each.sid == "eu"
                else replace(each, url=Secret("postgresql://127.0.0.1:1/x"))
                for each in streamer.mapping.sources
            ]
            away = replace(streamer.mapping, sources=tuple(sources))
            monkeypatch.setattr(streamer, "mapping", away)
            remaining = await compare(streamer)
            errors = target.value("select count(*) from streamer.verification where error <> ''")
    assert {name: r.is_equal for name, r in before.items()} == dict.fromkeys(PLANTED, True), before
    assert 8192 * 13 <= sizes[0] <= whole, "partitions and tables without statistics count"
    assert before["eu t"].rows_source == before["eu t"].rows_target == 300
    found = {name: (r.missing, r.extra, r.different) for name, r in after.items()}
    assert found == {name: counts for name, (_, counts) in PLANTED.items()}, after
    assert {r.undecided for r in after.values()} == {0}
    assert [r for r in repaired.values() if not r.is_equal] == []
    assert repaired.keys() == PLANTED.keys()
    differing = {name: sum(counts) for name, (_, counts) in PLANTED.items()}
    assert {name: r.repaired or 0 for name, r in repaired.items()} == differing
    # A comparison continues without an unreachable source, and gives no verdict about its tables.
    assert {name.startswith("eu ") for name, r in remaining.items() if r.is_equal} == {True}
    failed = {name: str(r.error) for name, r in remaining.items() if not r.is_equal}
    assert failed.pop("eu flags") == 'table "public.flags" does not exist in the mapping'
    assert failed
    assert all("connection" in error for error in failed.values()), failed
    assert errors == 1, "the table that the mapping lacks"
    by_key = {entry["key"]["id"]: entry for entry in after["eu t"].sample}
    assert by_key["9"]["columns"] == ["v"]
    assert by_key["9"]["target"][0]["v"] is None
    assert by_key["1000"]["kind"] == "extra"
    assert by_key["20"]["kind"] == "missing"


COMPARING = "from pg_stat_activity where application_name = 'streamer compare'"
LIVE_RUNS = int(os.environ.get("COMPARE_RUNS", "1"))
"""Comparisons of two tenants with twelve tables under writes, after a comparison on Spark, by turns
without and on Spark; `make nightly` makes ten.
"""
TENANT_DDL = """
create table hot (id int primary key, n bigint not null, note text);
insert into hot select g, 0, 'hot' from generate_series(1, 400) g;
create table moving (code text primary key, n int);
insert into moving select 'code ' || g, g from generate_series(1, 200) g;
create table short (id int primary key, v text);
insert into short select g, 'v' from generate_series(1, 50) g;
create table bag (a int, b text);
alter table bag replica identity full;
insert into bag select g % 7, 'row' from generate_series(1, 100) g;
create table price (id int primary key, amount numeric(10, 2));
insert into price select g, g from generate_series(1, 100) g;
create table log (id int primary key, v text);
insert into log select g, 'line ' || g from generate_series(1, 50) g;
"""
TENANT_TABLES = "hot:\nmoving:\nshort:\nbag:\nprice: {type: history}\nlog: {type: append}"


def write_traffic(database: Database, stop: threading.Event) -> None:
    """Change hot rows, move keys, and truncate a table, until *stop*."""
    with database.connect() as connection:
        for n in itertools.count():
            if stop.is_set():
                return
            connection.execute(
                f"""
                begin; update hot set n = n + 1 where id <= 2;
                update hot set note = 'n{n}' where id = {n % 400};
                update moving set code = 'moved {n}' where n = {n % 200};
                insert into bag values ({n % 7}, 'row'); delete from bag where ctid = (select min(ctid) from bag);
                update price set amount = {n % 50} where id = {n % 100}; commit;
                begin; {"truncate short" if n % 40 == 0 else "select"};
                insert into short values ({n % 40}, 'v{n}') on conflict (id) do update set v = excluded.v; commit;
                select pg_sleep(0.05)
                """.encode()
            )


@contextlib.asynccontextmanager
async def running(path: Path) -> AsyncIterator[Streamer]:
    """Have a streamer that has caught up."""
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        yield streamer
    finally:
        await streamer.stop()


@contextlib.asynccontextmanager
async def two_tenants(
    tmp_path: Path, source: Database, target: Database, shared_server: Server
) -> AsyncIterator[tuple[Streamer, Database]]:
    """Have a streamer with two sources, and the second source."""
    with database(shared_server, "source_us") as other:
        for one in (source, other):
            one.execute(TENANT_DDL)
        path = tmp_path / "config.yaml"
        write_config(path, source, target, TENANT_TABLES, sid="eu", others={"us": other})
        async with running(path) as streamer:
            yield streamer, other


PLANTED_AT_TENANTS = """
update hot set sid = 'us', id = id + 1000 where sid = 'eu' and id = 17;
update hot set n = -1 where sid = 'us' and id = 30; delete from hot where sid = 'us' and id between 391 and 400;
insert into bag select * from bag where sid = 'us' limit 1;
update moving set n = -1 where sid = 'us' and n = 9;
insert into log values ('eu', 900, 'more'); delete from log where sid = 'eu' and id = 4;
"""
FOUND = {
    "eu hot": (1, 0, 0),
    "us hot": (10, 1, 1),
    "us bag": (0, 1, 0),
    "us moving": (0, 0, 1),
    "eu log": (1, 0, 0),
}
ALL_BUT_HISTORY = ComparisonScope(("hot", "bag", "moving", "short", "log"), database="shop")
"""For a history, no statement can remove the difference."""


@pytest.mark.spark
@pytest.mark.timeout(600 + 60 * LIVE_RUNS)
# PySpark leaves sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_live_traffic_of_two_tenants_gives_no_false_alarm_and_both_ways_agree(
    tmp_path: Path,
    source: Database,
    target: Database,
    shared_server: Server,
    compare: Compare,
    spark_context: SparkContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranges are cut and split. Threads continue a comparison of Spark, Spark a comparison of
    threads, with the same answer. Then hot rows, keys that move, TRUNCATE, and a resync meanwhile.
    """
    monkeypatch.setattr(comparison, "count_ranges", lambda rows, rate: 4)
    monkeypatch.setattr(cut_ranges, "SAMPLED_ROWS", 1000)  # ranges of equal size
    monkeypatch.setattr(cut_ranges, "FETCH_ROWS", 60)
    async with two_tenants(tmp_path, source, target, shared_server) as (streamer, other):
        # Spark loads classes now: traffic costs as much as the comparison.
        target.execute(PLANTED_AT_TENANTS)
        await _both_ways_agree(streamer, target, compare, spark_context, tmp_path, monkeypatch)
        found = await compare(streamer, ComparisonScope(("hot",), sid="eu"))
        with pytest.raises(MappingError, match="no source has this database"):
            await compare(streamer, ComparisonScope(("hot",), database="other"))
        sql = tmp_path / "repair.sql"
        await compare(streamer, ALL_BUT_HISTORY, sql=sql)
        target.execute(sql.read_text())
        repaired = await compare(streamer, ALL_BUT_HISTORY)
        assert [r for r in repaired.values() if not r.is_equal] == []
        await _live_traffic_gives_no_false_alarm(streamer, [source, other], compare, spark_context)
    assert [(name, r.missing, r.lsn is None) for name, r in found.items()] == [("eu hot", 1, False)]


async def _live_traffic_gives_no_false_alarm(
    streamer: Streamer, sources: list[Database], compare: Compare, spark_context: SparkContext
) -> None:
    stop = threading.Event()
    writing = [asyncio.create_task(asyncio.to_thread(write_traffic, one, stop)) for one in sources]
    try:
        comparing = asyncio.create_task(compare(streamer, spark=spark_context))
        for table in ("hot", "price"):
            await table_requests.request(
                TargetAddress.parse(streamer.settings.target.url),
                "resync",
                table,
                database=None,
                sid="eu",
                options=Resync(Mode.DIFF).to_json(),
            )
        results = await comparing
        for n in range(LIVE_RUNS):
            assert [r for r in results.values() if not r.is_equal] == []
            assert len(results) == 12
            results = await compare(streamer, spark=spark_context if n % 2 else None)
        assert [r for r in results.values() if not r.is_equal] == []
    finally:
        stop.set()
        await asyncio.gather(*writing)


def _refuse_parts(digest: Callable[..., Any], relation_id: int | None = None) -> Callable[..., Any]:
    """Return *digest* with an error for each part of a range, of a single table or of all."""

    def refuse(self: RangeReader, unit: Unit, *, is_first: bool) -> Any:
        if is_first or relation_id not in (None, unit.relation_id):
            return digest(self, unit, is_first=is_first)
        raise TableError("refused in a part")

    return refuse


def _on_workers(digest: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """Return a task with *digest* and the bounds of this test: workers have separate modules."""

    def find_parts(rows: Any, **work: Any) -> Iterator[Any]:
        with (
            mock.patch.object(cut_ranges, "FETCH_ROWS", 60),
            mock.patch.object(RangeReader, "digest", digest),
        ):
            yield from unit_reader.find_parts(rows, **work)

    return find_parts


async def _both_ways_agree(
    streamer: Streamer,
    target: Database,
    compare: Compare,
    spark_context: SparkContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark goes on with a comparison that threads began, and gives the answer of threads. The
    parts of one table cannot be read. Spark's report in Parquet has the rows of the JSON report.
    """
    parquet = tmp_path / "report.parquet"
    write = spark_program._write_report

    def write_both(context: SparkContext, path: Path, tables: Any, verdicts: Any) -> None:
        rows = list(verdicts)
        write(context, path, tables, rows)
        write(context, parquet, tables, rows)

    monkeypatch.setattr(spark_program, "_write_report", write_both)

    def end(*_: object) -> None:
        raise ConnectionResetError("it has ended")

    with monkeypatch.context() as killed:
        killed.setattr(KeyJudging, "judge", end)
        with pytest.raises(ConnectionResetError):
            await compare(streamer, ALL_BUT_HISTORY)
    done = target.value("select count(source_rows) from streamer.compared_range")
    assert int(str(done)) > 10
    refused = target.value(
        "select r.id from streamer.relation r join streamer.source s on s.id = r.source_id"
        " where s.sid = 'us' and r.source = 'public.hot'"
    )
    answers = []
    for name, context in (("Spark", spark_context), ("threads", None)):
        report, sql = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.sql"
        with capture_logs() as logs, monkeypatch.context() as refusing:
            refuse = _refuse_parts(RangeReader.digest, int(str(refused)))
            if context is None:
                refusing.setattr(RangeReader, "digest", refuse)
            else:
                refusing.setattr(spark_program, "find_parts", _on_workers(refuse))
            found = await compare(
                streamer,
                ALL_BUT_HISTORY,
                spark=context,
                continues=True,
                keys_max=5,
                report=report,
                sql=sql,
            )
        went_on = [entry["done"] for entry in logs if entry["event"].startswith("continuing")]
        assert went_on == ([done] if context else [])
        assert target.value("select count(*) from streamer.comparison") == 0
        counts = {n: (r.missing, r.extra, r.different) for n, r in found.items() if not r.is_equal}
        assert counts == FOUND | {"us hot": (0, 0, 0)}
        assert [n for n, r in found.items() if r.error == "refused in a part"] == ["us hot"]
        assert (found["eu hot"].keys is None, found["us bag"].keys is None) == (False, True)
        assert any(r.continued_from for r in found.values()) is (context is not None)
        same = {"seconds": 0, "lsn": "", "continued_from": None}
        results = [r.to_json() | {"keys": r.keys} | same for r in found.values()]
        lines = [json.loads(line) | {"lsn": ""} for line in report.read_text().splitlines()]
        assert len(lines) == sum(map(sum, counts.values()))
        assert sql.stat().st_mode & 0o777 == 0o600
        answers.append((results, lines, sql.read_text()))
    for by_spark, by_threads in zip(*answers, strict=True):
        assert by_spark == by_threads
    rows = SparkSession(spark_context).read.parquet(str(parquet)).collect()
    assert {(r["sid"], r["table"], r["kind"], *json.loads(r["key"])) for r in rows} == {
        (line["sid"], line["table"], line["kind"], *line["key"].values()) for line in answers[0][1]
    }


@pytest.mark.timeout(600)
async def test_an_interrupted_comparison_goes_on_with_the_ranges_left_and_an_error_is_no_equal_part(
    stream: MakeStreamer,
    compare: Compare,
    source: Database,
    target: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all ranges read, the command ends before the rows of the differing range are read. Later
    the sums of a whole range are read, and the sums of the parts fail.
    """
    source.execute("create table t (id int primary key, v text); analyze t")
    source.execute("insert into t select g, 'v' from generate_series(1, 400) g; analyze t")
    monkeypatch.setattr(comparison, "count_ranges", lambda rows, rate: 4)
    started = []
    lost: list[RangeReader] = []
    run = local_program.run
    digest = RangeReader.digest

    def lose_connections(self: RangeReader, unit: Unit, *, is_first: bool) -> Any:
        """Lose the connection to the source in the middle, as often as a task of Spark may."""
        if len(lost) < local_program.ATTEMPTS - 1:
            lost.append(self)
            self._servers.source(self._tables[unit.relation_id].source_id)
            source.execute(f"select pg_terminate_backend(pid) {COMPARING}")
        return digest(self, unit, is_first=is_first)

    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)

    def count(job: dict[str, Any]) -> list[dict[str, Any]]:
        started.append(len(job["units"]))
        if len(started) == 2:
            eventually(lambda: "3/4" in terminal.file.getvalue(), what="the progress is shown")  # type: ignore[attr-defined]
        return run(job)

    def end(*_: object) -> None:
        raise ConnectionResetError("it has ended")

    monkeypatch.setattr(local_program, "run", count)
    async with stream("t:") as streamer:
        await streamer.caught_up()
        target.execute("update t set v = 'w' where id = 399")
        with monkeypatch.context() as killed:
            killed.setattr(UnitReader, "_fetch", end)
            with pytest.raises(ConnectionResetError):
                await compare(streamer, jobs=1)
        done = target.value("select count(source_rows) from streamer.compared_range")
        monkeypatch.setattr(compare_command, "progress_console", lambda: terminal)
        monkeypatch.setattr(RangeReader, "digest", lose_connections)
        after = await compare(streamer, continues=True)
        monkeypatch.setattr(RangeReader, "digest", digest)
        left = target.execute("select * from streamer.comparison")
        monkeypatch.setattr(RangeReader, "digest", _refuse_parts(RangeReader.digest))
        monkeypatch.setattr(cut_ranges, "FETCH_ROWS", 20)
        refused = (await compare(streamer))["t"]
    assert (refused.error, refused.is_equal) == ("refused in a part", False)
    assert (started, done, left) == ([4, 1, 4], 3, [])
    assert len({id(reader) for reader in lost}) == len(lost) == 3
    result = after["t"]
    assert (result.different, result.rows_source, result.rows_target) == (1, 400, 400)
    assert result.continued_from is not None


async def test_results_of_an_interrupted_comparison_count_on_request_and_only_for_the_same_rows(
    stream: MakeStreamer,
    compare: Compare,
    source: Database,
    target: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranges lose a row after the comparison found the ranges equal. A copy, a rewrite or a
    definition since then lets the next comparison begin at the first range, even on request.
    """
    source.execute("create table t (id int primary key, v text); analyze t")
    source.execute("insert into t select g, 'v' from generate_series(1, 400) g; analyze t")
    monkeypatch.setattr(comparison, "count_ranges", lambda rows, rate: 4)
    started = []
    run = local_program.run

    def count(job: dict[str, Any]) -> list[dict[str, Any]]:
        started.append(len(job["units"]))
        return run(job)

    def end(*_: object) -> None:
        raise ConnectionResetError("it has ended")

    monkeypatch.setattr(local_program, "run", count)
    async with stream("t:") as streamer:
        await streamer.caught_up()

        async def interrupt() -> None:
            target.execute("update t set v = 'w' where id = 399")
            with monkeypatch.context() as killed:
                killed.setattr(UnitReader, "_fetch", end)
                with pytest.raises(ConnectionResetError):
                    await compare(streamer, jobs=1)
            newest = "comparison_id = (select max(id) from streamer.comparison)"
            done = f"select count(source_rows) from streamer.compared_range where {newest}"
            assert target.value(done) == 3

        await interrupt()
        target.execute("delete from t where id = 5")
        found = (await compare(streamer))["t"]
        assert (found.missing, found.different, found.rows_target) == (1, 1, 399)
        assert found.continued_from is None
        target.execute("insert into t values (5, 'v')")
        await interrupt()
        repaired = (await compare(streamer, repairs=True))["t"]
        assert repaired.is_equal
        await interrupt()
        target.execute("vacuum full t")
        rewritten = (await compare(streamer, continues=True))["t"]
        await interrupt()
        await streamer.ask("resync")
        await streamer.table_state("public.t", "ready")
        copied = (await compare(streamer, continues=True))["t"]
        await interrupt()
        target.execute("alter table t add column w int")
        defined = (await compare(streamer, continues=True))["t"]
    assert [result.continued_from for result in (rewritten, copied, defined)] == [None] * 3
    assert (rewritten.different, copied.different, defined.different) == (1, 0, 1)
    assert started == [4] * len(started)


MEASURED = """
import json, re, sys
from pathlib import Path
from streamer.compare import local_program
result = local_program.run(json.loads(sys.stdin.read()))
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(json.dumps([result, int(peak[1]) // 1024]))
"""
WIDE_DDL = """
create table wide (id int primary key, v text);
create table heap (n int, v text);
"""
WIDE_ROWS = """
insert into wide select g, repeat('{0}', 1000000) from generate_series(1, 30) g;
insert into heap select g, repeat('{0}', 1000000) from generate_series(1, 20) g;
"""


async def test_memory_does_not_grow_with_the_width_of_rows(
    stream: MakeStreamer,
    compare: Compare,
    source: Database,
    target: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows differ, with and without a key: hashes travel, and a row at a time."""
    source.execute(WIDE_DDL + WIDE_ROWS.format("s"))
    target.execute(WIDE_DDL + WIDE_ROWS.format("t"))
    peaks = []

    async def measure(self: LocalProcess, job: dict[str, Any]) -> list[dict[str, Any]]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MEASURED),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate(json.dumps(job).encode())
        result, peak = json.loads(output)
        peaks.append(peak)
        return list(result)

    monkeypatch.setattr(LocalProcess, "submit", measure)
    async with stream("wide: {initial: none}\nheap: {initial: none}") as streamer:
        await streamer.caught_up()
        for with_values in (False, True):
            found = await compare(streamer, jobs=1, with_values=with_values)
            wide, heap = found["wide"], found["heap"]
            assert (wide.different, heap.missing, heap.extra) == (30, 20, 20)
            (entry, *_) = heap.sample
            assert len(entry["key"]["v"]) == 1_000_000
            shown = 160 if with_values else 100  # ten rows of each table are shown
            assert peaks[-1] < shown, f"{peaks} MB"
    assert len(peaks) == 2


@pytest.mark.parametrize("version", [14_00_00, 99_00_00])
async def test_ranges_are_of_rows_and_other_tables_are_read_page_by_page(
    stream: MakeStreamer,
    compare: Compare,
    source: Database,
    target: Database,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
) -> None:
    """Rows are narrow, in pages by key. A uuid has its neighbours in distant pages, and a heap has
    no key. Before PostgreSQL 14, a server reads all pages for a range of pages.
    """
    ddl = (
        "create table narrow (id int primary key); create table heap (n int, v text);"
        "create table scattered (id uuid primary key, v text)"
    )
    rows = (
        "insert into narrow select generate_series(1, 60000);"
        "insert into heap select g, repeat('v', 100) from generate_series(1, 3000) g;"
        "insert into scattered select md5(g::text)::uuid, 'v' from generate_series(1, 3000) g;"
        "analyze narrow, heap, scattered"
    )
    for db in (source, target):
        db.execute(f"{ddl}; {rows}")
    target.execute(
        "delete from heap where n = 2000; update scattered set v = 'w' where id = md5('7')::uuid"
    )
    monkeypatch.setattr(distant_keys, "INDEXED_BYTES_MAX", 0)
    monkeypatch.setattr(cut_ranges, "RANGE_ROWS", 10_000)
    monkeypatch.setattr(cut_ranges, "PAGES_BYTES", 65_536)
    monkeypatch.setattr(cut_ranges, "LISTED_BYTES", 65_536)
    monkeypatch.setattr(tables_module, "TID_RANGES_MIN", version)
    jobs: list[dict[str, Any]] = []
    read: list[tuple[str, Any]] = []
    statements: list[str] = []
    run, digest_sql = local_program.run, ComparedTable.digest_sql

    def keep(job: dict[str, Any]) -> list[dict[str, Any]]:
        jobs.append(job)
        return run(job)

    both_read = threading.Barrier(2)
    numbers = itertools.count()

    def note(self: ComparedTable, *arguments: Any, pages: Any = ALL_PAGES) -> str:
        read.append((self.source_name, pages))
        if self.source_name == "public.heap" and next(numbers) < 2:
            both_read.wait(30)  # for the second of two sessions
        statements.append(digest_sql(self, *arguments, pages=pages))
        return statements[-1]

    monkeypatch.setattr(local_program, "run", keep)
    monkeypatch.setattr(ComparedTable, "digest_sql", note)
    names = ("narrow", "heap", "scattered")
    async with stream("\n".join(f"{name}: {{initial: none}}" for name in names)) as streamer:
        await streamer.caught_up()
        found = await compare(streamer, jobs=4)
    assert {n: (r.rows_source, r.missing, r.different) for n, r in found.items()} == {
        "narrow": (60_000, 0, 0),
        "heap": (3000, 1, 0),
        "scattered": (3000, 0, 1),
    }
    tables = {row["relation_id"]: ComparedTable.from_json(row) for row in jobs[0]["tables"]}
    assert {t.source_name: t.is_ordered for t in tables.values()} == {
        "public.narrow": True,
        "public.heap": False,
        "public.scattered": False,
    }
    cut = [Unit.from_row(row) for row in jobs[0]["units"]]
    keys = [
        int(u.range.upper[0]) for u in cut if u.range.upper and tables[u.relation_id].is_ordered
    ]
    sizes = [high - low for low, high in itertools.pairwise([0, *sorted(keys), 60_000])]
    assert len(sizes) == 6
    assert 5_000 < min(sizes) <= max(sizes) < 20_000
    for name in ("public.heap", "public.scattered"):
        assert len({pages for table, pages in read if table == name}) > 2
    if version == 99_00_00:
        listed = next(statement for statement in statements if "ctid = any" in statement)
        assert "Tid Scan" in str(source.execute(f"explain {listed}"))


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_spark_reads_a_table_without_ranges_page_by_page(
    stream: MakeStreamer,
    compare: Compare,
    source: Database,
    target: Database,
    spark_context: SparkContext,
) -> None:
    """Workers have the bounds of the program, so the table has wide values in TOAST storage."""
    for db in (source, target):
        db.execute(
            "create table heap (n int, filler char(3000), wide text);"
            "alter table heap alter filler set storage plain, alter wide set storage external;"
            "insert into heap select g, '', repeat('v', 1000000) from generate_series(1, 140) g"
        )
    target.execute("delete from heap where n = 139; update heap set wide = 'w' where n = 3")
    size = int(str(source.value("select pg_table_size('heap')")))
    assert len(cut_pages(70, size, 14_00_00, 140, None)) == 3
    async with stream("heap: {initial: none}") as streamer:
        await streamer.caught_up()
        found = (await compare(streamer, spark=spark_context))["heap"]
    assert (found.rows_source, found.rows_target) == (140, 139)
    assert (found.missing, found.extra) == (2, 1)
