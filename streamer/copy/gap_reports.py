"""Reports gaps: differences between ready tables and the source that no later change removes.

The first kind is a partition that had rows when a session attached it to a published table, or that
was detached for a while. The second is a foreign table as a partition, whose changes are not in the
source's WAL. The third is a column that a session dropped and added again, or that took a former
column's name. Older rows then keep the former values. The fourth is a table that ALTER TABLE
rewrote with the same columns, or with types that may have changed values. The fifth is a table that
a session attached to a root outside the mapping, and detached again. For both see
`streamer.source.tables.rewritten_tables`.

The bookkeeping records the partitions in the snapshot of a copy. If a partition with rows is
attached later, the table's status reports the partition until the next copy. The check reports a
foreign partition again after a copy, because streamer never sees changes of its rows.

With `keys: disjoint`, no INSERT has checked the keys of such rows. Later changes of these rows
could change rows of a second table, so the table stops.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_columns import (
    StorageChange,
    read_membership,
    read_source_columns,
    read_storage,
    read_stored_leaves,
    set_leaves,
    set_storage,
    store_source_columns,
)
from streamer.bookkeeping.relation_definitions import read_definition
from streamer.bookkeeping.relation_states import report_gap
from streamer.copy.attached_rows import AttachedRows
from streamer.errors.error_classes import GapError
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy, run
from streamer.mapping.disjoint_keys import describe_unguarded
from streamer.mapping.rules import RelationMapping
from streamer.schema.source_definition import DefinedColumn, widens
from streamer.source.catalog import read_relations
from streamer.source.connection import Connection
from streamer.source.guarded_identities import read_identities
from streamer.source.slot_and_publications.publication import is_of_scope
from streamer.source.tables.attached_partitions import Leaf, had_rows, read_leaves
from streamer.source.tables.rewritten_tables import (
    former_storage,
    is_rewritten,
    read_stored_tables,
)
from streamer.target.catalog import read_relation as read_target
from streamer.util.failpoints import failpoint

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Gap:
    """A reason why rows are missing. ``first_steps``: the steps before the copy of these rows.
    ``sends_changes``: whether the stream contains later changes of these rows.
    """

    reason: str
    first_steps: str = ""
    sends_changes: bool = True


@dataclass(slots=True)
class FoundGaps:
    """The gaps of some relations. ``is_certain``: no lock and no concurrent copy hid a table."""

    by_relation: dict[MappedRelation, list[Gap]]
    is_certain: bool = True


async def store_present_partitions(
    bookkeeping: Bookkeeping, plain: Connection, relations: Iterable[MappedRelation]
) -> None:
    """Record the partitions of *relations* that the transaction of *plain* sees."""
    for mapped, leaves in (await read_present_partitions(plain, relations)).items():
        await set_leaves(bookkeeping, mapped.relation_id, leaves)


async def read_present_partitions(
    plain: Connection, relations: Iterable[MappedRelation]
) -> dict[MappedRelation, dict[int, str]]:
    """Return the partitions of *relations* that the transaction of *plain* sees, each with the
    transactions that attached it.
    """
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    leaves_by_name = await read_leaves(plain, by_name)
    return {
        by_name[name]: {leaf.oid: leaf.attached_by for leaf in leaves if not leaf.is_foreign}
        for name, leaves in leaves_by_name.items()
    }


async def report_gaps(
    bookkeeping: Bookkeeping,
    plain: Connection,
    relations: Iterable[MappedRelation],
    *,
    stop: Callable[[MappedRelation, ErrorReport], Awaitable[None]],
    checks_columns: bool = True,
    attached: AttachedRows | None = None,
) -> bool:
    """Report the gaps of *relations*, all in sync, since their copies. Return whether there is
    certainly no gap, as long as the catalogs do not change.

    *attached*: if given, copies the rows of attached partitions, in place of a report.
    *checks_columns*: also report replaced columns. A stream with captured definitions is behind the
    catalogs, and applies such changes itself. *stop* stops a table until an operator requests its
    copy.
    """
    gaps = await find_gaps(
        bookkeeping, plain, relations, checks_columns=checks_columns, attached=attached
    )
    for mapped, reasons in gaps.by_relation.items():
        error = ErrorReport.of(_describe(mapped, reasons))
        if mapped.mapping.rule.is_disjoint and any(gap.sends_changes for gap in reasons):
            await stop(mapped, error)
        elif await report_gap(bookkeeping, mapped.relation_id, error):
            name = str(mapped.mapping.source)
            log.warning("table lacks rows", table=name, error=error.text, **error.log_fields)
    return gaps.is_certain and not gaps.by_relation


async def find_gaps(
    bookkeeping: Bookkeeping,
    plain: Connection,
    relations: Iterable[MappedRelation],
    *,
    checks_columns: bool = True,
    attached: AttachedRows | None = None,
) -> FoundGaps:
    """Return the gaps of *relations*; for the parameters, see `report_gaps`."""
    relations = list(relations)
    result = FoundGaps({})
    if not relations:
        return result
    gaps = result.by_relation = defaultdict(list)
    await _find_rewrite_gaps(bookkeeping, plain, relations, result, captures=not checks_columns)
    if checks_columns:
        for mapped, gap in (await _find_column_gaps(bookkeeping, plain, relations)).items():
            gaps[mapped].append(gap)
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    leaves = await read_leaves(plain, by_name)
    ids = [by_name[name].relation_id for name in leaves]
    stored = await read_stored_leaves(bookkeeping, ids) if ids else {}
    for name, present in leaves.items():
        mapped = by_name[name]
        former = stored.get(mapped.relation_id)
        local = [leaf for leaf in present if not leaf.is_foreign]
        # With `keys: disjoint`, a row that the stream never inserted may share its key with a row
        # of a peer table. A partial copy would overwrite the peer's row.
        may_copy = not mapped.mapping.rule.is_disjoint
        gaps[mapped] += await _find_partition_gaps(
            bookkeeping, plain, mapped, local, former, attached if may_copy else None, result
        )
        if foreign := [leaf for leaf in present if leaf.is_foreign]:
            gaps[mapped].append(_foreign_gap(foreign))
    result.by_relation = {mapped: reasons for mapped, reasons in gaps.items() if reasons}
    return result


def _foreign_gap(leaves: list[Leaf]) -> Gap:
    return Gap(
        f"changes of {_names(leaves)} are not replicated, because a partition that is a foreign "
        "table writes no WAL at this server",
        "detach that partition, and map the table of its own server as a table of another "
        "source; then ",
        sends_changes=False,
    )


def _describe(mapped: MappedRelation, gaps: list[Gap]) -> GapError:
    source, name = mapped.source, str(mapped.mapping.source)
    reasons, steps = [gap.reason for gap in gaps], [gap.first_steps for gap in gaps]
    # With `keys: disjoint`, writing only the rows that differ could overwrite a peer table's rows.
    options = () if mapped.mapping.rule.is_disjoint else ("--mode", "diff")
    if mapped.mapping.rule.is_disjoint:
        reasons.append(describe_unguarded(name, str(mapped.mapping.target)))
        steps.append(
            "if so, a copy fails, so first detach the partition, or delete these rows at the "
            "source; to copy all tables with this target again, "
        )
    resync = run("resync", name, *options, database=source.database, sid=source.sid)
    return GapError("; ".join(reasons), hint=Remedy.of(*steps, "run: ", resync))


async def _find_partition_gaps(
    bookkeeping: Bookkeeping,
    plain: Connection,
    mapped: MappedRelation,
    leaves: list[Leaf],
    stored: dict[int, str] | None,
    attached: AttachedRows | None,
    result: FoundGaps,
) -> list[Gap]:
    """Return the gaps caused by partitions of this server; record the partitions without a gap."""
    # An older version of streamer recorded no partitions, so record the present partitions.
    new = [] if stored is None else [leaf for leaf in leaves if leaf.oid not in stored]
    filled = [await had_rows(plain, leaf) for leaf in new]
    gaps = [leaf for leaf, has_rows in zip(new, filled, strict=True) if has_rows]
    unknown = [leaf for leaf, has_rows in zip(new, filled, strict=True) if has_rows is not False]
    # The stream lacks all changes of a partition while it was detached.
    former = stored or {}
    reattached = [leaf for leaf in leaves if former.get(leaf.oid, "") not in ("", leaf.attached_by)]
    copied: list[Leaf] = []
    if attached is not None and (gaps or reattached):
        copied = await attached.request_rows(bookkeeping, plain, mapped, gaps + reattached)
    recorded = {
        leaf.oid: leaf.attached_by for leaf in leaves if leaf not in unknown or leaf in copied
    }
    for leaf in reattached:
        if leaf in copied:
            continue
        recorded[leaf.oid] = former[leaf.oid]
    if copied:
        failpoint("attach.requested")
    if recorded != stored:
        await set_leaves(bookkeeping, mapped.relation_id, recorded)
    result.is_certain &= recorded == {leaf.oid: leaf.attached_by for leaf in leaves}
    if attached is not None:
        return []
    parts = [
        (gaps, "was attached as a partition with rows, which the stream does not contain"),
        (
            reattached,
            "was detached and attached again, and changes made meanwhile are not replicated",
        ),
    ]
    return [Gap(f"{_names(members)} {reason}") for members, reason in parts if members]


def _names(leaves: list[Leaf]) -> str:
    return ", ".join(f'"{leaf.name}"' for leaf in leaves)


def replaced_columns(stored: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return the columns whose number differs from *stored*, which has a negative number for a
    column that the target does not get. Pure.
    """
    return [name for name, number in now.items() if abs(stored.get(name, number)) != number]


