"""Prepares a copy: decides whether the copy can run, and whether it is direct or staged.

*Direct*: COPY fills the target table. This is the fast way, for a table without rows of this
source, so that readers miss no row. ``streamer.relation.filling`` records the start. After a crash
the table holds only part of this source's rows, and streamer deletes that part.

*Staged*: the target table contains rows of this source, and has readers. COPY fills a staging
table, and one transaction swaps the rows (`streamer.copy.staging_tables`). A crash leaves the old
rows.

streamer removes rows of other programs only with consent.

Many tables are prepared together, because round trips for each small table would take longer than
the copy of its rows. A statement about all tables waits for no lock on a user's table. After a
failure, or if the target tables have rows, the caller prepares the tables one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.rows.apply_plan import ApplyPlan, Identity
from streamer.apply.rows.check_expressions import confirm_expressions
from streamer.apply.rows.make_plan import make_plan, missing_columns, missing_target
from streamer.apply.rows.refuse_shared_rows import refuse_shared_rows
from streamer.bookkeeping.copied_parts import add_parts, remove_parts
from streamer.bookkeeping.copies import (
    begin_copies,
    fill_directly,
    find_in_sync_before,
    read_filling,
    set_row_estimates,
)
from streamer.bookkeeping.relation_states import CopyRecord
from streamer.control.chunked_copy import ChunkedCopy, beyond, in_bytes
from streamer.control.resync_options import Mode, Resync, RowScope
from streamer.control.table_state import CopyScope, Need
from streamer.copy.copy_obstacles import (
    OCCUPIED_WORDS,
    TARGET_DATABASE_SQL,
    TargetDatabase,
    find_unreadable,
    find_unusable_namespace,
    occupied_error,
    own_target_error,
)
from streamer.copy.copy_query import CopyInput
from streamer.copy.copy_snapshot import HeldSnapshot, TableSeen
from streamer.copy.parts.ctid_ranges import CopyPart
from streamer.copy.resync_scope import (
    check_conditions,
    check_copy_where,
    source_condition,
    target_condition,
    unchanged_columns,
)
from streamer.copy.shared_copies import require_common_copy, shared_copy_error
from streamer.copy.staging_tables import drop_stages, rest_triggers, stage_name, stage_place
from streamer.copy.swap_rows import RowSwap, WriteMode
from streamer.errors.error_classes import TargetFencedError
from streamer.errors.remedies import Remedy, run
from streamer.mapping.expressions import Expression, ExpressionFacts
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import Initial, MetadataKind, OnColumnAdded, TableType
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.schema.desired_columns import columns_to_add
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.changes_during_copy import ChangedDefinitions
from streamer.schema_changes.create_tables import NewTable, create_tables, published_relation
from streamer.schema_changes.tenant_types import refuse_unlike_types
from streamer.schema_changes.widen_shared_table import widen_shared_table
from streamer.source.catalog import SourceRelation, SourceServer
from streamer.source.connection import Connection
from streamer.source.tables.expression_check import describe_condition, describe_expressions
from streamer.source.tables.user_defined_types import read_named_types, read_types
from streamer.target.add_columns import add_columns
from streamer.target.catalog import read_kind, read_relation, read_relations
from streamer.target.connection import TargetAddress, TargetConnection, transaction
from streamer.target.target_partitions import create_partitions
from streamer.util.backoff import Backoff
from streamer.util.failpoints import failpoint
from streamer.util.lsn import Lsn

if TYPE_CHECKING:
    from streamer.copy.copy_in_chunks import TableChunk
    from streamer.copy.copy_under_lock import LockedTable

log = structlog.get_logger()

TOGETHER: Final = 50
"""The number of tables that a session locks at a time to prepare the tables or to read their
definitions.
"""

Pair = tuple[MappedRelation, SourceRelation]
"""A relation to copy, and its table at the source."""


@dataclass(frozen=True, slots=True)
class CopyMethod:
    """How the rows of an attempt get into the target table.

    ``owns_rows``: after the copy, streamer has written all rows of this source in the target.
    ``is_first``: the relation has not been in sync yet.
    """

    attempt: int
    mode: WriteMode = WriteMode.DIRECT
    owns_rows: bool = True
    is_first: bool = False


@dataclass(eq=False, slots=True)
class TableCopy:
    """A relation in a round of copies. The round sets fields without a default in this order."""

    mapped: MappedRelation
    relation: SourceRelation
    target: TargetRelation
    was_created: bool
    scope: CopyScope
    plan: ApplyPlan | None = None
    method: CopyMethod = field(init=False, repr=False)
    """Set once the bookkeeping stores the attempt."""
    lock: "LockedTable | None" = None
    """The session that locks the table until the end of the copy, if needed."""
    snapshot: HeldSnapshot = field(init=False, repr=False)
    seen: TableSeen = field(init=False, repr=False)
    """The table in the snapshot."""
    differences: RowScope | None = None
    """The differing rows, from a comparison at the consistent point."""
    chunk: "TableChunk | None" = None
    """The rows to copy, in a copy in chunks."""
    columns: tuple[str, ...] = ()
    parts: list[CopyPart] = field(default_factory=list)
    has_copied_parts: bool = False
    parts_with_span: set[int] = field(default_factory=set)
    includes_orphans: bool = False
    """The copy also deletes target rows that match the scope and no longer exist at the source."""
    is_done: bool = False
    kept_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """The time by which the rule of the target's partitions decides about old rows."""
    backoff: Backoff = field(default_factory=Backoff)
    not_before: float = 0.0
    """The time of the next attempt to swap the rows."""

    @property
    def name(self) -> str:
        return str(self.mapped.mapping.source)

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key of copies: a higher priority first, then a smaller table."""
        return -self.mapped.mapping.rule.priority, self.seen.size_bytes

    def use_definition(self, relation: SourceRelation) -> None:
        """Use *relation* for the copy and for the stream that follows it."""
        self.relation = relation
        self.mapped.relid = relation.oid
        self.mapped.source = self.mapped.source.with_definition(relation)

    @property
    def column_numbers(self) -> dict[str, int]:
        """The numbers of the source's columns, negative if the target does not get a column."""
        numbers = {column.name: column.number for column in self.relation.columns}
        if self.plan is None:
            return numbers
        written = self.plan.written
        return {name: number if name in written else -number for name, number in numbers.items()}

    @property
    def consistent_point(self) -> Lsn:
        return self.snapshot.consistent_point

    @property
    def plain(self) -> Connection:
        """The session at the source that reads the table in the snapshot."""
        return self.snapshot.plain if self.lock is None else self.lock.plain

    @property
    def is_disjoint(self) -> bool:
        """Whether only keys distinguish the rows from the rest of the target's rows."""
        return self.mapped.mapping.rule.is_disjoint

    @property
    def is_staged(self) -> bool:
        return self.method.mode is not WriteMode.DIRECT

    @property
    def query_input(self) -> CopyInput:
        """The input of the copy's query."""
        rows = self.rows
        return CopyInput(
            self.mapped.relation_id,
            self.method.attempt,
            self.mapped.mapping,
            self.relation.columns,
            self.target,
            self.sid,
            self.destination,
            self.seen.heaps,
            self.seen.can_split and (rows is None or rows.reads_all),
            None if rows is None else source_condition(rows, self.mapped.mapping, self.names),
            self.only,
            (self.snapshot.source_time, str(self.consistent_point)),
            conditions=tuple(str(e) for e in (self.copy_where, self.kept_rows) if e is not None),
            has_request_condition=rows is not None and bool(rows.conditions),
        )

    @property
    def rows(self) -> RowScope | None:
        """The rows to copy; None for all."""
        return self.differences if self.scope.resync.scope is None else self.scope.resync.scope

    @property
    def copy_where(self) -> Expression | None:
        """The condition of the rule that limits the first copy.

        A later copy reads all rows, because streamer discards changes from before the snapshot.
        """
        return self.mapped.mapping.rule.copy_where if self.method.is_first else None

    @property
    def kept_rows(self) -> Expression | None:
        """The condition of the rows that the retention of the target keeps, for every copy."""
        return self.mapped.mapping.kept_rows(self.kept_at)

    @property
    def awaits_orphans(self) -> bool:
        """Whether the copy must still find the rows that match the scope only at the target."""
        if self.is_disjoint or self.rows is None or not self.rows.conditions:
            return False  # with disjoint keys, such rows are mostly those of other tables
        return self.scope.is_to_point and not self.includes_orphans

    @property
    def filled(self) -> tuple[str, ...] | None:
        """The target columns to copy; None for all."""
        if self.scope.resync.columns is None or self.plan is None:
            return None
        present = {column.name: column for column in self.plan.columns}
        return tuple(
            name
            for name in self.scope.resync.columns
            if name in present and not present[name].target.identity_always
        )

    @property
    def only(self) -> frozenset[str] | None:
        """The names in `filled` plus the key columns that locate the rows."""
        if self.filled is None or self.plan is None:
            return None
        return frozenset(self.filled) | {column.name for column in self.plan.key}

    @property
    def names(self) -> list[str]:
        """The columns of the source's table."""
        return [column.name for column in self.relation.columns]

    @property
    def unchanged(self) -> dict[str, str]:
        """The source's columns that the target stores unchanged, with the target's names."""
        return unchanged_columns(self.relation.columns, self.mapped.mapping, self.target)

    @property
    def sid(self) -> str | None:
        """The SQL expression for the target's column `sid`; None if the copy writes no `sid`."""
        return None if self.plan is None else self.plan.sid

    @property
    def table(self) -> str:
        """The target table, quoted."""
        return quote_qualified(self.target.name.namespace, self.target.name.name)

    @property
    def destination(self) -> str:
        """The table that COPY fills, quoted."""
        return stage_name(self.mapped.relation_id) if self.is_staged else self.table

    @property
    def target_name(self) -> tuple[str, str]:
        """The schema and the name of the target table."""
        return self.target.name.namespace, self.target.name.name

    @property
    def fills(self) -> tuple[str, str]:
        """The schema and the name of the table that COPY fills."""
        return stage_place(self.mapped.relation_id) if self.is_staged else self.target_name

    @property
    def own_rows(self) -> str:
        """The condition for rows that this source has written."""
        if self.sid is None:
            return "true"
        return f'"sid" = {quote_literal(self.sid)}'


