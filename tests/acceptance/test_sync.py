"""The first full sync under writes and under kills. Spark copies where the claim is about Spark;
elsewhere threads copy.
"""

import os
import random
import signal
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest

from streamer.copy.spark.class_archive import find_archive
from tests.support.postgres import Database, assert_same, contents
from tests.support.process import SPARK_PYTHON, Process, caught_up, command, status
from tests.support.streamer import write_config
from tests.support.values import ROWS, TYPES, UPDATES
from tests.support.waiting import eventually


class Writer:
    """Commits small transactions until told to stop."""

    def __init__(self, db: Database, statements: list[str], pause: float = 0.005) -> None:
        self._db = db
        self._statements = statements
        self._stop = threading.Event()
        self._pause = pause
        self._thread = threading.Thread(target=self._run)
        self.errors: list[BaseException] = []

    def _run(self) -> None:
        generator = random.Random(1)
        try:
            with self._db.connect() as connection:
                while not self._stop.wait(self._pause):
                    statement = generator.choice(self._statements)
                    connection.execute(statement.format(n=generator.randrange(5000)).encode())
        except BaseException as exc:  # noqa: BLE001  # raised at the end of the block
            self.errors.append(exc)

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.errors, self.errors


TABLES = {
    "keyed": "create table keyed (id int primary key, v text, at timestamptz default now())",
    "keyless": "create table keyless (a int, b text)",
    "whole": "create table whole (a int, b text); alter table whole replica identity full",
    "hist": "create table hist (id int primary key, v text)",
}
WRITES = [
    "insert into keyed values ({n} + 100000, 'new') on conflict (id) do update set v = keyed.v || '+'",
    "update keyed set v = 'updated {n}' where id = {n}",
    "delete from keyed where id = {n}",
    "insert into keyless values ({n}, 'written')",
    "insert into whole values ({n} % 10, 'x')",
    "update whole set b = b || 'y' where ctid = (select ctid from whole where a = {n} % 10 limit 1)",
    "delete from whole where ctid = (select ctid from whole where a = {n} % 10 limit 1)",
    "insert into hist values ({n} + 10000, 'h') on conflict (id) do update set v = 'hh'",
    "update hist set v = 'updated {n}' where id = {n}",
    "delete from hist where id = {n}",
]
MAPPING = "keyed:\nkeyless:\nwhole:\nhist: {type: history}"


def fill(source: Database, rows: int = 20000) -> None:
    for ddl in TABLES.values():
        source.execute(ddl)
    source.execute(f"insert into keyed select g, 'v' || g from generate_series(1, {rows}) g")
    source.execute(f"insert into keyless select g % 100, 'dup' from generate_series(1, {rows}) g")
    source.execute(f"insert into whole select g % 10, 'w' from generate_series(1, {rows // 20}) g")
    source.execute(f"insert into hist select g, 'h' || g from generate_series(1, {rows // 4}) g")
    source.execute("vacuum analyze")


def assert_equal(source: Database, target: Database) -> None:
    for table in ("keyed", "keyless", "whole"):
        assert_same(source, target, table)
    open_versions = "(select id, v from hist where kvsz_end = '9999-01-01') h"
    assert contents(source, "hist", "id, v") == contents(target, open_versions, "id, v")
    overlaps = (
        "select count(*) from hist a join hist b on a.id = b.id and a.kvsz_id < b.kvsz_id"
        " where a.kvsz_end > b.kvsz_start"
    )
    assert target.value(overlaps) == 0


def assert_tidy(source: Database, target: Database) -> None:
    """No remains: one slot, two publications, no deferred index, no task."""
    slots = source.execute(
        "select slot_name from pg_replication_slots where database = current_database()"
    )
    assert slots == [("streamer_shop",)]
    assert source.value("select count(*) from pg_publication") == 2
    assert target.value("select count(*) from streamer.deferred_index") == 0