async def _find_column_gaps(
    bookkeeping: Bookkeeping, plain: Connection, relations: Iterable[MappedRelation]
) -> dict[MappedRelation, Gap]:
    """Return the gaps caused by columns that were replaced since the last copies of *relations*."""
    gaps = {}
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    async with bookkeeping.connection() as connection:
        ids = [mapped.relation_id for mapped in by_name.values()]
        stored = await read_source_columns(connection, ids)
    for name, identity in (await read_identities(plain, by_name)).items():
        mapped = by_name[name]
        stored_numbers = stored.get(mapped.relation_id)
        if stored_numbers is None:
            async with bookkeeping.connection() as connection:
                await store_source_columns(connection, mapped.relation_id, identity.columns)
            continue
        if replaced := replaced_columns(stored_numbers, identity.columns):
            listed = ", ".join(f'"{column}"' for column in replaced)
            gaps[mapped] = Gap(
                f"column {listed} of the source was dropped and added again, or renamed, so "
                "older rows keep former values"
            )
    return gaps


async def _find_rewrite_gaps(
    bookkeeping: Bookkeeping,
    plain: Connection,
    relations: Iterable[MappedRelation],
    result: FoundGaps,
    *,
    captures: bool,
) -> None:
    """Add the gaps of tables that ALTER TABLE rewrote since their copies to *result*.

    *captures*: the stream sends the values of columns that a session rewrote.
    """
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    stored = await read_storage(bookkeeping, [mapped.relation_id for mapped in by_name.values()])
    lost: dict[int, str] = {}
    changes: dict[int, StorageChange] = {}
    detached: list[MappedRelation] = []
    for name, tables in (await read_stored_tables(plain, by_name)).items():
        mapped = by_name[name]
        stored_storage = stored.get(mapped.relation_id)
        present = {}
        cast: list[str] | None = None
        for table in tables:
            former = former_storage(table, tables, stored_storage)
            was_rewritten = await is_rewritten(plain, table, former, captures=captures)
            if was_rewritten is None:
                result.is_certain = False
                present[table.oid] = former
            else:
                present[table.oid] = table.storage.lost if was_rewritten else table.storage
            if not captures and table.storage.has_other_columns(former):
                if cast is None:
                    cast = await _find_cast_columns(bookkeeping, plain, mapped)
                if cast:
                    present[table.oid] = table.storage.lost
            if table.storage.was_detached(former) and is_of_scope(
                await read_membership(bookkeeping, mapped.relation_id)
            ):
                detached.append(mapped)
                present[table.oid] = replace(present[table.oid], rewritten_by=former.rewritten_by)
        if present != stored_storage:
            changes[mapped.relation_id] = StorageChange(present, stored_storage)
        names = [f'"{table.name}"' for table in tables if present[table.oid].is_lost]
        lost[mapped.relation_id] = ", ".join(names)
    superseded = changes.keys() - await set_storage(bookkeeping, changes)
    result.is_certain &= not superseded  # a copy has stored newer values
    for mapped in detached:
        if mapped.relation_id in superseded:
            continue
        gap = Gap(
            f'a session attached "{mapped.mapping.source}" to a table outside the mapping, and '
            "detached it again, or changed all its columns; changes made meanwhile may be missing"
        )
        result.by_relation[mapped].append(gap)
    for mapped in by_name.values():
        listed = lost.get(mapped.relation_id)
        if listed and mapped.relation_id not in superseded:
            gap = Gap(
                f"ALTER TABLE rewrote {listed} (SET UNLOGGED, SET LOGGED, a new type or the "
                "like), and the stream does not contain these changes"
            )
            result.by_relation[mapped].append(gap)


