"""Lets relations follow tables that a session renamed at the source (`ddl: capture`).

The row of pg_publication_rel stays the same under the new name, and the bookkeeping has its OID. So
the guard and the next start find the name. Changes of the table come under both names, and
relations are found by OID (`streamer.runtime.relations`).

A start lets relations follow before it resolves the rules: nothing is written to the target then.
One transaction renames the target table and moves the relation's record. Tables may take the names
of each other, in a cycle or a row. Their relations follow in one transaction, or none of them. A
relation in sync that cannot follow keeps its name and an obstacle. Its lane then stops, and holds
all changes in order.
Others follow as well, and then their copy begins again. A relation of which the target has nothing
yet leaves a target table alone that is taken, or that other sources have.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from streamer.errors import MappingError, Retry, StreamerError, TableRenamedError
from streamer.failpoints import failpoint
from streamer.mapping.names import RelationName, parse_name
from streamer.mapping.options import DdlCapture
from streamer.mapping.renames import Obstacle, follow, rule_hint
from streamer.mapping.rules import BOOKKEEPING, RelationMapping, SourceMapping
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.deferred_indexes import restore_indexes
from streamer.progress.registered_relations import forget_relation
from streamer.progress.relation_states import store_names
from streamer.progress.relations import RelationRecord, RenameTargets, read_rename_targets
from streamer.runtime.reconcile import renamed
from streamer.source.connection import Connection
from streamer.source.publication import read_publications
from streamer.target.connection import transaction

log = structlog.get_logger()

LOCK_SECONDS: Final = 10


@dataclass(frozen=True, slots=True)
class Renamed:
    """A relation whose table was called *former*, and is called *now*."""

    relation_id: int
    former: RelationName
    target: RelationName
    now: RelationName


@dataclass(frozen=True, slots=True)
class Following:
    """A relation follows its table. ``renames_target``: its target gets another name as well."""

    mapping: RelationMapping
    renames_target: bool = True


Found = Mapping[int, Following | Obstacle]
"""The verdicts about relations, by their ids."""


@dataclass(slots=True)
class Unfollowed:
    """Relations that kept the former names of their tables.

    ``refused``: the obstacles that the target made, by relation id. ``names``: the former names,
    which other tables may have by now.
    """

    refused: dict[int, Obstacle] = field(default_factory=dict)
    names: set[RelationName] = field(default_factory=set)


def settle(
    moves: Sequence[Renamed],
    found: Found,
    names: Collection[RelationName],
    tables: Collection[RelationName],
) -> Found:
    """Return *found* with an obstacle where a name is not free, also after the other moves. Pure.

    *names*: those of all relations but the ones that give way. *tables*: those of the targets of
    *found* that exist.
    """
    found = dict(found)
    moving = {move.former for move in moves}
    while True:
        going = [
            (move, its) for move in moves if isinstance(its := found[move.relation_id], Following)
        ]
        kept = set(names) - {move.former for move, _ in going}
        left = {move.target for move, step in going if step.mapping.target != move.target}
        blocked: dict[int, Obstacle] = {}
        for move, step in going:
            target = step.mapping.target
            if move.now in kept:
                blocked[move.relation_id] = _name_obstacle(move, is_moving=move.now in moving)
            elif target == move.target or not step.renames_target:
                continue
            elif target in tables and target not in left:
                blocked[move.relation_id] = Obstacle(
                    f'its target would be renamed to "{target}", and the target has such a table',
                    "drop or rename that table, and restart streamer",
                )
        if not blocked:
            return found
        found |= blocked


def _name_obstacle(move: Renamed, *, is_moving: bool) -> Obstacle:
    if is_moving:
        return Obstacle(
            f'the table that was called "{move.now}" before cannot follow to its own new name',
            "correct the rules for that one",
        )
    return Obstacle(
        f'streamer has another table of the name "{move.now}"',
        f'let no rule name "{move.former}", and resync "{move.now}"',
    )


def groups(moves: Sequence[Renamed], found: Found) -> list[list[Renamed]]:
    """Return the moves that can be made, those that use names of each other together. Pure."""
    left = [move for move in moves if isinstance(found[move.relation_id], Following)]
    made = []
    while left:
        group = [left.pop(0)]
        for one in group:  # which grows meanwhile
            joined = [other for other in left if _touch(one, other, found)]
            left = [other for other in left if other not in joined]
            group += joined
        made.append(group)
    return made


def _touch(one: Renamed, other: Renamed, found: Found) -> bool:
    return any(
        a.now == b.former or _target(found[a.relation_id]) == b.target
        for a, b in ((one, other), (other, one))
    )


def _target(step: Following | Obstacle) -> RelationName | None:
    return step.mapping.target if isinstance(step, Following) else None


def rename_error(former: RelationName, now: RelationName, obstacle: Obstacle) -> TableRenamedError:
    """Return the error that stops a table which cannot follow. Pure."""
    return TableRenamedError(
        f'table "{former}" was renamed to "{now}" at the source: {obstacle.problem}',
        hint=f"{obstacle.hint}; no change is lost meanwhile",
    )


async def judge(
    bookkeeping: Bookkeeping,
    source: SourceMapping,
    moves: Sequence[Renamed],
    names: Collection[RelationName],
    target_namespace: str,
) -> Found:
    """Return for each of *moves* the step with which the relation follows, or the obstacle.

    *names*: the source's names of all relations.
    """
    found: dict[int, Following | Obstacle] = {}
    kept, taken = set(names), set()
    leaving = {move.target for move in moves}
    async with bookkeeping.connection() as connection:
        for move in moves:
            try:
                mapping = follow(source, move.former, move.target, move.now, target_namespace)
            except MappingError as exc:
                mapping = Obstacle(exc.message, exc.hint or "correct the rules")
            if isinstance(mapping, Obstacle):
                found[move.relation_id] = mapping
                continue
            targets = await read_rename_targets(
                connection, move.relation_id, move.target, mapping.target, move.now
            )
            if targets.gives_way:
                kept.discard(move.now)
            if targets.is_taken:
                taken.add(mapping.target)
            found[move.relation_id] = _step(move, mapping, targets, leaving)
    return settle(moves, found, kept, taken)


def _step(
    move: Renamed,
    mapping: RelationMapping,
    targets: RenameTargets,
    leaving: Collection[RelationName],
) -> Following | Obstacle:
    """Return how a relation follows, if only its own targets count. *leaving*: those that moves
    may leave.
    """
    target = mapping.target
    if target == move.target:
        return Following(mapping, renames_target=False)
    if target.namespace == BOOKKEEPING:
        return Obstacle("its target would be in the schema of the bookkeeping", "change the rule")
    stays_taken = targets.is_taken and target not in leaving
    if targets.is_bare and (not targets.is_there or stays_taken or targets.is_shared):
        return Following(mapping, renames_target=False)
    if targets.is_shared:
        return Obstacle(
            "other sources write to its target as well",
            rule_hint(move.now, move.target),
        )
    return Following(mapping)


async def follow_renames(
    plain: Connection,
    source: SourceMapping,
    bookkeeping: Bookkeeping,
    records: list[RelationRecord],
    version: int,
    target_namespace: str,
) -> Unfollowed:
    """Let the relations of *records* follow that can; return the others."""
    unfollowed = Unfollowed()
    if source.ddl is not DdlCapture.CAPTURE:
        return unfollowed
    by_name = {parse_name(record.source): record for record in records}
    marks = {name: record.publication_mark for name, record in by_name.items()}
    publications = await read_publications(plain, source, version)
    moves = [
        Renamed(by_name[former].relation_id, former, parse_name(by_name[former].target), now)
        for former, now in renamed(marks, publications.values()).items()
    ]
    if not moves:
        return unfollowed
    found = await judge(bookkeeping, source, moves, by_name, target_namespace)
    unfollowed.names = {
        move.former for move in moves if isinstance(found[move.relation_id], Obstacle)
    }
    formers = {move.former for move in moves}
    for group in groups(moves, found):
        for name in {move.now for move in group} - formers:
            if name in by_name:  # it gives way
                await forget_relation(bookkeeping, by_name[name].relation_id)
        try:
            await _follow(bookkeeping, source, group, found)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            problem = f"its target cannot be renamed: {exc.message}"
            obstacle = Obstacle(problem, "mend that, and restart streamer")
            unfollowed.refused |= {move.relation_id: obstacle for move in group}
            unfollowed.names |= {move.former for move in group}
    return unfollowed


async def _follow(
    bookkeeping: Bookkeeping, source: SourceMapping, group: Sequence[Renamed], found: Found
) -> None:
    """Let relations follow that use names of each other."""
    steps = [(move, its) for move in group if isinstance(its := found[move.relation_id], Following)]
    pairs = [(move.target, step.mapping.target) for move, step in steps if step.renames_target]
    statements = rename_all_sql(pairs)
    async with bookkeeping.connection() as connection:
        for move, step in steps:
            if step.renames_target:  # definitions of indexes to make again have the former name
                await restore_indexes(connection, move.target, move.relation_id)
        async with transaction(connection):
            await connection.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'")
            for statement in statements:
                await connection.execute(statement)
            await store_names(connection, {move.relation_id: step.mapping for move, step in steps})
            failpoint("rename.followed")
    failpoint("rename.stored")
    for move, _ in steps:
        log.info(
            "table renamed",
            source=source.label,
            table=str(move.former),
            name=str(move.now),
            sql="; ".join(statements),
        )


def rename_all_sql(pairs: Sequence[tuple[RelationName, RelationName]]) -> list[str]:
    """Return the statements that give target tables other names, also those of each other. Pure."""
    formers = {former for former, _ in pairs}
    first, last = [], []
    for number, (former, now) in enumerate(pairs):
        if now in formers:  # its name becomes free only as another one moves
            aside = RelationName(former.namespace, f"streamer renames {number}")
            first += rename_sql(former, aside)
            last += rename_sql(aside, now)
        else:
            last = [*rename_sql(former, now), *last]
    return first + last


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