class Preparation:
    """Prepares target tables before copies of a source."""

    def __init__(
        self,
        source: SourceMapping,
        server: SourceServer,
        address: TargetAddress,
        changed: ChangedDefinitions | None,
        *,
        create_tables: bool,
    ) -> None:
        """*changed*: None unless the source captures changes of definitions."""
        self._source = source
        self._server = server
        self._address = address
        self._changed = changed
        self._create_tables = create_tables
        self._created: set[MappedRelation] = set()
        """Relations whose targets this object has created."""

    async def prepare(
        self, source: Connection, target: TargetConnection, pairs: Sequence[Pair]
    ) -> list[TableCopy]:
        """Check that both tables of each pair exist and fit; create missing target tables.

        Raises SyncError, TargetSchemaError and other errors with the next step.
        """
        await self._refuse_own_targets(target, [mapped.mapping for mapped, _ in pairs])
        facts: dict[MappedRelation, ExpressionFacts] = {}
        targets = [mapped.mapping.target for mapped, _ in pairs]
        former = {} if self._changed is None else await read_relations(target, targets)
        pairs = await self._prepare_targets(source, target, pairs)
        for mapped, relation in pairs:
            if not mapped.state.is_to_mark_synced:
                role = self._server.role
                for find in (find_unusable_namespace, find_unreadable):
                    for unreadable in find(relation, role):
                        raise unreadable
            facts[mapped] = (
                await describe_expressions(source, mapped.mapping, relation)
                if mapped.mapping.rule.expressions
                else ExpressionFacts({}, {})
            )
        tables = await read_relations(target, targets)
        missing = [pair for pair in pairs if pair[0].mapping.target not in tables]
        if missing and self._create_tables:
            await self._create(source, target, missing, facts)
        # Another source may have created a table after the query of `former`.
        created_meanwhile = [
            (mapped, relation)
            for mapped, relation in pairs
            if mapped.mapping.target not in former and mapped not in self._created
        ]
        if created_meanwhile:
            prepared = dict(await self._prepare_targets(source, target, created_meanwhile))
            pairs = [(mapped, prepared.get(mapped, relation)) for mapped, relation in pairs]
        if missing or created_meanwhile:
            tables = await read_relations(target, targets)
        if self._changed is None:
            await self._widen(target, pairs, tables)
        later = await find_in_sync_before(target, [mapped.relation_id for mapped, _ in pairs])
        copies: list[TableCopy] = []
        for mapped, relation in pairs:
            table = tables.get(mapped.mapping.target)
            if table is None:
                name = mapped.mapping.target
                raise missing_target(name, await read_kind(target, name))
            was_created = mapped in self._created
            copy = TableCopy(mapped, relation, table, was_created, mapped.state.scope)
            await _check_scope(source, copy, is_first=mapped.relation_id not in later)
            if not mapped.state.is_to_mark_synced:
                await self._check_fits(source, target, copy, facts[mapped])
            copy.scope = replace(copy.scope, resync=_resync_with_key(copy))
            copies.append(copy)
        if self._changed is not None and not pairs[0][0].state.is_to_mark_synced:
            await self._changed.store_definitions(target, pairs)
        return copies

    async def _refuse_own_targets(
        self, target: TargetConnection, mappings: Sequence[RelationMapping]
    ) -> None:
        """Refuse a table that is its own target. Raises TargetSchemaError."""
        own_targets = [mapping.source for mapping in mappings if mapping.source == mapping.target]
        if own_targets:
            (row,) = await target.fetch(TARGET_DATABASE_SQL)
            if TargetDatabase(**row).is_of(self._server):
                raise own_target_error(own_targets[0])

    async def _prepare_targets(
        self, source: Connection, target: TargetConnection, pairs: Sequence[Pair]
    ) -> Sequence[Pair]:
        """Give the target tables the definitions of the source; return *pairs* with present
        definitions.

        If all *pairs* are to be marked as in sync, their target tables stay unchanged.
        """
        if self._changed is None or pairs[0][0].state.is_to_mark_synced:
            return pairs
        return await self._changed.prepare_targets(source, target, pairs)

    async def _create(
        self,
        source: Connection,
        target: TargetConnection,
        pairs: Sequence[Pair],
        facts: dict[MappedRelation, ExpressionFacts],
    ) -> None:
        # Tables of a source may share a target, which gets the definition of the first table.
        creators: dict[RelationName, Pair] = {}
        for pair in pairs:
            creators.setdefault(pair[0].mapping.target, pair)
        oids = {column.type_oid for _, relation in pairs for column in relation.columns}
        types = await read_types(source, oids)
        new_tables = [
            NewTable(
                relation,
                mapped.mapping,
                facts[mapped].types,
                mapped.relation_id,
            )
            for mapped, relation in creators.values()
        ]
        created = await create_tables(target, new_tables, types)
        self._created |= {creators[name][0] for name in created}
        failpoint("sync.table_created")

    async def _widen(
        self,
        target: TargetConnection,
        pairs: Sequence[Pair],
        tables: dict[RelationName, TargetRelation],
    ) -> None:
        """Widen the *tables* that *pairs* share with other tables, before any plan of a copy.

        Tables of a source may share a target, so a later table may widen the target of an earlier
        table.
        """
        for mapped, relation in pairs:
            mapping = mapped.mapping
            table = tables.get(mapping.target)
            if mapped.state.is_to_mark_synced or mapping.sid is None:
                continue
            if table is not None and table.has_sid:
                tables[mapping.target] = await widen_shared_table(
                    self._address, target, table, relation, mapping
                )

    async def _check_fits(
        self,
        source: Connection,
        target: TargetConnection,
        copy: TableCopy,
        facts: ExpressionFacts,
    ) -> None:
        """Refuse definitions that the stream would refuse later, and add columns as the stream
        does.
        """
        mapped, relation = copy.mapped, copy.relation
        mapping, published = mapped.mapping, published_relation(relation)
        facts_now = mapped.source.with_definition(relation)
        types = {column.name: column.type for column in relation.columns}
        missing = missing_columns(published, mapping, copy.target)
        if missing and mapping.rule.on_column_added is OnColumnAdded.ADD:
            columns = columns_to_add(mapping, missing, types)
            ask = partial(read_named_types, source)
            await add_columns(self._address, mapping.target, columns, ask)
            copy.target = await read_relation(target, mapping.target) or copy.target
        elif missing and copy.scope.resync.force:
            log.warning(
                "this copy leaves out columns that the target lacks; the table stops at its next "
                "change unless you add, exclude or ignore them (on_column_added)",
                source=self._source.label,
                table=copy.name,
                columns=", ".join(name for _, name in missing),
            )
            mapping = _ignoring_columns(mapping)
        definition = relation.definition
        await refuse_unlike_types(target, definition, mapping, copy.target, self._source)
        copy.plan = make_plan(
            published,
            mapping,
            copy.target,
            primary_key=facts_now.primary_key,
            source_keys=facts_now.unique_keys,
            has_partial_key=facts_now.has_partial_key,
            type_names=types,
            input_types=facts.with_collations(types),
            computed_types=facts.types,
        )
        await refuse_shared_rows(target, copy.plan, self._source.label)
        if copy.plan.has_expressions:
            await confirm_expressions(target, copy.plan, facts.types)
        if (expiry := mapping.rule.expiry) is not None and not copy.was_created:
            # An operator may have made the table, without partitions for the rows of the copy.
            await create_partitions(target, mapping.target, expiry, copy.kept_at)

    async def _clear_beyond(
        self, target: TargetConnection, copy: TableCopy, begun: CopyRecord
    ) -> None:
        """Remove the rows of an earlier attempt beyond the rows of former chunks."""
        if copy.scope.chunks != begun.chunks:  # the outcome of a commit is unknown
            raise TargetFencedError(
                f'another chunk of "{copy.name}" was stored at the target meanwhile'
            )
        assert begun.chunks is not None
        await rest_triggers(target)
        names = _border_columns(copy, begun.chunks)
        if names is None or begun.attempt <= begun.chunk_attempt + 1:
            return  # with another definition, the copy begins again, and removes all rows
        tail = beyond(names, begun.chunks.types, begun.chunks.border)
        await target.execute(f"delete from {copy.target.rows} where {copy.own_rows} and {tail}")

    async def begin(self, target: TargetConnection, copies: Sequence[TableCopy]) -> list[TableCopy]:
        """Store ``copying`` and a new attempt, and choose the mode of each copy.

        Before a direct copy, the target table contains no row of this source. Several copies begin
        without a wait for a user's lock. Return the copies that did not begin because the target
        contains rows or partitions. Raises SyncError for rows that streamer did not write, and
        TargetContentionError.
        """
        is_alone = len(copies) == 1
        async with transaction(target):
            if is_alone and copies[0].scope.need is not Need.ROWS:
                await self._begin(target, copies)
                return []
            # Wait before locking the relations' rows, because these rows store the reasons of
            # waits.
            filling = await read_filling(target, [copy.mapped.relation_id for copy in copies])
            if is_alone:
                occupied = await read_occupied(target, copies)
                if occupied and filling and _may_truncate(copies[0]):
                    await target.execute(f"lock table {copies[0].table} in access exclusive mode")
                chosen = list(copies)
            else:
                # Locks on all partitions of many tables could exceed the server's lock table.
                chosen = [
                    copy
                    for copy in copies
                    if copy.mapped.relation_id not in filling
                    and not copy.target.is_partitioned
                    and copy.scope.need is Need.ROWS
                ]
                chosen = await _choose_empty(target, chosen)
            if chosen:
                await self._begin(target, chosen)
        return [copy for copy in copies if copy not in chosen]

    async def _begin(self, target: TargetConnection, copies: Sequence[TableCopy]) -> None:
        ids = [copy.mapped.relation_id for copy in copies]
        # A task of a dead process may still hold a part's row. The removal waits until the task
        # commits or ends, and the statements below see the committed rows. From here on no row of
        # a part exists, so no task starts to copy.
        await remove_parts(target, ids)
        need = copies[0].scope.need
        begun = await begin_copies(target, ids, need)
        await drop_stages(target, ids)
        for copy in copies:
            record = begun[copy.mapped.relation_id]
            copy.method = CopyMethod(record.attempt, is_first=not record.was_in_sync)
            if need is Need.PART:
                copy.method = replace(copy.method, mode=_choose_part_mode(copy, record.is_owner))
            elif copy.is_disjoint and need is Need.CHUNKS:
                raise shared_copy_error(copy.mapped)
            elif need is Need.CHUNKS:
                await self._clear_beyond(target, copy, record)
        if need is Need.ROWS:
            await self._begin_all_rows(target, copies, begun)

    async def _begin_all_rows(
        self, target: TargetConnection, copies: Sequence[TableCopy], begun: dict[int, CopyRecord]
    ) -> None:
        occupied = await read_occupied(target, copies)
        for copy in copies:
            record = begun[copy.mapped.relation_id]
            if copy.is_disjoint:
                # streamer cannot remove the rows of only this table, so the rows arrive in one
                # transaction.
                copy.method = replace(copy.method, mode=WriteMode.INSERT, owns_rows=False)
                await require_common_copy(target, copy.mapped)
                continue
            if copy not in occupied:
                continue
            if record.is_filling:
                await _clear(target, copy)
            else:
                mode = _choose_mode(copy, record.is_owner)
                owns_rows = record.is_owner or _may_remove(copy)
                copy.method = replace(copy.method, mode=mode, owns_rows=owns_rows)
        await fill_directly(
            target, [copy.mapped.relation_id for copy in copies if not copy.is_staged]
        )