def test_a_first_start_under_writes_ends_with_exactly_the_sources_rows(
    source: Database, target: Database, tmp_path: Path
) -> None:
    fill(source)
    source.execute("create index keyed_v on keyed (v)")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, MAPPING)
    with Process(config, spark=False) as process:
        with Writer(source, WRITES):
            eventually(lambda: target.value("select to_regclass('keyed') is not null"))
            eventually(lambda: all(t["state"] == "ready" for t in status(config)[0]["tables"]), 60)
        caught_up(process)
        assert_equal(source, target)
        assert_tidy(source, target)
        (source_status,) = status(config)
        copied = {t["source"]: t["rows_copied"] for t in source_status["tables"]}
        assert copied["public.keyless"] >= 20000
        assert process.terminate() == 0
    # Exact definitions: primary keys where the source has them, history columns.
    assert (
        target.value(
            "select count(*) from pg_constraint where contype = 'p' and conrelid = 'keyed'::regclass"
        )
        == 1
    )
    assert target.value("select count(*) from pg_index where indrelid = 'hist'::regclass") == 2
    again = command(config, "run", "--stop-when-caught-up")
    assert again.returncode == 0, again.stderr


def test_indexes_of_an_empty_target_table_come_back_as_they_were(
    source: Database, target: Database, tmp_path: Path
) -> None:
    fill(source, 2000)
    target.execute(
        TABLES["keyed"] + "; create index by_v on keyed (lower(v) desc) where id > 5;"
        "create unique index by_id on keyed (id) include (v); comment on index by_v is 'it''s mine';"
        "alter table keyed cluster on by_id"
    )
    definitions = (
        "select indexrelid::regclass::text, pg_get_indexdef(indexrelid), indisclustered,"
        " obj_description(indexrelid) from pg_index where indrelid = 'keyed'::regclass order by 1"
    )
    options = "select reloptions from pg_class where oid = 'keyed'::regclass"
    before = target.execute(definitions)
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "keyed:")
    # Killed while the indexes are away, and again after the first is back.
    for failpoint in ("sync.indexes_dropped=kill", "sync.index_restored=kill"):
        environment = {"STREAMER_FAILPOINTS": failpoint}
        with Process(config, environment=environment, spark=False) as process:
            assert process.wait(60) == -signal.SIGKILL
        assert target.execute(definitions) != before
    with Process(config, spark=False) as process:
        caught_up(process)
        assert target.execute(definitions) == before
        assert target.value(options) is None
        assert_same(source, target, "keyed")


def test_a_table_with_foreign_rows_is_not_emptied_without_consent(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute(TABLES["keyed"] + "; insert into keyed values (1, 'source')")
    source.execute(TABLES["hist"] + "; insert into hist values (1, 'source')")
    for table in ("keyed", "hist"):
        target.execute(TABLES[table] + f"; insert into {table} values (2, 'precious')")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "keyed:\nhist: {truncate_target: true}")
    with Process(config, spark=False) as process:
        tables = eventually(
            lambda: (
                [
                    t
                    for t in (status(config)[0]["tables"] or [])
                    if t["state"] in ("error", "ready")
                ][1:]
                and status(config)[0]["tables"]
            ),
            60,
        )
        by_name = {t["source"]: t for t in tables}
        assert by_name["public.keyed"]["state"] == "error"
        assert "already holds rows" in by_name["public.keyed"]["error"]
        assert by_name["public.hist"]["state"] == "ready"
        assert target.execute("select id, v from keyed") == [(2, "precious")]
        assert target.execute("select id, v from hist") == [(1, "source")]
        target.execute("truncate keyed")
        assert command(config, "resume", "keyed").returncode == 0
        caught_up(process)
        assert_same(source, target, "keyed")


