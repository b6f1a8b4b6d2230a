"""Lets relations follow tables that a session renamed at the source (`ddl: capture`).

The row of pg_publication_rel stays the same under the new name, and the bookkeeping has its OID. So
the guard and the next start find the name. Changes of the table come under both names, and
relations are found by OID (`streamer.runtime.relations`).

A start lets relations follow before it resolves the rules: nothing is written to the target then.
One transaction renames the target table and moves the relation's record. A relation in sync that
cannot follow keeps its name and an obstacle. Its lane then stops, and holds all changes in order.
Others follow as well, and then their copy begins again. A relation of which the target has nothing
yet leaves a target table alone that is taken, or that other sources have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from streamer.errors import MappingError, Retry, StreamerError, TableRenamedError
from streamer.failpoints import failpoint
from streamer.mapping.renames import Obstacle, follow
from streamer.mapping.rules import (
    BOOKKEEPING,
    DdlCapture,
    RelationMapping,
    RelationName,
    SourceMapping,
    parse_name,
)
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.relations import RelationRecord, forget_relation
from streamer.source.catalog import read_relation_names
from streamer.source.connection import Connection
from streamer.source.publication import Publication, read_publications
from streamer.target.connection import TargetConnection, transaction
from streamer.target.deferred_indexes import restore_indexes

log = structlog.get_logger()

LOCK_SECONDS: Final = 10


def renamed(
    marks: Mapping[RelationName, str | None],
    publications: Iterable[Publication],
    present: Iterable[RelationName],
) -> dict[RelationName, RelationName]:
    """Return the new names of tables that are not among *present* any more. Pure.

    *marks*: the fingerprints of memberships (`membership_fingerprint`), by the former names.
    """
    members = {
        f"{publication.mark}/{member.mark}": name
        for publication in publications
        for name, member in publication.members.items()
    }
    there = set(present)
    return {
        former: members[mark]
        for former, mark in marks.items()
        if former not in there and mark is not None and mark in members
    }


def rename_error(former: RelationName, now: RelationName, obstacle: Obstacle) -> TableRenamedError:
    """Return the error that stops a table which cannot follow. Pure."""
    return TableRenamedError(
        f'table "{former}" was renamed to "{now}" at the source: {obstacle.problem}',
        hint=f"{obstacle.hint}; no change is lost meanwhile",
    )


async def judge(
    bookkeeping: Bookkeeping,
    source: SourceMapping,
    relation_id: int,
    former: RelationName,
    target: RelationName,
    now: RelationName,
    target_namespace: str,
) -> RelationMapping | TableRenamedError:
    """Return the mapping with which a relation follows its table, or the error that stops it."""
    try:
        found = follow(source, former, target, now, target_namespace)
    except MappingError as exc:
        found = Obstacle(exc.message, exc.hint or "correct the rules")
    if isinstance(found, RelationMapping) and found.target != target:
        async with bookkeeping.connection() as connection:
            obstacle = await _obstacle(connection, relation_id, target, found.target)
        found = obstacle or found
    if isinstance(found, Obstacle):
        return rename_error(former, now, found)
    return found


_TARGETS_SQL: Final = """
select pg_catalog.to_regclass($2) is not null as is_there,
       pg_catalog.to_regclass($3) is not null as is_taken,
       exists (select from streamer.relation o where o.target = r.target and o.id <> r.id)
           as is_shared,
       r.snapshot_lsn is null and r.attempt = 0 and not r.owns_rows as is_bare
