"""Changes that the program makes without an operator: definitions in the stream, and scripts.

The tenants of a table capture their definitions (`ddl: capture`). All tenants make the same
migrations in order, each at its own time. No stop is excused: in the end the table has the rows and
the definitions of both.
"""

import contextlib
import json
from functools import partial

import psycopg

from tests.support.process import command
from tests.torture.checks import Violation
from tests.torture.definitions import NOTICE_SECONDS, _change, _until
from tests.torture.tables import Kind
from tests.torture.workload import Source
from tests.torture.world import World

SCHEMA_STEPS = (
    (
        "alter table accounts add column c{n} int default {n};"
        " update accounts set c{n} = id where id % 3 = 0"
    ),
    (
        "alter table accounts rename column c{n} to d{n};"
        " update accounts set d{n} = 7 where id % 5 = 2"
    ),
    (
        "update accounts set d{n} = -9 where id % 4 = 0;"
        " alter table accounts alter column d{n} type bigint"
    ),
    "alter table accounts drop column d{n}; update accounts set v = 'dropped' where id % 9 = 0",
)
"""The steps of the tenants that are schemas."""
STEPS = (
    (
        "alter table evolving add column c{n} int default {n};"
        " update evolving set c{n} = id where id % 3 = 0"
    ),
    (
        "create index evolving_i{n} on evolving (c{n});"
        " alter table evolving add constraint evolving_k{n} check (c{n} > -1)"
    ),
    (
        "savepoint a; alter table evolving add column undone int; update evolving set undone = 1;"
        " rollback to a; update evolving set v = v || '.' where id % 5 = 1;"
        " alter table evolving rename column c{n} to d{n};"
        " update evolving set d{n} = 7 where id % 5 = 2"
    ),
    "alter type evolving_mood add value 'm{n}'",
    (
        "update evolving set mood = 'm{n}' where id % 2 = 0;"
        " alter table evolving alter column d{n} type bigint"
    ),
    (
        "alter table evolving drop constraint evolving_k{n};"
        " update evolving set d{n} = -9 where id % 4 = 0; drop index evolving_i{n}"
    ),
    "alter table evolving drop column d{n}; update evolving set v = 'dropped' where id % 9 = 0",
    (
        "create table evolving_p{n} (like evolving_parts including all);"
        " insert into evolving_p{n} select {from} + g, 'before' from generate_series(0, 9) g;"
        " alter table evolving_parts attach partition evolving_p{n}"
        " for values from ({from}) to ({from} + 20);"
        " insert into evolving_parts select {from} + g, 'after' from generate_series(10, 19) g"
    ),
    (
        "update evolving_parts set v = v || '.' where id % 3 = 1;"
        " alter table evolving_parts detach partition evolving_p{n};"
        " update evolving_p{n} set v = 'outside'; alter table evolving_parts add column p{n} int"
    ),
    (
        "delete from evolving_p{n} where id % 4 = 0; drop table evolving_p{n};"
        " update evolving_parts set p{n} = 1 where id % 5 = 0;"
        " alter table evolving_parts drop column p{n}"
    ),
)
TABLES = ("evolving", "evolving_parts")
OPERATOR_SHARE = 0.3
_OBJECTS = """
select 'index ' || relname from pg_class x join pg_index i on i.indexrelid = x.oid
 where i.indrelid = to_regclass('public.evolving') and not i.indisprimary
union all
select 'check ' || conname from pg_constraint
 where conrelid = to_regclass('public.evolving') and contype = 'c'
union all
select attrelid::regclass || '.' || attname || ' ' || format_type(atttypid, atttypmod)
  from pg_attribute
 where attrelid in (to_regclass('public.evolving'), to_regclass('public.evolving_parts'))
   and attnum > 0 and not attisdropped and attname <> 'sid'
union all
select 'label ' || enumlabel from pg_enum where enumtypid = to_regtype('public.evolving_mood')
"""


def operated(sources: list[Source]) -> list[tuple[Source, Kind]]:
    """Return the tables that an operator pauses and copies again."""
    return [(source, kind) for source in sources for kind in source.kinds if kind.name in TABLES]


def evolve(world: World) -> None:
    """All tenants make the next steps of the migrations."""
    tenants = [source for source in world.sources if source.database == "shop"]
    for _ in range(world.random.randrange(1, 4)):
        if world.options.captures_schemas:
            _evolve_schemas(world)
        number, step = divmod(world.evolved, len(STEPS))
        world.note(f"  step {world.evolved}")
        for source in world.random.sample(tenants, len(tenants)):
            _operate_around(world, source)
            statements = STEPS[step].format_map({"n": number, "from": 1000 + 20 * number})
            if not _until(lambda s=source, t=statements: _change(world, s, t), NOTICE_SECONDS):  # type: ignore[misc]
                raise Violation(f"{source.slot}: the application cannot run: {statements}")
        world.evolved += 1