@pytest.mark.spark
def test_killing_any_part_of_a_copy_ends_equal(
    source: Database, target: Database, tmp_path: Path
) -> None:
    """The process starts Spark again after the death of a part of Spark, and the next process after
    the death of the process.
    """
    fill(source)
    for db in (source, target):
        db.execute("create table fresh (id int primary key)")
    mapping = f"{MAPPING}\nfresh: {{initial: none}}"
    config = tmp_path / "config.yaml"
    # Slow enough to be killed in the middle.
    write_config(config, source, target, mapping, settings="sync: {rows_per_second: 8000}")
    tasks = (
        "select array_agg(pid) from pg_stat_activity where datname = current_database()"
        " and application_name like 'streamer copy%' and state = 'active' and pid <> all ('{{{}}}')"
    )
    former: list[int] = []
    with Writer(source, WRITES, pause=0.02):
        with Process(config) as process:
            for victim in (SPARK_PYTHON, "java", "run"):
                others = tasks.format(",".join(map(str, former)))
                former += eventually(partial(target.value, others), what="a task copies")
                if victim == "run":
                    process.kill()
                    break
                for child in eventually(partial(process.children, victim)):
                    child.send_signal(signal.SIGKILL)
                source.execute(f"insert into fresh values ({len(former)})")
                arrived = f"select 1 from fresh where id = {len(former)}"
                eventually(partial(target.execute, arrived), what="other tables continue")
        write_config(config, source, target, mapping)
        with Process(config) as process:
            caught_up(process, 90)
        leftovers = [
            p
            for p in psutil.process_iter(["cmdline"])
            if str(tmp_path) in " ".join(p.info["cmdline"] or [])
        ]
        assert leftovers == []
    with Process(config, spark=False) as process:
        caught_up(process)
        assert_equal(source, target)
        assert_tidy(source, target)
        process.terminate()


SETTINGS = ((1, "table"), (8, "transaction"), (3, "table"), (2, "transaction"))


def test_twenty_kills_under_mixed_load_end_equal_whatever_the_settings(
    source: Database, target: Database, tmp_path: Path
) -> None:
    fill(source, 2000)
    config = tmp_path / "config.yaml"
    write_config(config, source, target, MAPPING)
    generator = random.Random(7)
    stop = threading.Event()
    with Process(config, spark=False) as process:
        caught_up(process)
    with Writer(source, WRITES, pause=0.01):
        for number, (workers, consistency) in enumerate(SETTINGS * 5):
            settings = f"workers: {workers}\nconsistency: {consistency}"
            write_config(config, source, target, MAPPING, settings=settings)
            with Process(config, spark=False) as process:
                if number % 3 == 0:
                    eventually(lambda: status(config)[0]["state"] == "streaming")
                stop.wait(0.2 + generator.random())
                process.kill()
    with Process(config, spark=False) as process:
        caught_up(process)
        assert_equal(source, target)
        assert_tidy(source, target)
        assert process.terminate() == 0


@pytest.mark.spark
def test_every_value_is_the_same_on_every_path(
    tmp_path: Path, source: Database, target: Database
) -> None:
    """Copied at the start, streamed, and copied again by a resync. Afterwards no process of Spark is
    left.
    """
    source.execute(TYPES)
    source.execute(ROWS)
    source.execute(
        """
        create table part (id int, day date, v text, primary key (id, day)) partition by range (day);
        create table part_1 partition of part for values from ('2020-01-01') to ('2021-01-01');
        create table part_2 (v text, day date not null, id int not null);
        insert into part_2 values ('there before', '2021-05-05', 7);
        alter table part attach partition part_2 for values from ('2021-01-01') to ('2022-01-01');
        insert into part values (1, '2020-05-05', 'a');
        create table "x""; drop table part; --" ("select" int primary key, "100%s {}" text);
        insert into "x""; drop table part; --" values (1, 'copied');
        create table no_columns (); insert into no_columns default values;
        """
    )
    config = tmp_path / "config.yaml"
    write_config(config, source, target, """every:\npart:\n'"x""; drop table part; --"':""")
    names = ["every", "part", '"x""; drop table part; --"']
    archive = find_archive(os.environ)
    assert archive is not None
    with Process(config) as process:
        used = f"SharedArchiveFile={archive}"
        (jvm,) = eventually(lambda: process.children(used), 60, "Spark starts")
        files = Path(f"/proc/{jvm.pid}/maps")
        eventually(lambda: str(archive) in files.read_text(), what="the archive is in memory")
        caught_up(process)
        for name in names:
            assert_same(source, target, name)
        source.execute(UPDATES)
        source.execute(
            "insert into part values (2, '2020-06-06', 'b'); update part set day = '2021-01-01' where id = 2"
        )
        caught_up(process)
        for name in names:
            assert_same(source, target, name)
        for name in names:
            result = command(config, "resync", name)
            assert result.returncode == 0, result.stderr
        eventually(lambda: not process.children(""), 60, "no child is left")
        source.execute("update every set i2 = 7 where id = 1")
        caught_up(process)
        for name in names:
            assert_same(source, target, name)
        assert process.terminate() == 0
