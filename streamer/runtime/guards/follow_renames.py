"""Lets relations follow tables that a session renamed at the source (`ddl: capture`).

The row of pg_publication_rel stays the same under the new name, and the bookkeeping stores the OID
of that row. So the guard and the next start find the new name. The stream sends changes of the
table under both names, and finds relations by OID (`streamer.runtime.tables.relations`).

At a start, relations follow before streamer resolves the rules: no change reaches the target before
that. One transaction renames the target table and moves the relation's record.
`streamer.mapping.rename_targets` decides which relations follow, and which follow together. A
relation in sync that cannot follow keeps its name and an obstacle. Its lane then stops, and holds
all changes in order. Relations that are not in sync follow as well, and then their copy begins
again.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.deferred_indexes import restore_indexes
from streamer.bookkeeping.registered_relations import forget_relation
from streamer.bookkeeping.relation_records import RelationRecord, read_rename_targets
from streamer.bookkeeping.relation_states import store_names
from streamer.errors.error_classes import Retry, StreamerError
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rename_targets import (
    Following,
    Obstacle,
    Renamed,
    Verdicts,
    follow,
    groups,
    judge,
    rename_all_sql,
)
from streamer.mapping.rule_options import DdlCapture
from streamer.mapping.rules import SourceMapping
from streamer.runtime.guards.reconcile import renamed
from streamer.source.connection import Connection
from streamer.source.slot_and_publications.publication import Publication, read_publications
from streamer.target.connection import transaction
from streamer.util.failpoints import failpoint

log = structlog.get_logger()

LOCK_SECONDS: Final = 10


@dataclass(slots=True)
class Unfollowed:
    """Relations that kept the former names of their tables.

    ``refused``: the obstacles at the target, by relation id. ``names``: the former names,
    which new tables may have by now.
    """

    refused: dict[int, Obstacle] = field(default_factory=dict)
    names: set[RelationName] = field(default_factory=set)


def find_renamed(
    records: Mapping[RelationName, RelationRecord], publications: Iterable[Publication]
) -> list[Renamed]:
    """Return the relations of *records* whose tables have new names. Pure."""
    fingerprints = {name: record.publication_membership for name, record in records.items()}
    return [
        Renamed(
            record.relation_id,
            former,
            parse_name(record.target),
            now,
            record.row_sid,
            record.disjoint,
        )
        for former, now in renamed(fingerprints, publications).items()
        if (record := records[former])
    ]


async def judge_renames(
    bookkeeping: Bookkeeping,
    source: SourceMapping,
    moves: Iterable[Renamed],
    names: Collection[RelationName],
    target_namespace: str,
) -> Verdicts:
    """Return for each of *moves* how the relation follows, or the obstacle.

    *names*: the source's names of all relations.
    """
    ruled = {move: follow(source, move, target_namespace) for move in moves}
    if not ruled:
        return {}
    async with bookkeeping.connection() as connection:
        targets = {
            move: await read_rename_targets(connection, move, mapping.target)
            for move, mapping in ruled.items()
            if not isinstance(mapping, Obstacle)
        }
    return judge(ruled, targets, names)


async def follow_renames(
    plain: Connection,
    source: SourceMapping,
    bookkeeping: Bookkeeping,
    records: list[RelationRecord],
    version: int,
    target_namespace: str,
) -> Unfollowed:
    """Make relations of *records* follow renamed tables; return relations that cannot follow."""
    unfollowed = Unfollowed()
    if source.ddl is not DdlCapture.CAPTURE:
        return unfollowed
    by_name = {parse_name(record.source): record for record in records}
    publications = await read_publications(plain, source, version)
    moves = find_renamed(by_name, publications.values())
    verdicts = await judge_renames(bookkeeping, source, moves, by_name, target_namespace)
    unfollowed.names = {m.former for m, step in verdicts.items() if isinstance(step, Obstacle)}
    formers = {move.former for move in verdicts}
    for group in groups(verdicts):
        for name in {move.now for move in group} - formers:
            if name in by_name:  # a relation without rows, which a pattern has added
                await forget_relation(bookkeeping, by_name[name].relation_id)
        try:
            await _follow(bookkeeping, source, group)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            problem = f"its target cannot be renamed: {exc.message}"
            obstacle = Obstacle(
                problem, "remove the cause that the message names, then restart streamer"
            )
            unfollowed.refused |= {move.relation_id: obstacle for move in group}
            unfollowed.names |= {move.former for move in group}
    return unfollowed


async def _follow(
    bookkeeping: Bookkeeping, source: SourceMapping, group: Mapping[Renamed, Following]
) -> None:
    """Rename relations whose tables swap their names."""
    renames = {move: step.mapping.target for move, step in group.items() if step.renames_target}
    statements = rename_all_sql([(move.target, target) for move, target in renames.items()])
    async with bookkeeping.connection() as connection:
        for move in renames:  # definitions of indexes to restore have the former name
            await restore_indexes(connection, move.target, move.relation_id)
        async with transaction(connection):
            await connection.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'")
            for statement in statements:
                await connection.execute(statement)
            mappings = {move.relation_id: step.mapping for move, step in group.items()}
            await store_names(connection, mappings)
            failpoint("rename.followed")
    failpoint("rename.stored")
    for move in group:
        log.info(
            "table renamed",
            source=source.label,
            table=str(move.former),
            name=str(move.now),
            sql="; ".join(statements),
        )