async def _find_cast_columns(
    bookkeeping: Bookkeeping, plain: Connection, mapped: MappedRelation
) -> list[str]:
    """Return the columns whose values a cast may have changed at the source, but not at the
    target.
    """
    name = mapped.mapping.source
    relation = (await read_relations(plain, [name])).get(name)
    async with bookkeeping.connection() as connection:
        former = await read_definition(connection, mapped.relation_id)
        target = await read_target(connection, mapped.mapping.target)
    if relation is None or target is None:
        return []
    now = relation.definition.columns
    types = {name: column.type for name, column in target.columns.items()}
    return cast_columns(mapped.mapping, None if former is None else former.columns, now, types)


def cast_columns(
    mapping: RelationMapping,
    former: Sequence[DefinedColumn] | None,
    now: Sequence[DefinedColumn],
    target: Mapping[str, str],
) -> list[str]:
    """Return the columns of *now* whose type may not hold the *former* values and differs from the
    *target*'s type. Pure.

    A target with an equal type has cast the values equally. If *former* is unknown, compare *now*
    with the target's types.
    """
    former_types = None if former is None else {column.number: column.type for column in former}
    inputs = mapping.expression_inputs([column.name for column in now])
    names = []
    for column in now:
        target_name = mapping.target_column(column.name)
        is_input = column.name in inputs
        target_type = None if target_name is None else target.get(target_name)
        former_type = target_type if former_types is None else former_types.get(column.number)
        if target_type is None and not is_input:
            continue
        is_same = former_type in (None, column.type) or (
            target_type == column.type and not is_input
        )
        if not is_same and not widens(str(former_type), column.type):
            names.append(column.name)
    return names
