"""A reload takes effect as a whole, or not at all."""

from pathlib import Path

import pytest

from streamer.errors.error_classes import MappingError
from streamer.source.journal.journal_files import Journal, directory_of, has_journal
from streamer.source.journal.journal_records import JournalIdentity
from streamer.source.timeline_branches import Branch
from streamer.util.lsn import Lsn
from tests.support.postgres import Database, database
from tests.support.proxy import Proxy
from tests.support.streamer import Streamer, write_config
from tests.support.waiting import until

SECONDS = 60.0
TASKS = """
select count(*) from pg_stat_activity
where application_name like 'streamer copy%' and datname = current_database()
"""
SLOTS = "select slot_name::text from pg_replication_slots where database = current_database()"


async def test_a_source_is_not_half_removed_while_the_target_is_away(
    source: Database, target: Database, target_proxy: Proxy, tmp_path: Path
) -> None:
    target.execute("create table t (sid text, id int, primary key (sid, id))")
    path = tmp_path / "config.yaml"
    with database(source.server, "second") as second, database(source.server, "third") as third:
        for db in (source, second, third):
            db.execute("create table t (id int primary key)")
        write_config(path, source, target, "t: {initial: none}", sid="a", others={"b": second})
        streamer = Streamer(path)
        streamer.start()
        try:
            await streamer.caught_up(SECONDS)
            target_proxy.leave()
            write_config(path, source, target, "t: {initial: none}", sid="a", others={"c": third})
            with pytest.raises(MappingError, match='to remove "shop:b"'):
                await streamer.apply()
            labels = [each.source.label for each in streamer.engine.supervisors]
            assert labels == ["shop:a", "shop:b"]
            second.execute("insert into t values (1)")
            target_proxy.heal()
            await streamer.apply()
            await streamer.caught_up(SECONDS)
            source.execute("insert into t values (2)")
            third.execute("insert into t values (3)")
            await streamer.caught_up(SECONDS)
            assert second.execute(SLOTS) == []
            rows = target.execute("select sid, id from t where sid <> 'b' order by sid")
            assert rows == [("a", 2), ("c", 3)]
        finally:
            await streamer.stop()


async def test_the_journal_of_another_installation_outlives_a_removed_source(
    source: Database, target: Database, tmp_path: Path
) -> None:
    """Both installations have one spool directory."""
    path = tmp_path / "config.yaml"
    with database(source.server, "second") as second:
        for db in (source, second):
            db.execute("create table t (id int primary key)")
        write_config(path, source, target, "t: {initial: none}", sid="a", others={"b": second})
        source.execute(
            "create publication streamer_shop_a;"
            "comment on publication streamer_shop_a is 'streamer installation another'"
        )
        streamer = Streamer(path)
        journal = directory_of(streamer.settings.spool.path, "streamer_shop_a")
        Journal.create(journal, JournalIdentity("1", "streamer_shop_a"), Lsn(1), Branch(1)).close()
        streamer.start()
        try:

            async def is_refused() -> bool:
                failures = [each.failure for each in streamer.engine.supervisors]
                return any("belongs to installation another" in str(each) for each in failures)

            await streamer.eventually(is_refused)
            write_config(path, second, target, "t: {initial: none}", sid="b")
            await streamer.apply()
        finally:
            await streamer.stop()
        assert has_journal(journal)
        assert source.value("select count(*) from pg_publication") == 1


async def test_a_copy_of_a_removed_source_commits_nothing(
    source: Database, target: Database, tmp_path: Path, without_spark: None
) -> None:
    path = tmp_path / "config.yaml"
    with database(source.server, "second") as second:
        for db in (source, second):
            db.execute("create table t (id int primary key); insert into t values (1), (2)")
        target.execute("create table t (sid text, id int, primary key (sid, id))")
        write_config(path, second, target, "t: {initial: none}", sid="b")
        streamer = Streamer(path)
        streamer.start()
        try:
            await streamer.caught_up(SECONDS)
            with target.connect() as locking:
                locking.execute("begin; lock table t in share mode")
                write_config(path, source, target, "t:", sid="a", others={"b": second})
                await streamer.apply()
                await until(
                    lambda: target.value(f"{TASKS} and wait_event_type = 'Lock'"),
                    "a task waits for the table",
                )
                write_config(path, second, target, "t: {initial: none}", sid="b")
                await streamer.apply()
                locking.execute("commit")
            second.execute("insert into t values (3)")
            await streamer.caught_up(SECONDS)
            await until(lambda: target.value(TASKS) == 0, "no task is left")
            assert target.execute("select sid, id from t") == [("b", 3)]
        finally:
            await streamer.stop()
