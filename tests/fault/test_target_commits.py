"""A target may lose unflushed commits, and its readers see whole transactions."""

from pathlib import Path

from tests.support.mixed import DDL, HISTORY, TABLES, assert_equal, write
from tests.support.postgres import Database, running, versions
from tests.support.process import Process, caught_up
from tests.support.streamer import write_config


def test_a_target_that_commits_asynchronously_loses_nothing_acknowledged(
    tmp_path: Path, source: Database, server_directory: Path
) -> None:
    settings = {"synchronous_commit": "off", "wal_writer_delay": "10s", "fsync": "on"}
    with running(server_directory / tmp_path.name, versions()["18"], settings) as server:
        server.execute("create database dw")
        target = Database(server, "dw")
        source.execute(DDL + "create table hist (id int primary key, v text)")
        target.execute(DDL + HISTORY)
        config = tmp_path / "config.yaml"
        write_config(config, source, target, TABLES)
        with Process(config) as process:
            caught_up(process)
            for first in (0, 100, 200):
                write(source, first, first + 50)
                server.stop("immediate")
                write(source, first + 50, first + 100)
                server.start()
            caught_up(process)
            assert process.process.poll() is None, process.output
        assert_equal(source, target)


async def test_no_reader_sees_part_of_a_transaction_across_tables(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table a (id int primary key); create table b (id int primary key)")
    config = tmp_path / "config.yaml"
    write_config(
        config,
        source,
        target,
        "a: {initial: none}\nb: {initial: none}",
        settings="consistency: transaction\ncommit_interval: 0.02\nworkers: 8",
    )
    with Process(config) as process:
        caught_up(process)
        for n in range(0, 400, 2):
            source.execute(
                f"insert into a values ({n}), ({n + 1}); insert into b values ({n}), ({n + 1})"
            )
            counts = target.execute("select (select count(*) from a), (select count(*) from b)")
            assert counts[0][0] == counts[0][1]
        caught_up(process)
        assert target.value("select count(*) from b") == 400
