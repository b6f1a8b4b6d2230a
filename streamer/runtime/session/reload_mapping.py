"""Applies a changed mapping to a source while its stream runs.

Unchanged tables continue without a break, unless they share a lane with a changed table. All other
changes need a new attempt to stream the source.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.registered_relations import (
    can_backfill,
    forget_relation,
    register_relations,
)
from streamer.errors.error_classes import StreamerError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlCapture, Initial
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.mapping.shared_targets import Clashes
from streamer.runtime.session.session import Session
from streamer.runtime.tables.relations import Relations, forget_unmapped, resolve_at
from streamer.source.catalog import SourceRelation
from streamer.source.connection import Connection, connection
from streamer.source.server.timeline import check_same_server_by_query
from streamer.util.failpoints import failpoint

log = structlog.get_logger()


async def change_rules(session: Session, source: SourceMapping, clashes: Clashes) -> bool:
    """Apply the rules of *source*, but not to *clashes*; return False if the rules need a new
    attempt.

    A table that is missing or cannot be published stops, and the remaining tables continue, as at a
    start. Raises StreamerError, in which case no rule has changed.
    """
    relations = session.relations
    async with connection(source) as plain:
        await check_same_server_by_query(plain, session.server)
        mappings, definitions, refused = await resolve_at(
            plain,
            source,
            session.services.target_namespace,
            [mapped.mapping.source for mapped in relations],
        )
        mappings = [mapping for mapping in mappings if mapping.source not in clashes]
        session.tables.clash = next(iter(clashes.values()), None)
        if clashes and _is_unchanged(session, source, mappings, definitions):
            return True
        is_captured = source.ddl is DdlCapture.CAPTURE  # tables may have swapped their names
        if is_captured or any(mapped.mapping.source not in definitions for mapped in relations):
            await session.monitor.cases.reconcile(plain)
        if session.monitor.cases.has_renamed:
            return False  # the next start renames the relations
        by_name = {mapping.source: mapping for mapping in mappings}
        removed = [
            m for m in relations if not _stays(m, by_name.get(m.mapping.source), definitions)
        ]
        groups = await relations.read_groups(mappings)
        may_change = _may_change(relations, by_name, removed, session.coordinator.is_at)
        if not may_change or not relations.fits(groups):
            return False
        relations.set_groups(groups)
        added = await _add(session, plain, source, mappings, definitions)
        try:
            refilled = await _switch(session, plain, source, by_name, definitions, removed)
        except StreamerError as exc:
            log.warning(
                "the rules changed in part, so the source begins a new attempt",
                source=source.label,
                error=str(exc),
                **exc.log_fields,
            )
            return False
        if refilled is None:
            return False
        session.tables.refused = refused
    session.begin_copies([*added, *refilled])
    return True


async def _add(
    session: Session,
    plain: Connection,
    source: SourceMapping,
    mappings: Iterable[RelationMapping],
    definitions: dict[RelationName, SourceRelation],
) -> list[MappedRelation]:
    """Register and publish the relations of *mappings* that join.

    Raises StreamerError; no relation has joined then.
    """
    relations, publishing = session.relations, session.registrar.publishing
    present = {mapped.mapping.source for mapped in relations}
    try:
        added = await session.registrar.register(
            [mapping for mapping in mappings if mapping.source not in present], definitions
        )
        if added:
            failpoint("join.registered")
        publishing.change(source)
        await session.monitor.cases.begin(plain)
        if added:
            failpoint("join.published")
    except StreamerError:
        publishing.change(session.tables.source)
        for mapped in relations:
            if mapped.mapping.source not in present:
                await session.remove(mapped)
                await forget_relation(session.services.bookkeeping, mapped.relation_id)
        raise
    return added


async def _switch(
    session: Session,
    plain: Connection,
    source: SourceMapping,
    by_name: dict[RelationName, RelationMapping],
    definitions: dict[RelationName, SourceRelation],
    removed: list[MappedRelation],
) -> list[MappedRelation] | None:
    """Switch to the rules *by_name*; return relations that get a new copy, or None if the rules
    need a new attempt.

    Without a new attempt after an error, some tables would have the former rules. The position
    stays from the first dropped change until the bookkeeping has no *removed* relation in sync. So
    after a crash, no rules, not even the former rules, continue a table behind lost changes.
    """
    relations, bookkeeping = session.relations, session.services.bookkeeping
    session.tables.source = source
    if removed:
        session.tracker.hold()
    for mapped in removed:
        await session.remove(mapped)
    recomputed = _recomputed(relations, by_name)
    records = await register_relations(
        bookkeeping,
        session.record.source_id,
        [by_name[mapped.mapping.source] for mapped in recomputed],
        definitions=definitions,
    )
    for mapped in relations:
        relations.replace_mapping(mapped, by_name[mapped.mapping.source])
    # A copy of these relations may have begun under the old rules, possibly a copy of all rows.
    if any(session.coordinator.is_at(mapped) for mapped in recomputed) or any(
        record.snapshot_lsn is None for record in records
    ):
        return None
    await forget_unmapped(bookkeeping, session.record.source_id, by_name.values())
    refilled = [by_name[m.mapping.source] for m in removed if m.mapping.source in by_name]
    added = await session.registrar.register(refilled, definitions) if refilled else []
    session.tracker.release()
    session.tables.advanced.set()
    await session.monitor.cases.begin(plain)  # also unpublishes removed tables
    return added


def _is_unchanged(
    session: Session,
    source: SourceMapping,
    mappings: list[RelationMapping],
    definitions: dict[RelationName, SourceRelation],
) -> bool:
    """Whether the session has exactly the relations of *mappings*, by the same rules."""
    present = {mapped.mapping.source for mapped in session.relations}
    is_complete = present == {mapping.source for mapping in mappings}
    return is_complete and present <= definitions.keys() and source == session.tables.source


def _stays(
    mapped: MappedRelation,
    mapping: RelationMapping | None,
    definitions: dict[RelationName, SourceRelation],
) -> bool:
    """Whether *mapped* stays under *mapping* without a copy of all its rows."""
    relation = definitions.get(mapped.mapping.source)
    can_fill = mapping is not None and relation is not None and can_backfill(mapping, relation)
    columns = relation.column_names if relation and can_fill else None
    return mapped.can_backfill_to(mapping, columns)


def _recomputed(
    relations: Relations, by_name: dict[RelationName, RelationMapping]
) -> list[MappedRelation]:
    """Return the relations with columns that `set` now computes differently."""
    return [
        mapped
        for mapped in relations
        if by_name[mapped.mapping.source].rule.expressions_fingerprint
        != mapped.mapping.rule.expressions_fingerprint
    ]


def _may_change(
    relations: Relations,
    mappings: dict[RelationName, RelationMapping],
    removed: list[MappedRelation],
    is_copied: Callable[[MappedRelation], bool],
) -> bool:
    """Return whether the running stream can switch to *mappings*, without the relations *removed*.

    *removed* relations are no longer mapped, or get a new copy. A single relation cannot leave a
    shared lane, and a copy continues by the rule with which it began. A table without a new copy,
    or a table that keeps its past, would lose the changes that its lane holds.
    """
    changed = [m for m in relations if not _is_alike(m.mapping, mappings.get(m.mapping.source))]
    return not (
        any(relations.shares_lane_in_sync(mapped) for mapped in removed)
        or any(is_copied(mapped) for mapped in changed)
        or any(
            mapped.mapping.source in mappings
            and _needs_held_changes(mapped.mapping, mappings[mapped.mapping.source])
            for mapped in removed
        )
    )


def _needs_held_changes(now: RelationMapping, mapping: RelationMapping) -> bool:
    """Whether the lane of a relation holds changes that no copy replaces."""
    has_history = mapping.rule.keeps_history and mapping.type is now.type
    return mapping.rule.initial is Initial.NONE or has_history


def _is_alike(former: RelationMapping, new: RelationMapping | None) -> bool:
    """Whether two mappings are equal, or differ only in the order of copies."""
    if new is None:
        return False
    return former == replace(new, rule=replace(new.rule, priority=former.rule.priority))