def _resync_with_key(copy: TableCopy) -> Resync:
    """Return the resync of *copy*: of all columns if no key outside the copied columns finds rows.

    Raises SharedTableError for disjoint keys, which exclude such a copy of all columns.
    """
    columns, plan = copy.scope.resync.columns, copy.plan
    if columns is None or plan is None:
        return copy.scope.resync
    key = {column.name for column in plan.key}
    if plan.identity is Identity.KEY and key.isdisjoint(columns):
        return copy.scope.resync
    if copy.is_disjoint:
        raise shared_copy_error(copy.mapped)
    return replace(copy.scope.resync, columns=None)


def _border_columns(copy: TableCopy, chunks: ChunkedCopy) -> list[str] | None:
    """Return the SQL of the target's columns of the borders; None if these have changed.

    The application may rename a column between two chunks, or change the type. A new table may have
    the name of the target.
    """
    if chunks.target_oid != copy.target.oid:
        return None
    types = {column.name: column.type for column in copy.relation.columns}
    unchanged = copy.unchanged
    names = []
    for name, kind in zip(chunks.columns, chunks.types, strict=True):
        if types.get(name) != kind or name not in unchanged:
            return None
        names.append(in_bytes(quote_identifier(unchanged[name]), kind))
    return names


async def _check_scope(source: Connection, copy: TableCopy, *, is_first: bool) -> None:
    """Check the conditions of a copy as the conditions of `filter` are checked. Raises
    MappingError.
    """
    scope, mapping = copy.scope.resync.scope, copy.mapped.mapping
    if scope is not None:
        for condition in check_conditions(scope, copy.unchanged, mapping):
            await describe_condition(source, mapping, copy.relation, condition, "the condition")
    where = mapping.rule.copy_where
    if where is not None and is_first and not copy.scope.is_to_point:
        check_copy_where(where, copy.unchanged, mapping)
        await describe_condition(source, mapping, copy.relation, where, "copy_where")


