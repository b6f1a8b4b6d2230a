"""Applies another mapping to a source while its stream runs.

Tables that stay continue without a break, unless they share a lane with one that changes. Any other
change needs a new attempt to stream the source.
"""

from collections.abc import Callable
from dataclasses import replace

from streamer.apply.lane import MappedRelation
from streamer.errors import StreamerError
from streamer.failpoints import failpoint
from streamer.mapping.names import RelationName
from streamer.mapping.options import DdlCapture, Initial
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.progress.registered_relations import (
    brings_columns,
    forget_relation,
    register_relations,
)
from streamer.runtime.relations import Relations, forget_unmapped, resolve_at
from streamer.runtime.session import Session, remove_relation
from streamer.source.catalog import SourceRelation
from streamer.source.connection import connection
from streamer.source.timeline import check_same_server_plainly


async def change_rules(session: Session, source: SourceMapping) -> bool:
    """Go over to the rules of *source*; return False if that needs a new attempt.

    A table that is missing or cannot be published stops alone, as at a start. Raises StreamerError,
    and then nothing has changed.
    """
    relations, publishing = session.relations, session.publishing
    bookkeeping = session.services.bookkeeping
    async with connection(source) as plain:
        await check_same_server_plainly(plain, session.server)
        mappings, found = await resolve_at(
            plain,
            source,
            session.services.target_namespace,
            [mapped.mapping.source for mapped in relations],
        )
        is_captured = source.ddl is DdlCapture.CAPTURE  # tables may have exchanged their names
        if is_captured or any(mapped.mapping.source not in found for mapped in relations):
            await session.watch.cases.settle(plain)
        if session.watch.cases.has_renamed:
            return False  # the next start lets them follow
        wanted = {mapping.source: mapping for mapping in mappings}
        gone = [m for m in relations if not _stays(m, wanted.get(m.mapping.source), found)]
        groups = await relations.read_groups(mappings)
        may_change = _may_change(relations, wanted, gone, session.coordinator.is_at)
        if not may_change or not relations.fits(groups):
            return False
        relations.set_groups(groups)
        present = {mapped.mapping.source for mapped in relations}
        added = await session.register([m for m in mappings if m.source not in present], found)
        if added:
            failpoint("join.registered")
        try:
            publishing.change(source)
            await session.watch.cases.begin(plain)
            if added:
                failpoint("join.published")
        except StreamerError:
            publishing.change(session.tables.source)
            for mapped in added:
                await _remove(session, mapped)
                await forget_relation(bookkeeping, mapped.relation_id)
            raise
        session.tables.source = source
        for mapped in gone:
            await _remove(session, mapped)
        recomputed = _recomputed(relations, wanted)
        records = await register_relations(
            bookkeeping,
            session.record.source_id,
            [wanted[mapped.mapping.source] for mapped in recomputed],
            found=found,
        )
        for mapped in relations:
            relations.replace_mapping(mapped, wanted[mapped.mapping.source])
        # A copy of theirs may have begun by the old rules since, and may be one of all rows.
        if any(session.coordinator.is_at(mapped) for mapped in recomputed) or any(
            record.snapshot_lsn is None for record in records
        ):
            return False
        await forget_unmapped(bookkeeping, session.record.source_id, mappings)
        refilled = [wanted[m.mapping.source] for m in gone if m.mapping.source in wanted]
        if refilled:
            added += await session.register(refilled, found)
        await session.watch.cases.begin(plain)  # removed tables are published no more
    session.begin_copies(added)
    return True


def _stays(
    mapped: MappedRelation,
    mapping: RelationMapping | None,
    found: dict[RelationName, SourceRelation],
) -> bool:
    """Whether *mapped* stays under *mapping* without a copy of all its rows."""
    relation = found.get(mapped.mapping.source)
    alone = mapping is not None and relation is not None and brings_columns(mapping, relation)
    return mapped.fills_like(mapping, relation.column_names if relation and alone else None)


def _recomputed(
    relations: Relations, wanted: dict[RelationName, RelationMapping]
) -> list[MappedRelation]:
    """Return the relations of which `set` computes some columns otherwise."""
    return [
        mapped
        for mapped in relations
        if wanted[mapped.mapping.source].rule.expressions_mark
        != mapped.mapping.rule.expressions_mark
    ]


def _may_change(
    relations: Relations,
    wanted: dict[RelationName, RelationMapping],
    gone: list[MappedRelation],
    is_copied: Callable[[MappedRelation], bool],
) -> bool:
    """Return whether the running stream can switch to *wanted*; *gone* leave, or get a new copy.

    One relation cannot leave a lane that several share, and a copy continues by the rule with which
    it began with. A table without a new copy, or one that keeps its past, would lose the changes
    that its lane holds.
    """
    changed = [m for m in relations if not _is_alike(m.mapping, wanted.get(m.mapping.source))]
    return not (
        any(relations.shares_home(mapped) for mapped in gone)
        or any(is_copied(mapped) for mapped in changed)
        or any(
            mapped.mapping.source in wanted
            and _needs_its_changes(mapped.mapping, wanted[mapped.mapping.source])
            for mapped in gone
        )
    )


def _needs_its_changes(now: RelationMapping, wanted: RelationMapping) -> bool:
    """Whether no copy makes up for the changes that the lane of a relation holds."""
    has_past = wanted.rule.keeps_past and wanted.type is now.type
    return wanted.rule.initial is Initial.NONE or has_past


def _is_alike(one: RelationMapping, other: RelationMapping | None) -> bool:
    """Whether two mappings differ in nothing but the order of copies."""
    if other is None:
        return False
    return one == replace(other, rule=replace(other.rule, priority=one.rule.priority))


async def _remove(session: Session, mapped: MappedRelation) -> None:
    """Take a relation out of the stream, unless the guard of the source has done so."""
    if mapped not in session.relations:
        return
    await remove_relation(mapped, session.services, session.tables, session.dispatcher)
