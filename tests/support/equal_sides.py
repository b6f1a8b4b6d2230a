"""Both sides are equal in the end: rows, definitions for streamer, and definitions for `pg_dump`."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg

from tests.support.dumps import Dump, Sides, difference, dump, of_clones
from tests.support.postgres import Database
from tests.support.process import Process, caught_up, command, status
from tests.support.waiting import polls

CATCH_UP_SECONDS = 60.0


@dataclass(frozen=True)
class World:
    """A kind of target.

    ``sides``: the objects that both sides have to share. ``current``: the condition for the
    rows of the source. ``unmade``: kinds of definitions that the target cannot have.
    ``failed``: those that the target refuses.
    """

    sides: Callable[[Dump, Dump], Sides] = of_clones
    rules: dict[str, str] = field(default_factory=dict)
    sids: tuple[str | None, ...] = (None,)
    current: str = "true"
    schemas: tuple[str, ...] = ("public",)
    unmade: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def assert_equal(
    world: World, sources: dict[str | None, Database], target: Database, process: Process
) -> None:
    """Wait for the end of the stream and of all definitions, and compare both sides."""
    with contextlib.suppress(AssertionError):  # the obstacles reveal more
        caught_up(process, CATCH_UP_SECONDS)

    def find_unlike() -> list[str]:
        differences = []
        for sid, db in sources.items():
            unlike = difference(*world.sides(dump(db, world.schemas), dump(target, world.schemas)))
            differences += [f"pg_dump {sid or ''}:\n{unlike}"] if unlike else []
        return differences

    def find() -> list[str]:
        problems = _obstacles(world, process.config, target)
        for sid, db in sources.items():
            problems += _unequal_rows(world, sid, db, target)
        # pg_dump fails if an index or a constraint goes during the dump.
        return problems or find_unlike()

    remaining = find()
    for _ in polls(CATCH_UP_SECONDS, every=0.5):
        if not (remaining := find()):
            break
    assert not remaining, "\n".join(remaining)
    compared = command(process.config, "compare", "--definitions", "--json")
    tables = json.loads(compared.stdout)["tables"]
    assert all(table["equal"] for table in tables), compared.stdout
    lacks = [lack for table in tables for lack in table["definitions"]["differences"]]
    assert {lack["kind"] for lack in lacks} <= set(world.failed), lacks
    assert (compared.returncode == 0) == (not lacks), compared.stderr


def _obstacles(world: World, config: Path, target: Database) -> list[str]:
    tables = [table for source in status(config) for table in source["tables"]]
    busy = [f"{t['source']} {t['state']} {t['error']}" for t in tables if t["state"] != "ready"]
    unmade = (
        "select kind, name, state, reason from streamer.definition where state <> 'made'"
        f" and not (state = 'unmade' and kind = any (array{list(world.unmade)}::text[]))"
        f" and not (state = 'failed' and kind = any (array{list(world.failed)}::text[]))"
    )
    waiting = "select query from streamer.ddl where state = 'waiting'"
    return busy + [str(row) for sql in (unmade, waiting) for row in target.execute(sql)]


def _unequal_rows(world: World, sid: str | None, source: Database, target: Database) -> list[str]:
    """Return some rows of each table that exist on a single side."""
    of_sid = f" and sid = '{sid}'" if sid else ""
    unequal = []
    for table, columns in source.execute(_TABLES.format(schemas=list(world.schemas))):
        rows = f"select row({columns})::text from {table} where true"
        try:
            source_rows = Counter(map(str, source.execute(rows)))
            target_rows = Counter(map(str, target.execute(f"{rows} and {world.current}{of_sid}")))
        except psycopg.Error as exc:
            unequal.append(f"{table}: {exc}")
            continue
        if source_rows != target_rows:
            unequal.append(
                f"{table}: {sorted(source_rows - target_rows)[:3]} {sorted(target_rows - source_rows)[:3]}"
            )
    return unequal


_TABLES: Final = """
select quote_ident(nspname) || '.' || quote_ident(relname),
       (select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute
         where attrelid = c.oid and attnum > 0 and not attisdropped)
  from pg_class c join pg_namespace n on n.oid = relnamespace
 where relkind in ('r', 'p') and not relispartition and nspname = any (array{schemas})
 order by 1
"""
