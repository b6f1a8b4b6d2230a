"""Tenants that are schemas of a database: they join, go, come back, and get other names.

streamer finds new schemas by itself, and keeps the rows of dropped schemas until a purge. Sessions
of the application write to the tables of all present schemas.
"""

import time
from functools import partial

from tests.torture.checks import Violation
from tests.torture.definitions import NOTICE_SECONDS, _change, _until
from tests.torture.tables import Kind, kinds_of_schema
from tests.torture.tenants import purge_rows
from tests.torture.workload import Source
from tests.torture.world import World

SPARE = 2
"""Names of schemas that a database does not have at the start."""


def first_kinds(sid: str, count: int) -> tuple[Kind, ...]:
    """Return the tables of the schemas that a database has at the start."""
    return tuple(kind for number in range(count) for kind in _kinds(sid, f"tenant_t{number}"))


def _kinds(sid: str | None, namespace: str) -> tuple[Kind, ...]:
    return kinds_of_schema(namespace, f"{sid}_{namespace.removeprefix('tenant_')}")


def move_schema(world: World) -> None:
    """A schema joins, or goes, or goes and comes back with other tables."""
    source = world.random.choice([source for source in world.sources if source.hosts_schemas])
    names = {f"tenant_t{number}" for number in range(world.options.schemas + SPARE)}
    missing = sorted(names.difference(source.schemas))
    if missing and (len(source.schemas) == 1 or world.random.random() < 0.5):
        _create(world, source, world.random.choice(missing))
        return
    namespace = world.random.choice(source.schemas)
    _drop(world, source, namespace)
    if world.random.random() < 0.3:
        _create(world, source, namespace)
    elif world.random.random() < 0.3:
        kinds = _kinds(source.sid, namespace)
        purge_rows(world, source.database, str(kinds[0].sid), [kind.target for kind in kinds])


def _create(world: World, source: Source, namespace: str) -> None:
    world.note(f"  {source.slot} gets {namespace}")
    kinds, statements = create_schema(source, namespace)
    for kind in kinds:
        # A former table of this name may still be in the mapping.
        world.excuse(source, kind.name)
    _run(world, source, statements)
    source.kinds += kinds


def create_schema(source: Source, namespace: str) -> tuple[tuple[Kind, ...], str]:
    """Return the tables of a new schema, with the definitions of a present schema, and the
    statements that create the schema with a few rows.
    """
    model = source.schemas[0]
    kinds = _kinds(source.sid, namespace)
    statements = [f"create schema {namespace}"]
    for kind in kinds:
        statements.append(f"create table {kind.name} (like {model}.{kind.target} including all)")
        if kind.target != "entries":
            rows = "select g, 'first' from generate_series(1, 20) g"
            statements.append(f"insert into {kind.name} (id, v) {rows}")
    return kinds, "; ".join(statements)


def _drop(world: World, source: Source, namespace: str) -> None:
    world.note(f"  {source.slot} loses {namespace}")
    _run(world, source, drop_schema(source, namespace))


def drop_schema(source: Source, namespace: str) -> str:
    """Remove a schema from the tables of *source*; return the statement that drops the schema."""
    kept = [kind for kind in source.kinds if not kind.name.startswith(f"{namespace}.")]
    source.kinds = tuple(kept)
    return f"drop schema {namespace} cascade"


def rename_schema(world: World) -> None:
    """A schema has another name for a while: its tables stop, and go on with the former name."""
    source = world.random.choice([source for source in world.sources if source.hosts_schemas])
    former = world.random.choice(source.schemas)
    name = world.random.choice(("away", "tenant_away"))
    seconds = world.random.choice((0.0, 1.5, 6.0))
    world.note(f"  {source.slot}: {former} is {name} for {seconds:g} s")
    _run(world, source, f"alter schema {former} rename to {name}")
    _run(
        world,
        source,
        f"insert into {name}.accounts (id, v) values (-1, 'away') on conflict (id) do update"
        f" set v = '{len(world.schedule)}'; insert into {name}.entries values (-1, 'away');"
        f" update {name}.trail set v = 'away' where id % 5 = 1",
    )
    time.sleep(seconds)
    _run(world, source, f"alter schema {name} rename to {former}")


def _run(world: World, source: Source, statements: str) -> None:
    if not _until(partial(_change, world, source, statements), NOTICE_SECONDS):
        raise Violation(f"{source.slot} cannot run: {statements}")