from streamer.relation r where r.id = $1
"""


@dataclass(frozen=True, slots=True)
class Targets:
    """The former and the new target table of a relation that follows a rename."""

    is_there: bool
    """The former one exists."""
    is_taken: bool
    """The new one exists."""
    is_shared: bool
    """Other relations write to the former one."""
    is_bare: bool
    """Nothing of the relation is in the former one."""

    @property
    def are_renamed(self) -> bool:
        """Whether the former becomes the new one, or the relation only moves to the new one."""
        return not self.is_bare or (self.is_there and not self.is_taken and not self.is_shared)


async def _read_targets(
    connection: TargetConnection, relation_id: int, former: RelationName, now: RelationName
) -> Targets:
    quoted = [quote_qualified(name.namespace, name.name) for name in (former, now)]
    (row,) = await connection.fetch(_TARGETS_SQL, relation_id, *quoted)
    return Targets(**dict(row))


async def _obstacle(
    connection: TargetConnection, relation_id: int, former: RelationName, target: RelationName
) -> Obstacle | None:
    if target.namespace == BOOKKEEPING:
        return Obstacle("its target would be in the schema of the bookkeeping", "change the rule")
    targets = await _read_targets(connection, relation_id, former, target)
    if not targets.are_renamed:
        return None
    if targets.is_taken:
        return Obstacle(
            f'its target would be renamed to "{target}", and the target has such a table',
            "drop or rename that table, and restart streamer",
        )
    if targets.is_shared:
        return Obstacle(
            "other sources write to its target as well",
            f'write in `tables` a rule for its new name with the target "{target}", which begins '
            "with a copy, or with the former target",
        )
    return None


async def follow_renames(
    plain: Connection,
    source: SourceMapping,
    bookkeeping: Bookkeeping,
    records: list[RelationRecord],
    version: int,
    target_namespace: str,
) -> dict[int, Obstacle]:
    """Let the relations of *records* follow that can; return the obstacles that streamer met."""
    refused: dict[int, Obstacle] = {}
    if source.ddl is not DdlCapture.CAPTURE:
        return refused
    by_name = {parse_name(record.source): record for record in records}
    marks = {name: record.publication_mark for name, record in by_name.items()}
    present = await read_relation_names(plain)
    if marks.keys() <= set(present):
        return refused
    publications = await read_publications(plain, source, version)
    for former, now in renamed(marks, publications.values(), present).items():
        record = by_name[former]
        if (other := by_name.get(now)) is not None and not await _give_way(
            bookkeeping, other, record
        ):
            refused[record.relation_id] = Obstacle(
                f'streamer has another table of the name "{now}"',
                f'let no rule name "{former}", and resync "{now}"',
            )
            continue
        target = parse_name(record.target)
        found = await judge(
            bookkeeping, source, record.relation_id, former, target, now, target_namespace
        )
        if isinstance(found, RelationMapping):
            try:
                await _follow(bookkeeping, source, record, found)
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                problem = f"its target cannot be renamed: {exc.message}"
                remedy = "mend that, and restart streamer"
                refused[record.relation_id] = Obstacle(problem, remedy)
    return refused


async def _give_way(
    bookkeeping: Bookkeeping, other: RelationRecord, renamed: RelationRecord
) -> bool:
    """Forget *other*, if it is nothing but the table of *renamed* under its new name.

    A pattern may bring the new name before the guard has found that it is a renamed table.
    """
    if not other.is_bare or other.publication_mark not in (None, renamed.publication_mark):
        return False
    await forget_relation(bookkeeping, other.relation_id)
    return True


async def _follow(
    bookkeeping: Bookkeeping,
    source: SourceMapping,
    record: RelationRecord,
    mapping: RelationMapping,
) -> None:
    target = parse_name(record.target)
    statements = rename_sql(target, mapping.target)
    async with bookkeeping.connection() as connection:
        targets = await _read_targets(connection, record.relation_id, target, mapping.target)
        if not targets.are_renamed:
            statements = []
        if statements:  # definitions of indexes to make again have the former name
            await restore_indexes(connection, target, record.relation_id)
        async with transaction(connection):
            await connection.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'")
            for statement in statements:
                await connection.execute(statement)
            await connection.execute(
                "update streamer.relation set source = $2, target = $3 where id = $1",
                record.relation_id,
                str(mapping.source),
                str(mapping.target),
            )
            failpoint("rename.followed")
    failpoint("rename.stored")
    log.info(
        "table renamed",
        source=source.label,
        table=record.source,
        name=str(mapping.source),
        sql="; ".join(statements),
    )


def rename_sql(former: RelationName, now: RelationName) -> list[str]:
    """Return the statements that give a target table another name. Pure."""
    statements = []
    table = quote_qualified(former.namespace, former.name)
    if former.namespace != now.namespace:
        namespace = quote_identifier(now.namespace)
        statements.append(f"create schema if not exists {namespace}")
        statements.append(f"alter table {table} set schema {namespace}")
        table = quote_qualified(now.namespace, former.name)
    if former.name != now.name:
        statements.append(f"alter table {table} rename to {quote_identifier(now.name)}")
    return statements