def _ignoring_columns(mapping: RelationMapping) -> RelationMapping:
    return replace(mapping, rule=replace(mapping.rule, on_column_added=OnColumnAdded.IGNORE))


def _may_remove(copy: TableCopy) -> bool:
    """Whether the copy may remove rows of this source that other programs wrote."""
    return copy.mapped.mapping.rule.truncate_target


def _choose_mode(copy: TableCopy, owns_rows: bool) -> WriteMode:
    mapping = copy.mapped.mapping
    if copy.filled is not None:
        return WriteMode.DIFFERENCE  # updates columns only
    if copy.is_disjoint:
        return WriteMode.KEEP  # a row that this source lacks may have come from another table
    if not owns_rows and not _may_remove(copy):
        if mapping.rule.initial is Initial.KEEP:
            return WriteMode.KEEP
        hint = Remedy.of(f"delete these rows at the target, {OCCUPIED_WORDS}")
        if mapping.rule.initial is Initial.NONE:
            source = copy.mapped.source
            again = run("resync", copy.name, database=source.database, sid=source.sid)
            hint = Remedy.of("to replace these rows, run: ", again)
        raise occupied_error(mapping.target, hint)
    match mapping.type:
        case TableType.CLONE:
            is_diff = copy.scope.resync.mode is Mode.DIFF
            return WriteMode.DIFFERENCE if is_diff else WriteMode.REPLACE
        case TableType.APPEND:
            return WriteMode.KEEP if owns_rows else WriteMode.REPLACE
        case TableType.HISTORY:
            return WriteMode.DIFFERENCE if owns_rows else WriteMode.REPLACE


