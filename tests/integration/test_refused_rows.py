"""The error of a rejected row: key, column and constraint, and the command that helps first."""

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

TABLES = {
    "checked": ("v text", "v text constraint short check (length(v) < 5)"),
    "filled": ("v text", "v text not null"),
    "narrow": ("v varchar(9)", "v varchar(4)"),
    "taken": ("v text", "v text"),
    "labelled": ("v mood", "v mood"),
}
REFUSED = {
    "checked": "insert into checked values (7, 'too long')",
    "filled": "update filled set v = null where id = 1",
    "narrow": "insert into narrow values (7, 'too long')",
    "taken": "insert into taken values (7, 'ours')",
    "labelled": "insert into labelled values (7, 'it''s')",
}
SAYS = {
    "checked": (
        '"short"',
        'run at the target: alter table "public"."checked" drop constraint "short"',
    ),
    "filled": (
        'column "v"',
        'run at the target: alter table "public"."filled" alter column "v" drop not null',
    ),
    "narrow": (
        'column "v"',
        (
            'run at the target: alter table "public"."narrow" alter column "v" '
            'type character varying(9) using "v"::character varying(9)'
        ),
    ),
    "taken": ("taken_pkey", "run: streamer resync public.taken --database shop"),
    "labelled": ('column "v"', "run at the target: alter type public.mood add value 'it''s'"),
}
HELPS = {
    "checked": SAYS["checked"][1].partition(": ")[2],
    "filled": SAYS["filled"][1].partition(": ")[2],
    "narrow": SAYS["narrow"][1].partition(": ")[2],
    "taken": "delete from taken where v = 'theirs'",
    "labelled": SAYS["labelled"][1].partition(": ")[2],
}


@pytest.mark.parametrize("transport", ["text", "binary"])
async def test_a_refused_row_names_its_key_and_a_remedy(
    source: Database, target: Database, stream: MakeStreamer, transport: str
) -> None:
    source.execute("create type mood as enum ('a', 'it''s')")
    target.execute("create type mood as enum ('a')")
    for name, (here, there) in TABLES.items():
        source.execute(f"create table {name} (id int primary key, {here})")
        target.execute(f"create table {name} (id int primary key, {there})")
    rules = "\n".join(f"{name}: {{initial: none}}" for name in TABLES)
    async with stream(rules, group=f"transport: {transport}") as streamer:
        await streamer.caught_up()
        for name in TABLES:
            source.execute(f"insert into {name} values (1, 'a')")
        await streamer.caught_up()
        target.execute("insert into taken values (7, 'theirs')")
        for statement in REFUSED.values():
            source.execute(statement)
        for name, parts in SAYS.items():
            await streamer.table_state(f"public.{name}", "error", 40)
            error = (await streamer.table(f"public.{name}"))["error"]
            row = "=(1)" if name == "filled" else "=(7)"
            if name != "narrow" or transport == "text":
                assert row in error, error
            for part in parts:
                if part != 'column "v"' or name != "narrow" or transport == "text":
                    assert part in error, error
            assert "on_error: quarantine" in error
        for statement in HELPS.values():
            target.execute(statement)
        await streamer.caught_up(40)
        for name in TABLES:
            assert_same(source, target, name)
