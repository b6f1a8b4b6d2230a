"""The planner settings of a statement at the target end with that statement."""

from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, Streamer

NOTE = """
create table noted (id int, hashjoin text);
create function note() returns trigger language plpgsql as $$ begin
  insert into public.noted values (new.id, pg_catalog.current_setting('enable_hashjoin'));
  return null; end $$;
create trigger note after insert or update on {table} for each row execute function note();
alter table {table} enable always trigger note
"""
TABLE = "create table {} (id int primary key, v text)"


async def noted(target: Database, streamer: Streamer, source: Database, change: str) -> object:
    target.execute("truncate noted")
    source.execute(change)
    await streamer.caught_up()
    return target.execute("select distinct hashjoin from noted")


async def test_a_table_without_an_index_does_not_decide_how_others_are_planned(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLE.format("bare") + ";" + TABLE.format("keyed"))
    target.execute("create table bare (id int, v text);" + TABLE.format("keyed"))
    target.execute(NOTE.format(table="keyed"))
    rules = "bare: {initial: none}\nkeyed: {initial: none}"
    async with stream(rules, settings="consistency: transaction") as streamer:
        await streamer.caught_up()
        source.execute("insert into bare values (1, 'a'), (2, 'b')")
        await streamer.caught_up()
        for change in ("update bare set v = 'c'", "delete from bare where id = 1"):
            both = f"begin; {change}; insert into keyed values ({len(change)}, 'x'); commit"
            assert await noted(target, streamer, source, both) == [("off",)]


async def test_a_plan_made_while_a_key_was_put_off_is_made_again_when_it_is_back(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLE.format("t"))
    target.execute("create table t (id int, v text);" + NOTE.format(table="t"))
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        target.execute(
            "insert into streamer.deferred_index (target, definition)"
            " values ('public.t', 'alter table t add primary key (id)')"
        )
        source.execute("insert into t values (1, 'a')")
        update = "update t set v = v || 'b'"
        assert await noted(target, streamer, source, update) == [("on",)]
        target.execute("alter table t add primary key (id); delete from streamer.deferred_index")
        await noted(target, streamer, source, update)
        assert await noted(target, streamer, source, update) == [("off",)]