def _choose_part_mode(copy: TableCopy, owns_rows: bool) -> WriteMode:
    """Return how a partial copy writes its rows without changing rows outside the part."""
    mode = _choose_mode(copy, owns_rows)
    if mode is not WriteMode.REPLACE:
        return mode
    is_append = copy.mapped.mapping.type is TableType.APPEND
    return WriteMode.KEEP if is_append else WriteMode.DIFFERENCE


def swap_of(copy: TableCopy) -> RowSwap:
    """Return the swap of *copy*, which moves staged rows into the target table."""
    plan = copy.plan
    assert plan is not None, "only relations that are marked as synced have no plan"
    is_history = copy.mapped.mapping.type is TableType.HISTORY
    # If keys are not unique, the swap deletes surplus rows, which no key identifies. A history
    # table has one open version of each key.
    is_keyed = plan.key_is_indexed or is_history or copy.method.mode is WriteMode.KEEP
    is_keyed = is_keyed or copy.filled is not None or plan.marks
    key = plan.key if plan.identity is Identity.KEY and is_keyed else ()
    within = "true"
    if copy.rows is not None:
        conditions = check_conditions(copy.rows, copy.unchanged, copy.mapped.mapping)
        within = target_condition(copy.rows, conditions, copy.unchanged)
        if not key and plan.identity is Identity.KEY:
            within = f"({within} or {_is_staged(copy, plan)})"
    return RowSwap(
        table=copy.table,
        rows=copy.target.rows,
        stage=copy.destination,
        columns=copy.columns,
        key=tuple((column.name, column.target.equality) for column in key),
        fixed=frozenset(c.name for c in copy.target.columns.values() if c.identity_always),
        sid=copy.sid,
        history=plan.history if is_history else None,
        at=copy.snapshot.source_time,
        scope=within,
        fills=copy.filled,
        stamps=frozenset(name for _, name in copy.mapped.mapping.rule.metadata),
        mark=_mark_of(copy),
    )