def _evolve_schemas(world: World) -> None:
    """All schemas make a step, in any order of databases and schemas."""
    number, step = divmod(world.evolved, len(SCHEMA_STEPS))
    tenants = [(source, name) for source in world.sources for name in source.schemas]
    for source, namespace in world.random.sample(tenants, len(tenants)):
        statements = SCHEMA_STEPS[step].format_map({"n": number})
        change = partial(
            _change, world, source, f"set local search_path = {namespace}; {statements}"
        )
        if not _until(change, NOTICE_SECONDS):
            raise Violation(f"{source.slot}: {namespace} cannot run: {statements}")


def _operate_around(world: World, source: Source) -> None:
    """An operator pauses, resumes or copies a table before the next step."""
    if world.random.random() > OPERATOR_SHARE:
        return
    table = world.random.choice(TABLES)
    action = world.random.choice(("pause", "resume", "resync", "diff"))
    world.note(f"  {action} {source.slot} {table}")
    if action == "diff":
        world.request("resync", source, table, mode="diff")
    else:
        world.request(action, source, table)


def check(world: World) -> None:
    """The target has the tenants' definitions, and each script has run once on each side."""
    if world.options.has("move_tenant"):
        _drop_left_columns(world)
    for source in {source.slot: source for source, _ in operated(world.sources)}.values():
        _check_definitions(source, world)
    _check_scripts(world)


def _drop_left_columns(world: World) -> None:
    """The operator drops the columns that only a removed tenant had, as `tenants drift` says, and
    makes again the objects that `compare` misses then.

    A column that drift does not name stays, and fails the check below.
    """
    result = command(world.config, "tenants", "drift", "--database", "shop", "--json")
    dropped = []
    for item in json.loads(result.stdout)["items"]:
        _, told, statement = str(item["remedy"]).partition("run at the target: ")
        if told and item["table"].removeprefix("public.") in TABLES:
            dropped.append(statement)
            world.note(f"  the operator: {statement}")
            world.target.execute(statement)
    if not dropped:
        return
    compared = command(world.config, "compare", "evolving", "--database", "shop", "--json")
    lost = {
        difference["source"]
        for table in json.loads(compared.stdout)["tables"]
        for difference in table["definitions"]["differences"]
        if difference["target"] is None
    }
    for statement in sorted(lost):
        world.note(f"  the operator: {statement}")
        world.target.execute(statement)


def _check_definitions(source: Source, world: World) -> None:
    """The target has exactly the columns, indexes and checks of *source*."""
    here = sorted(source.execute(_OBJECTS))
    if not _until(lambda: sorted(world.target.execute(_OBJECTS)) == here, world.options.patience):
        there = sorted(world.target.execute(_OBJECTS))
        raise Violation(f"{source.slot}: evolving has {there} at the target, and {here} here")


def run_script(world: World) -> None:
    """An operator runs a script on both sides. The command may fail in the storm.

    A lost slot, or a new slot of a source without any copied table, leaves the script out. The
    source then stops, and the operator resolves the stop (`World.operate`).
    """
    lone = world.sources[0]
    if not world.is_streaming(lone) or not world.is_copied("quiet"):
        return
    name = f"script {len(world.schedule)}"
    world.scripts.append(name)
    world.note(f"  {name}: {_execute(world, name, seconds=3)}")


def _execute(world: World, name: str, seconds: float) -> int:
    file = world.directory / "script.sql"
    file.write_text(
        f"create table if not exists public.scripts (id text);"
        f" insert into public.scripts values ('{name}')"
    )
    arguments = ("--id", name, "--on", "both", "--database", world.sources[0].database)
    result = command(
        world.config,
        "execute",
        str(file),
        *arguments,
        "--timeout",
        str(seconds),
        seconds=seconds + 60,
    )
    return result.returncode


def _check_scripts(world: World) -> None:
    """Each script has run once on each side; a second run under the same id has no effect."""
    for name in world.scripts:
        if code := _execute(world, name, seconds=world.options.patience):
            raise Violation(f"{name} ended with {code}")
    wanted = sorted(world.scripts)
    for side in (world.sources[0], world.target) if wanted else ():
        with contextlib.suppress(psycopg.errors.UndefinedTable):
            found = sorted(str(name) for (name,) in side.execute("select id from scripts"))
            if found == wanted:
                continue
        raise Violation(f"scripts have not run once each: {found} instead of {wanted}")
