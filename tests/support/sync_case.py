"""A source whose tables are copied under writes, and the expected rows of both sides."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.kills import Kills
from tests.support.postgres import Database
from tests.support.waiting import eventually

TABLES = "keyed:\nkeyless:\nhist: {type: history}"
DDL = """
create table keyed (id int primary key, v text);
create table keyless (a int, b text);
create table hist (id int primary key, v text);
insert into keyed select g, 'before' from generate_series(1, 2000) g;
insert into keyless select g % 10, 'same' from generate_series(1, 2000) g;
insert into hist select g, 'before' from generate_series(1, 2000) g;
"""
TO_POINT = {"sync.compared", "sync.at_point"}
"""Only a copy of the rows that differ reaches these failpoints."""
IN_CHUNKS = {"sync.chunk_stored"}
"""Only a copy in chunks reaches this: see test_chunk_kills."""
STEPS = (
    "sync.slot_stored",
    "sync.table_created",
    "sync.prepared",
    "sync.guarded",
    "sync.planned",
    "sync.indexes_dropped",
    "sync.job_started",
    "sync.part_copied",
    "sync.copied",
    "sync.exchanged",
    "sync.index_restored",
    "sync.catching_up",
    "sync.drained",
)
"""In the order of a copy, so that a test can stop a copy at several failpoints."""
ONLY_AT_FIRST = {"sync.table_created", "sync.indexes_dropped", "sync.index_restored"}
"""A resync finds the table, and leaves the indexes unchanged."""
ONLY_LATER = {"sync.exchanged"}
"""A first copy has no rows to swap."""
WRITES_MAX = 1500


def write(source: Database, first: int, last: int) -> None:
    with source.connect() as connection:
        for n in range(first, last):
            connection.execute(
                f"""
                begin;
                insert into keyed values ({n} + 10000, 'new'); update keyed set v = v || '.' where id % 100 = {n % 100};
                delete from keyed where id = {n};
                insert into keyless values ({n % 3}, 'same'), ({n % 3}, 'row {n}');
                update hist set v = 'updated {n}' where id = {n}; delete from hist where id = {n} - 5;
                commit
                """.encode()
            )


class Case(Kills):
    """A source, its target, and the expected rows of both."""

    def __init__(self, directory: Path, source: Database, target: Database, sid: str | None):
        super().__init__(directory, source, target, TABLES, sid=sid)
        self.sid = sid
        self.written = 0
        source.execute(DDL)
        target.execute("create table keyed (id int primary key, v text)")
        if sid:
            target.execute(
                """
                drop table keyed; create table keyed (sid text, id int, v text, primary key (sid, id));
                insert into keyed values ('other', 1, 'not ours')
                """
            )
        target.execute("create index keyed_v on keyed (v)")

    def write(self, count: int) -> None:
        write(self.source, self.written, self.written + count)
        self.written += count

    def die_writing(self, failpoint: str) -> None:
        """Write until *failpoint* kills the process, and write once more afterwards."""
        self.die(failpoint, lambda: self.write(1))
        self.write(5)

    async def recover(self) -> None:
        await super().recover()
        self.assert_equal()
        self.assert_nothing_left()

    def ask_for_resync(self) -> None:
        """Request a resync of all tables that skips earlier changes, so that the program makes a
        new slot.
        """
        self.target.execute(
            "insert into streamer.request (relation_id, action, options)"
            """ select id, 'resync', '{"skip_changes": true}' from streamer.relation"""
        )

    def spoil(self) -> None:
        """Make rows of the target differ, of which the writer changes some."""
        condition = f"sid = '{self.sid}' and" if self.sid else ""
        self.target.execute(
            f"""
            update keyed set v = 'wrong' where {condition} id % 50 = 7; delete from keyed where {condition} id % 50 = 8;
            update hist set v = 'wrong' where {condition} id % 50 = 7; delete from hist where {condition} id % 50 = 8
            """
        )

    def ask_to_point(self, options: Mapping[str, Any]) -> None:
        """Request a resync with *options* of the tables with a key."""
        self.target.execute(
            "insert into streamer.request (relation_id, action, options)"
            f" select id, 'resync', '{json.dumps(options)}' from streamer.relation"
            " where source <> 'public.keyless'"
        )

    def assert_equal(self) -> None:
        of_source = f"sid = '{self.sid}'" if self.sid else "true"
        current = "kvsz_end = '9999-01-01' and not kvsz_deleted"
        for table, columns, condition in (
            ("keyed", "id, v", of_source),
            ("keyless", "a, b", of_source),
            ("hist", "id, v", f"{of_source} and {current}"),
        ):
            rows = f"select ({columns})::text from {table}"
            rows_of_source = self.source.execute(f"{rows} order by 1")
            assert rows_of_source == self.target.execute(f"{rows} where {condition} order by 1"), (
                table
            )
        if self.sid:
            foreign_rows = "select id, v from keyed where sid = 'other'"
            assert self.target.execute(foreign_rows) == [(1, "not ours")]

    def assert_nothing_left(self) -> None:
        slots = "select slot_name from pg_replication_slots where database = current_database()"
        name = f"streamer_shop_{self.sid}" if self.sid else "streamer_shop"
        eventually(lambda: self.source.execute(slots) == [(name,)], what="only our slot is left")
        for nothing in (
            "select * from streamer.deferred_index",
            "select * from streamer.request where ended_at is null",
            r"select * from pg_class where relname ~ '^copy_\d'",
            "select * from pg_class where reloptions::text like '%autovacuum%'",
            "select * from pg_stat_activity where application_name like 'streamer copy%' and datname = current_database()",
        ):
            eventually(partial(self._is_empty, nothing), what=nothing)
        indexes = "select count(*) from pg_indexes where tablename in ('keyed', 'hist')"
        assert self.target.value(indexes) == 4
        # A lane removes its spool once the last transaction is durable.
        eventually(lambda: self._spools() == [], what="neither spool nor job file is left")

    def _spools(self) -> list[str]:
        return [p.name for p in (self.config.parent / "spool").glob("*/*") if p.name != "lock"]

    def _is_empty(self, sql: str) -> bool:
        return self.target.execute(sql) == []