def _mark_of(copy: TableCopy) -> tuple[str, str] | None:
    """Return how to mark a row that the source no longer has, as of the snapshot."""
    rule = copy.mapped.mapping.rule
    if rule.deleted_at is None:
        return None
    at = f"{quote_literal(copy.snapshot.source_time)}::timestamptz"
    values = {
        MetadataKind.COMMITTED_AT: at,
        MetadataKind.SYNCED_AT: "pg_catalog.clock_timestamp()",
        MetadataKind.LSN: f"{quote_literal(str(copy.consistent_point))}::pg_lsn",
        MetadataKind.OPERATION: "'delete'",
        MetadataKind.DELETED_AT: at,
    }
    assignments = ", ".join(
        f"{quote_identifier(name)} = {values[kind]}" for kind, name in rule.metadata
    )
    return quote_identifier(rule.deleted_at), assignments


def _is_staged(copy: TableCopy, plan: ApplyPlan) -> str:
    """Return the condition for rows of the target whose key is in the staging table."""
    condition = " and ".join(
        f"t.{quote_identifier(c.name)} {c.target.equality} s.{quote_identifier(c.name)}"
        for c in plan.key
    )
    return f"exists (select from {copy.destination} s where {condition})"


async def read_occupied(target: TargetConnection, copies: Sequence[TableCopy]) -> set[TableCopy]:
    """Return the copies whose target table holds rows of this source."""
    looks = " union all ".join(
        f"select {number} as number"
        f" where exists (select from {copy.target.rows} where {copy.own_rows})"
        for number, copy in enumerate(copies)
    )
    return {copies[row["number"]] for row in await target.fetch(looks)}


