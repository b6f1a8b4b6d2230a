"""Shards without a sid, whose like-named tables share a table of the target by disjoint keys.

Such tables come and go at every shard. The rows of a dropped table stay at the target until a
resync of all tables. So a new table gets a new range of keys.
"""

from functools import partial

from tests.torture.checks import Violation
from tests.torture.definitions import NOTICE_SECONDS, _change, _until
from tests.torture.tables import Kind, reading
from tests.torture.workload import Source
from tests.torture.world import World

PRESENT_MAX = 4
"""Like-named tables of a shard."""


def operated(sources: list[Source]) -> list[tuple[Source, Kind]]:
    """Return the tables that an operator pauses and copies again: one for each shared table."""
    shards = [source for source in sources if source.is_shard][:1]
    return [(shard, shard.kind(name)) for shard in shards for name in ("pieces", "reading_0")]


def move_table(world: World) -> None:
    """A like-named table joins or goes."""
    source = world.random.choice([source for source in world.sources if source.is_shard])
    kept = {kind.name for _, kind in world.resynced}
    present = [kind for kind in source.kinds if kind.into == "readings"]
    leaving = [kind for kind in present if kind.name not in kept]
    is_full = len(present) >= PRESENT_MAX
    if leaving and (is_full or world.random.random() < 0.4):
        kind = world.random.choice(leaving)
        world.note(f"  {source.slot} loses {kind.name}")
        _run(world, source, drop_table(source, kind))
        return
    kind, statements = create_table(2 * world.options.shards + len(world.schedule))
    world.note(f"  {source.slot} gets {kind.name}")
    _run(world, source, statements)
    source.kinds += (kind,)


def create_table(number: int) -> tuple[Kind, str]:
    """Return a like-named table, and the statements that create the table with a few rows."""
    kind = reading(number)
    rows = f"select {kind.keys} + g, 'first' from generate_series(1, 20) g"
    return kind, f"{kind.ddl}; insert into {kind.name} {rows}"


def drop_table(source: Source, kind: Kind) -> str:
    """Remove a table from the tables of *source*; return the statement that drops the table."""
    source.kinds = tuple(other for other in source.kinds if other is not kind)
    return f"drop table {kind.name}"


def _run(world: World, source: Source, statements: str) -> None:
    if not _until(partial(_change, world, source, statements), NOTICE_SECONDS):
        raise Violation(f"{source.slot} cannot run: {statements}")
