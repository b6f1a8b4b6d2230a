"""Sources that share a target table change their definitions one after the other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
import pytest

from streamer.drain import drainer
from tests.support.postgres import Database
from tests.support.remedies import Operator, remedy_of
from tests.support.streamer import Streamer, write_config

GROUP = "ddl: capture\ncreate: all\non_ddl: apply"
DDL = """
create type st as enum ('open', 'begun', 'closed');
create table t (id int primary key, v text, s st default 'open', rank text, o date, d date);
insert into t select n, n::text, 'begun', 'r' || n, '2024-01-01', '2024-02-02'
  from generate_series(1, 4) n;
"""
BY_TEXT = """
alter table t alter s drop default, alter s type text;
drop type st;
create type st as enum ('new', 'open');
insert into t (id, s) values (5, 'new');
update t set s = 'new' where s = 'begun';
alter table t alter s type st using s::st, alter s set default 'new'
"""
STEPS_ASIDE = """
alter type st rename to st_old;
create type st as enum ('open', 'gone');
alter table t alter s drop default;
alter table t alter s type st using (case s::text when 'open' then 'open' else 'gone' end)::st;
alter table t alter s set default 'open';
drop type st_old;
insert into t (id) values (5)
"""
NAMES_MOVE = """
alter table t alter v type int using v::int * 2;
alter table t rename o to swapping;
alter table t rename d to o;
alter table t rename swapping to d;
update t set o = o + 1 where id = 2
"""


@dataclass
class Tenants:
    streamer: Streamer
    sources: dict[str, Database]
    target: Database

    async def run(self, sid: str, commands: str) -> None:
        await asyncio.to_thread(self.sources[sid].execute, commands)

    async def are_alike(self, columns: str = "*") -> None:
        """Wait until all tables stream, and the target has the rows of each source."""

        def read() -> bool:
            return all(self._rows(sid, db, columns) for sid, db in self.sources.items())

        async def is_alike() -> bool:
            try:
                return await asyncio.to_thread(read)
            except psycopg.Error:  # the column does not exist yet
                return False

        await self.streamer.eventually(is_alike, 60)
        await self.streamer.caught_up(60)
        assert self.target.value("select count(*) from streamer.ddl where state = 'waiting'") == 0

    def _rows(self, sid: str, db: Database, columns: str) -> bool:
        names = db.value(
            "select string_agg(quote_ident(attname) || '::text', ', ' order by attname)"
            " from pg_attribute where attrelid = 't'::regclass and attnum > 0 and not attisdropped"
        )
        wanted = db.execute(f"select {names} from t order by id")
        return wanted == self.target.execute(
            f"select {names} from t where sid = '{sid}' order by id"
        )


@pytest.fixture
async def tenants(
    source: Database,
    second: Database,
    target: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_spark: None,
) -> AsyncIterator[Tenants]:
    monkeypatch.setattr(drainer, "ERROR_RETRY_SECONDS", 0.5)
    for db in (source, second):
        db.execute(DDL)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t:", sid="a", others={"b": second}, group=GROUP)
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up(60)
        yield Tenants(streamer, {"a": source, "b": second}, target)
    finally:
        await streamer.stop()


@pytest.mark.parametrize(
    "commands",
    [
        "alter table t alter v type int using v::int * 2",
        (
            "alter table t drop column rank; alter table t add column rank int not null default 7;"
            "update t set rank = id where id > 2"
        ),
        BY_TEXT,
        STEPS_ASIDE,
        NAMES_MOVE,
    ],
    ids=["type", "again", "by_text", "steps_aside", "names"],
)
async def test_the_last_of_two_sources_makes_the_commands_of_a_transaction_for_both(
    tenants: Tenants, commands: str
) -> None:
    await tenants.run("a", f"begin; {commands}; commit; insert into t (id, v) values (20, 2)")
    remedy = await remedy_of(tenants.streamer, "public.t", "waits for a decision", "a")
    assert "make this change at the remaining sources, too" in str(remedy)
    assert not remedy.has("ddl apply")  # which would fail again

    # The second source has its former definition, and its rows go on.
    await tenants.run("b", "insert into t (id, v) values (30, 3)")
    await tenants.streamer.eventually(
        lambda: has(tenants, "select from t where sid = 'b' and id = 30")
    )

    await tenants.run("b", f"begin; {commands}; commit; insert into t (id, v) values (21, 2)")
    await tenants.are_alike()


async def has(tenants: Tenants, query: str) -> bool:
    return bool(await asyncio.to_thread(tenants.target.execute, query))


READY = """
select from streamer.relation r join streamer.source s on s.id = r.source_id
where s.sid = '{sid}' and r.state = 'ready'
"""
CREATED: Sequence[tuple[str, str, str]] = (
    (
        "create type place as (street text, city text); alter table t add column p place",
        "alter type place add attribute zip text; alter type place rename attribute street to line",
        "update t set p = row('Main', 'Bonn', '53111') where id = 2",
    ),
    (
        (
            "create domain mail as text constraint has_at check (value like '%@%');"
            "alter table t add column p mail default 'x@y'"
        ),
        (
            "alter domain mail drop constraint has_at;"
            "alter domain mail add constraint is_short check (length(value) < 9)"
        ),
        "update t set p = 'short' where id = 2",
    ),
    (
        "create type mood as enum ('low', 'high'); alter table t add column p mood",
        "alter type mood rename value 'low' to 'deep'; alter type mood add value 'mid' before 'high'",
        "update t set p = 'deep' where id = 2",
    ),
    (
        "create type mood as enum ('low'); alter table t add column p mood default 'low'",
        "alter type mood rename value 'low' to 'deep'",
        "update t set p = 'deep' where id = 2",
    ),
)


@pytest.mark.parametrize(
    ("created", "changed", "used"), CREATED, ids=["composite", "domain", "enum", "default"]
)
async def test_a_source_that_comes_second_takes_a_new_type_as_the_first_has_it_by_now(
    tenants: Tenants, created: str, changed: str, used: str
) -> None:
    # The second source lags: its table has reached the creation of the type when the first changes.
    for command in (created, changed, used):
        await tenants.run("a", command)
    column = "select from t where sid = 'a' and id = 2 and to_jsonb(t)::text ~ 'Bonn|short|deep'"
    await tenants.streamer.eventually(lambda: has(tenants, column))
    blocked = tenants.target.connect()
    # The engine in this loop may still hold a lock of t.
    await asyncio.to_thread(blocked.execute, "begin; lock table t in share mode")
    for command in (created, changed, used):
        await tenants.run("b", command)
    blocked.execute("rollback")
    blocked.close()
    await tenants.are_alike()


@pytest.mark.follows("schema_changes.definition_stop:copy_remedy")
async def test_a_source_that_others_have_left_behind_is_copied_by_the_command_of_its_error(
    tenants: Tenants,
) -> None:
    """The peers reached an equal definition by different commands, so no message shows the
    equality.
    """
    await tenants.run("a", f"begin; {BY_TEXT}; commit; insert into t (id) values (20)")
    await remedy_of(tenants.streamer, "public.t", "waits for a decision", "a")
    other = BY_TEXT.replace(
        "drop default, alter s type", "drop default; alter table t alter s type"
    )
    await tenants.run("b", f"begin; {other}; commit")
    for sid, source in tenants.sources.items():
        words = "with its present definition"
        remedy = await remedy_of(tenants.streamer, "public.t", words, sid)
        operator = Operator(tenants.streamer.path, source, tenants.target)
        (number,) = (n for n, step in enumerate(remedy.steps) if "resync" in str(step))
        await operator.follow(remedy, choose=number)
        ready = READY.format(sid=sid)
        await tenants.streamer.eventually(partial(has, tenants, ready), 60)
    await tenants.are_alike()


async def test_a_table_that_one_tenant_renames_goes_on_with_the_rule_that_its_error_names(
    tenants: Tenants,
) -> None:
    first, second = tenants.sources["a"], tenants.sources["b"]
    streamer = tenants.streamer

    async def apply(tables: str) -> None:
        others = {"b": second}
        write_config(
            streamer.path, first, tenants.target, tables, sid="a", others=others, group=GROUP
        )
        await streamer.apply()

    def are_rows_there() -> bool:
        wanted = [(sid, id_) for sid in "ab" for id_ in (1, 2, 3, 4, 9)]
        return tenants.target.execute("select sid, id from t order by 1, 2") == wanted

    await apply('t:\n"p*":')
    await streamer.caught_up(60)
    await tenants.run("a", "alter table t rename to people; insert into people (id) values (9)")
    await streamer.table_state("public.t", "error")
    shown = (await streamer.table("public.t"))["error"]
    rule = "'public.people': {target: 'public.t'}"
    assert "other sources write to its target" in shown
    assert rule in shown
    await apply(f"t:\n{rule}")
    await tenants.run("b", "alter table t rename to people; insert into people (id) values (9)")
    await streamer.eventually(lambda: asyncio.to_thread(are_rows_there), 60)
    await streamer.caught_up(60)