async def _choose_empty(target: TargetConnection, copies: list[TableCopy]) -> list[TableCopy]:
    """Lock the targets for reading, and return the copies whose target contains no rows of this
    source.

    Raises TargetContentionError at once: a session that holds such a lock and waits for a further
    lock could deadlock with a user's statement.
    """
    if not copies:
        return []
    tables = ", ".join(copy.table for copy in copies)
    await target.execute(f"lock table {tables} in access share mode nowait")
    occupied = await read_occupied(target, copies)
    return [copy for copy in copies if copy not in occupied]


def _may_truncate(copy: TableCopy) -> bool:
    """Whether all rows of the table are this source's, and no foreign key refers to the table."""
    return copy.sid is None and not copy.is_disjoint and not copy.target.is_referenced


async def _clear(target: TargetConnection, copy: TableCopy) -> None:
    """Remove the rows of this source that an unfinished copy has written."""
    if _may_truncate(copy):
        await target.execute(f"truncate {copy.target.rows}")
    else:
        await rest_triggers(target)
        await target.execute(f"delete from {copy.target.rows} where {copy.own_rows}")


async def store_parts(target: TargetConnection, copies: list[TableCopy]) -> None:
    """Store the parts of *copies* in the ledger."""
    parts = [part for copy in copies for part in copy.parts]
    whole = [copy for copy in copies if not copy.scope.is_to_point]
    async with transaction(target):
        await set_row_estimates(
            target, {copy.mapped.relation_id: copy.relation.row_count_estimate for copy in whole}
        )
        await add_parts(target, parts)
