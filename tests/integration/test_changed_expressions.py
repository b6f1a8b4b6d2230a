"""A changed `set` brings the recomputed columns of existing rows, and only these."""

import json

import pytest

from streamer.commands.table_requests import request
from streamer.target.connection import TargetAddress
from tests.integration.test_backfill import TABLE, equal, writing
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = [
    pytest.mark.usefixtures("without_spark", "short_backoffs"),
    pytest.mark.timeout(180),
]

WHERE = {"database": None, "sid": None}


async def same(
    streamer: Streamer, source: Database, target: Database, there: str, here: str
) -> None:
    """Wait until *here*, a query of the target, has the result of *there* at the source."""

    async def is_so() -> bool:
        return source.execute(there) == target.execute(here)

    await streamer.eventually(is_so)


def whole_copies(target: Database) -> object:
    return target.value("select sum(attempt) from streamer.relation where resync is null")


async def test_only_the_columns_of_a_changed_set_are_copied_for_existing_rows(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for table in ("t", "h", "a"):
        source.execute(TABLE.replace(" t ", f" {table} "))
    source.execute("create table bag (a int, b text); insert into bag values (1, 'x'), (1, 'x')")
    source.execute("alter table bag replica identity full")
    kinds = {"t": "", "h": "type: history, ", "a": "type: append, ", "bag": ""}

    def rules(expressions: str, bag: str = "b: 'upper(b)'") -> str:
        lines = [
            f"{t}: {{{kind}set: {{{expressions}}}}}" for t, kind in kinds.items() if t != "bag"
        ]
        return "\n".join([*lines, f"bag: {{set: {{{bag}}}}}"])

    target.execute("create table t (id int primary key, v text, secret text, extra text)")
    async with stream(rules("secret: 'md5(secret)'")) as streamer:
        await streamer.caught_up()
        source.execute("update h set v = 'second' where id <= 10; delete from a where id = 7")
        await streamer.caught_up()
        # A copy of whole rows would mend this value, so the wrong value shows that no copy ran.
        target.execute("update t set v = 'theirs' where id in (8, 9)")
        target.execute("update h set v = 'theirs' where id in (18, 19)")
        rows = target.value("select rows_copied from streamer.relation where source = 'public.t'")
        # WHEN the expression changes during the run
        with writing(source, "t"):
            write_config(
                streamer.path, source, target, rules("secret: \"'x' || id\"", "b: 'lower(b)'")
            )
            await streamer.apply()
            computed = "select id, 'x' || id from {} where id between 10 and 90 order by id"
            for table in ("t", "h", "a"):
                here = f"select id, secret from {table} where id between 10 and 90"
                now = " and kvsz_end > now()" if table == "h" else ""
                await same(
                    streamer, source, target, computed.format(table), f"{here}{now} order by id"
                )
        await streamer.caught_up()
        await equal(streamer, source, target, "select a, b from bag")
        await same(
            streamer,
            source,
            target,
            "select id, 'x' || id from t order by id",
            "select id, secret from t order by id",
        )
        assert target.value("select count(*) from t where v = 'theirs'") == 2
        assert target.value("select count(*) from h where v = 'theirs'") == 2
        # THEN open versions keep the times, and rows that only the append table has stay.
        assert target.value("select count(*) from h") == 110
        assert target.value("select secret from a where id = 7") != "x7"
        assert target.value("select count(*) from h where v = 'v' and kvsz_end < now()") == 10
        # AND the ledger says that no copy has replaced the rows.
        assert rows == target.value(
            "select rows_copied from streamer.relation where source = 'public.t'"
        )
    # WHEN, between two runs, a column is added and a second column is removed
    source.execute("update t set secret = 'new' where id = 20")
    write_config(streamer.path, source, target, "t: {set: {extra: 'upper(v)'}}")
    async with stream("t: {set: {extra: 'upper(v)'}}") as streamer:
        # THEN the removed column has the source's values again
        await same(
            streamer,
            source,
            target,
            "select id, secret, upper(v) from t order by id",
            "select id, secret, extra from t order by id",
        )
        await streamer.caught_up()
        assert target.value("select count(*) from t where v = 'theirs'") == 2
        assert target.value("select unfilled from streamer.relation") == []
        # WHEN the added column is removed, which no column of the source replaces
        before = target.execute("select id, extra from t order by id")
        write_config(streamer.path, source, target, "t: {}")
        await streamer.apply()
        await streamer.caught_up()
        assert target.execute("select id, extra from t order by id") == before
        assert target.value("select count(*) from t where v = 'theirs'") == 2
        # WHEN the filter changes as well, the table is copied
        changed = "t: {filter: 'id > 0', set: {extra: 'lower(v)'}}"
        write_config(streamer.path, source, target, changed)
        await streamer.apply()
        await streamer.caught_up()
        assert target.value("select count(*) from t where v = 'theirs'") == 0
        await same(
            streamer,
            source,
            target,
            "select *, lower(v) from t where id > 0 order by id",
            "select * from t order by id",
        )


async def test_each_tenant_gets_the_columns_of_its_own_set(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLE)
    target.execute(
        "create table t (sid text, id int, v text, secret text, primary key (sid, id));"
        "insert into t select 'us', g, 'theirs', 'theirs' from generate_series(1, 50) g"
    )
    async with stream("t: {truncate_target: true}", sid="eu") as streamer:
        await streamer.caught_up()
        rule = "t: {truncate_target: true, set: {secret: 'upper(secret)'}}"
        write_config(streamer.path, source, target, rule, sid="eu")
        await streamer.apply()
        await same(
            streamer,
            source,
            target,
            "select id, v, upper(secret) from t order by id",
            "select id, v, secret from t where sid = 'eu' order by id",
        )
        assert target.value("select count(*) from t where secret = 'theirs'") == 50


async def test_a_column_that_cannot_be_copied_is_tried_again_by_resume_and_a_pause_wins(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLE)
    async with stream("t: {}") as streamer:
        await streamer.caught_up()
        address = TargetAddress.parse(streamer.settings.target.url)
        before = target.execute("select * from t order by id")
        # The expression fails for a row.
        source.execute("update t set v = '0' where id = 50; update t set v = '7' where id <> 50")
        await streamer.caught_up()
        before = target.execute("select * from t order by id")
        rule = "t: {set: {secret: '(100 / v::int)::text'}}"
        write_config(streamer.path, source, target, rule)
        await streamer.apply()

        async def has_failed() -> bool:
            error = (await streamer.table("public.t"))["error"]
            return error is not None and "division by zero" in error

        await streamer.eventually(has_failed)
        error = (await streamer.table("public.t"))["error"]
        assert "streamer resume" in error
        assert "next start" in error
        assert target.execute("select * from t order by id") == before
        # WHEN the source is corrected, but the table is paused
        await request(address, "pause", "t", **WHERE)
        await streamer.table_state("public.t", "paused")
        source.execute("update t set v = '1' where id = 50")
        # AND the planner meanwhile requests a second column
        relation = target.value("select id from streamer.relation")
        options = json.dumps({"mode": "diff", "columns": ["secret"], "automatic": True})
        target.execute(
            f"insert into streamer.request (relation_id, action, options)"
            f" values ({relation}, 'resync', '{options}'); notify streamer"
        )

        async def is_taken() -> bool:
            return target.value("select count(*) from streamer.request where state = 'queued'") == 0

        await streamer.eventually(is_taken)
        assert (await streamer.table("public.t"))["state"] == "paused"
        assert target.execute("select * from t order by id") == before
        # THEN `resume` brings the column
        await request(address, "resume", "t", **WHERE)
        query = "select id, v, (100 / v::int)::text from t order by id"
        await same(streamer, source, target, query, "select id, v, secret from t order by id")
        await streamer.table_state("public.t", "ready")
        # A failed backfill that the next start repeats.
        source.execute("update t set secret = 'a' where id < 3")
        write_config(streamer.path, source, target, "t: {set: {secret: '(1 / (id - 3))::text'}}")
        await streamer.apply()
        await streamer.eventually(has_failed)
    source.execute("delete from t where id = 3")
    async with stream("t: {set: {secret: '(1 / (id - 3))::text'}}") as streamer:
        query = "select id, v, (1 / (id - 3))::text from t order by id"
        await same(streamer, source, target, query, "select id, v, secret from t order by id")


async def test_rows_in_quarantine_make_a_changed_set_copy_the_table(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLE)
    rule = "t: {{on_error: quarantine, set: {{v: '{}'}}}}"
    target.execute("create table t (id int primary key, v int, secret text)")
    async with stream(
        rule.format("coalesce(length(secret) / 0, 0)").replace("/ 0", "/ id")
    ) as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (0, 'zero', 'none')")

        async def is_there() -> bool:
            return target.value("select count(*) from streamer.quarantine") == 1

        await streamer.eventually(is_there)
        write_config(streamer.path, source, target, rule.format("length(secret)"))
        await streamer.apply()
        await same(
            streamer,
            source,
            target,
            "select id, length(secret), secret from t order by id",
            "select id, v, secret from t order by id",
        )
        assert target.value("select count(*) from streamer.quarantine") == 0


async def test_a_table_that_an_expression_has_stopped_goes_on_with_another(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLE)
    async with stream("t: {set: {secret: '(100 / id)::text'}}") as streamer:
        await streamer.caught_up()
        source.execute(
            "insert into t values (0, 'zero', 'none'); update t set v = 'w' where id = 5"
        )
        await streamer.table_state("public.t", "error")
        write_config(streamer.path, source, target, "t: {set: {secret: '(id * 100)::text'}}")
        await streamer.apply()
        await same(
            streamer,
            source,
            target,
            "select id, v, (id * 100)::text from t order by id",
            "select id, v, secret from t order by id",
        )
        await streamer.table_state("public.t", "ready")
        await streamer.caught_up()
        assert (await streamer.table("public.t"))["error"] is None
        assert target.value("select unfilled from streamer.relation") == []
