"""Plans for relations, made from the target's catalogs at the first change of a definition."""

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Final, TypeVar

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.binary_transfer import binary_obstacle
from streamer.apply.rows.change_as_json import Definition
from streamer.apply.rows.check_expressions import confirm_expressions
from streamer.apply.rows.hashed_columns import check_input_types
from streamer.apply.rows.make_plan import judge_added, make_plan, missing_columns, missing_error
from streamer.apply.rows.refuse_shared_rows import refuse_shared_rows
from streamer.bookkeeping.deferred_indexes import has_deferred
from streamer.bookkeeping.relation_columns import read_source_columns, store_source_columns
from streamer.bookkeeping.relation_definitions import read_definition
from streamer.bookkeeping.relation_records import read_targets
from streamer.control.resync_options import after_loss
from streamer.decode.former_labels import FormerLabels, Labels
from streamer.decode.pgoutput import Relation, next_number
from streamer.errors.error_classes import (
    ColumnsRenamedError,
    Retry,
    StreamerError,
    TargetError,
    TargetSchemaError,
    TransportError,
)
from streamer.errors.remedies import Remedy, at_target, run
from streamer.mapping.expressions import ExpressionFacts
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import OnColumnAdded, TableType
from streamer.mapping.rules import RelationMapping, SourceLabel
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.schema.definition_message import DefinitionMessage
from streamer.schema.desired_columns import columns_to_add
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.schema.source_definition import DefinedColumn, SourceDefinition
from streamer.schema.target_relation import TargetRelation
from streamer.source.catalog import SourceRelation
from streamer.target.add_columns import (
    ReadTypeNames,
    add_columns,
    read_own_type_names,
    type_keys,
)
from streamer.target.catalog import read_relations
from streamer.target.connection import TargetAddress, TargetConnection, may_replace_role
from streamer.target.fencing_token import FencingToken
from streamer.target.missing_grants import Grants
from streamer.target.persistent_connection import PersistentConnection
from streamer.util.batched import Batched
from streamer.util.containment import apart, contained

log = structlog.get_logger()

ReadSourceRelations = Callable[
    [str, str | None, Sequence[RelationName]], Awaitable[dict[RelationName, SourceRelation]]
]
"""Reads the definitions of existing tables at the source with a database and sid."""

ReadPresent = Callable[[str, str | None, RelationName], Awaitable[DefinitionMessage | None]]
"""Reads the present definition of a table with capture at the source with a database and sid."""

ReadTypesOf = Callable[[str, str | None, Sequence[str]], Awaitable[Sequence[DefinedType]]]
"""Reads types by name at the source with a database and sid."""

ReadExpressions = Callable[[str, str | None, RelationMapping], Awaitable[ExpressionFacts]]
"""Checks a rule's expressions at the source with a database and sid."""


K = TypeVar("K")
V = TypeVar("V")

_ACTIONS_SQL: Final = """
select k.conname::text as constraint, n.nspname::text as namespace, c.relname::text as name
from pg_catalog.pg_constraint k
join pg_catalog.pg_class c on c.oid = k.conrelid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where k.confrelid = $1::int8::oid and k.contype = 'f' and k.conrelid <> k.confrelid
  and (k.confdeltype in ('c', 'n', 'd') or k.confupdtype in ('c', 'n', 'd'))
order by k.conname
"""


class Planner:
    """Makes plans and keeps the newest plan of each relation, for all workers and drainers."""

    def __init__(
        self,
        address: TargetAddress,
        read_type_names: ReadTypeNames,
        read_types: ReadTypesOf,
        read_expressions: ReadExpressions,
        read_source_relations: ReadSourceRelations,
        read_present: ReadPresent,
    ) -> None:
        self._read_source_relations = read_source_relations
        self._read_present = read_present
        self._address = address
        self._read_type_names = read_type_names
        self._read_types = read_types
        self._read_expressions = read_expressions
        self._connection = PersistentConnection(address, "streamer planner")
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._transaction: TargetConnection | None = None
        self._batch_reads()

    def _batch_reads(self) -> None:
        self._definitions: dict[str, Batched[RelationName, SourceRelation]] = {}
        self._targets = Batched(self._read_targets)
        self._source_columns = Batched(self._read_source_columns)

    def in_transaction(self, connection: TargetConnection) -> "Planner":
        """Return a planner that reads the target in the open transaction of *connection*, with
        uncommitted definitions.
        """
        planner = copy.copy(self)
        planner._transaction = connection
        planner._lock = asyncio.Lock()
        planner._batch_reads()
        return planner

    async def plans(
        self,
        lane_transaction: LaneTransaction,
        ahead: Iterable[LaneTransaction] = (),
        earlier: Iterable[MappedRelation] = (),
    ) -> list[ApplyPlan | None]:
        """Return a plan for each of a lane transaction's changes; None for changes that the target
        already contains.

        *ahead*: the next transactions. Plan their relations, too, because a description of many
        relations costs the servers little more. *earlier*: relations that earlier pieces of the
        source transaction change. May add columns to the target, which waits for sessions that
        write to the table. Raises TargetSchemaError if the target does not fit, TransportError if
        only binary does not fit, TargetContentionError, TargetConnectionError.
        """
        unplanned = _find_unplanned([lane_transaction, *ahead])
        if len(unplanned) > 1:  # an error appears again when the transaction is due
            await self._make_all(unplanned)
        plans: list[ApplyPlan | None] = []
        changed = set(earlier)
        for mapped, changes in lane_transaction.changes:
            plan = mapped.plan_for(changes.relation)
            if plan is None and not mapped.has(lane_transaction.transaction):
                with contained(f'planning for "{mapped.mapping.source}"'):
                    plan = await self._make(mapped, changes.relation, is_changed=mapped in changed)
            plans.append(plan)
            changed.add(mapped)
        return plans

    async def renew_plans(self, transactions: Iterable[LaneTransaction]) -> None:
        """Make new plans for the relations of *transactions*, concurrently.

        Raises the StreamerError of a server that does not answer now. A permanent error appears
        again when the transaction is due.
        """
        transactions = list(transactions)
        for lane_transaction in transactions:
            self.invalidate(lane_transaction)
        for error in await self._make_all(_find_unplanned(transactions)):
            if error is not None and error.retry is Retry.TIMED:
                raise error

    async def _make_all(
        self, relations: Mapping[MappedRelation, Relation]
    ) -> list[StreamerError | None]:
        """Plan *relations* concurrently, with shared queries; return the error of each."""
        return await asyncio.gather(
            *(self._try_make(mapped, relation) for mapped, relation in relations.items())
        )

    async def _try_make(self, mapped: MappedRelation, relation: Relation) -> StreamerError | None:
        try:
            with contained(f'planning for "{mapped.mapping.source}"'):
                await self._make(mapped, relation)
        except StreamerError as exc:
            return exc
        return None

    async def _read_targets(
        self, keys: list[tuple[FencingToken, RelationName]]
    ) -> dict[tuple[FencingToken, RelationName], TargetRelation]:
        targets: dict[tuple[FencingToken, RelationName], TargetRelation] = {}
        for fence, names in _grouped(keys).items():
            async with self._target(fence) as connection:
                relations = await read_relations(connection, names)
            targets |= {(fence, name): target for name, target in relations.items()}
        return targets

    async def _read_source_columns(
        self, keys: list[tuple[FencingToken, int]]
    ) -> dict[tuple[FencingToken, int], dict[str, int]]:
        columns: dict[tuple[FencingToken, int], dict[str, int]] = {}
        for fence, relation_ids in _grouped(keys).items():
            async with self._target(fence) as connection:
                stored = await read_source_columns(connection, relation_ids)
            columns |= {(fence, number): names for number, names in stored.items()}
        return columns

    @asynccontextmanager
    async def _target(self, fence: FencingToken) -> AsyncIterator[TargetConnection]:
        """Yield the connection to the server of *fence*."""
        if self._transaction is not None:
            async with self._lock:
                yield self._transaction
            return
        async with self._lock:
            connection = await self._connection.get(fence)
            try:
                yield connection
            except TargetError:
                connection.terminate()
                raise

    async def _read_target(self, mapped: MappedRelation) -> TargetRelation | None:
        return await self._targets.get((mapped.source.fence, mapped.mapping.target))

    async def _read_definition(self, mapped: MappedRelation) -> dict[str, DefinedColumn]:
        """Read the source's definition, store its keys in *mapped*, and return its columns."""
        facts = mapped.source
        name, source = mapped.mapping.source, _label(mapped)
        if source not in self._definitions:  # so that no source waits for a slow source
            ask = partial(self._read_source_relations, facts.database, facts.sid)
            self._definitions[source] = Batched(ask)
        definition = await self._definitions[source].get(name)
        if definition is not None and mapped.relid in (None, definition.oid):
            mapped.source = facts.with_definition(definition)
        return {} if definition is None else {c.name: c for c in definition.columns}

    async def _confirm(self, mapped: MappedRelation, relation: Relation) -> ApplyPlan | None:
        """Read the source's definition again; return the current plan if that fits *relation*."""
        facts, plan, number = mapped.source, mapped.plan, next_number()
        if plan is None:
            return None
        await self._read_definition(mapped)
        if plan is not mapped.plan or plan.relation != relation or mapped.source != facts:
            return None
        mapped.confirm(number)
        return plan

    async def _read_both(
        self, mapped: MappedRelation
    ) -> tuple[TargetRelation | None, dict[str, int] | None, dict[str, DefinedColumn]]:
        """Read the target's table, the columns of the last copy, and the source's definition."""

        async def read() -> tuple[
            TargetRelation | None, dict[str, int] | None, dict[str, DefinedColumn]
        ]:
            async with asyncio.TaskGroup() as group:
                columns = group.create_task(self._read_definition(mapped), name="definition")
                target = group.create_task(self._read_target(mapped), name="target")
                stored = group.create_task(
                    self._source_columns.get((mapped.source.fence, mapped.relation_id)),
                    name="columns of the last copy",
                )
            return target.result(), stored.result(), columns.result()

        try:
            return await apart(read(), "reading both sides")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _make(
        self, mapped: MappedRelation, relation: Relation, *, is_changed: bool = False
    ) -> ApplyPlan:
        """Make the plan of *relation*, and keep the plan.

        *is_changed*: the source transaction has changed rows under an earlier definition. streamer
        adds a new column at the target before these rows, so these rows lack the value that ADD
        COLUMN gave at the source.
        """
        mapped.check()
        if (confirmed := await self._confirm(mapped, relation)) is not None:
            return confirmed
        number = next_number()
        target, stored, columns = await self._read_both(mapped)
        types = mapped.source.types
        now = _changed_columns(mapped, relation, stored, columns)
        added_now: dict[str, str | None] = {}
        if target is not None and (missing := missing_columns(relation, mapped.mapping, target)):
            adds = mapped.mapping.rule.on_column_added is OnColumnAdded.ADD
            names = [name for name, _ in missing]
            types = await self._name_types(mapped, relation, names)
            changes = judge_added(names, stored or {}, now)
            if stored is not None and (lost := [name for name in names if stored.get(name, 0) > 0]):
                # A session dropped these columns at the target, so their replacements will lack
                # values.
                stored = stored | {name: -stored[name] for name in lost}
                async with self._target(mapped.source.fence) as connection:
                    await store_source_columns(connection, mapped.relation_id, stored)
            if not adds or any(change.before is not None for change in changes.values()):
                raise missing_error(mapped.mapping, target.name, missing, types, changes)
            if all(name in types for name in names):
                additions = columns_to_add(mapped.mapping, missing, types, changes)
                address = replace(self._address, fence=mapped.source.fence)
                ask = partial(self.describe_types, mapped)
                await add_columns(address, target.name, additions, ask)
                target = await self._read_target(mapped)
                if not is_changed:
                    added_now = {column.name: column.fill for column in additions}
        binary = bool(mapped.source.binary_types)
        facts = await self._describe(mapped)
        plan = await self._plan(mapped, relation, target, types, facts, binary=binary)
        former = _former_labels(mapped, relation) if not binary else None
        plan = replace(plan, conversion=mapped.source.conversion, former=former)
        if mapped.mapping.rule.hashes:
            await self._check_hashed_types(mapped, relation)
        if plan.binary:
            _check_binary(plan, mapped)
        if plan.has_expressions:
            async with self._target(mapped.source.fence) as connection:
                await confirm_expressions(connection, plan, facts.types)
        async with self._target(mapped.source.fence) as connection:
            await refuse_shared_rows(connection, plan, _label(mapped))
        await self._check_actions(mapped, plan)
        if not plan.key_is_indexed:
            async with self._target(mapped.source.fence) as connection:
                if await has_deferred(connection, plan.name):
                    plan = replace(plan, is_provisional=True)
        if stored is not None:
            await self._store_columns(mapped, plan, stored, now, added_now)
        if plan.mapping is mapped.mapping:  # otherwise a new rule arrived meanwhile
            mapped.set_plan(plan, number)
        return plan

    async def _check_hashed_types(self, mapped: MappedRelation, relation: Relation) -> None:
        """Refuse a changed type of a hash's input, because existing hashes use texts of the stored
        type. `check_hashes` has refused inputs of user-defined types.

        Raises MappingError.
        """
        inputs = [hashed.column for hashed in mapped.mapping.rule.hashes]
        async with self._target(mapped.source.fence) as connection:
            stored = await read_definition(connection, mapped.relation_id)
        if stored is not None:
            now = await self._name_types(mapped, relation, inputs)
            stored_types = {column.name: column.type for column in stored.columns}
            source = mapped.source
            table = str(mapped.mapping.source)
            resync = run(
                "resync",
                table,
                *after_loss([mapped.mapping.type]),
                database=source.database,
                sid=source.sid,
            )
            check_input_types(mapped.mapping, stored_types, now, resync)

    async def _store_columns(
        self,
        mapped: MappedRelation,
        plan: ApplyPlan,
        stored: dict[str, int],
        now: dict[str, DefinedColumn],
        added: dict[str, str | None],
    ) -> None:
        """Store the source's columns, and request a backfill of columns that existing rows lack.

        *added*: columns that this process just added to the target, with fill values.
        """
        columns = columns_to_store(plan, stored, now)
        backfilled = columns_to_backfill(plan, stored, now, added)
        if not backfilled and columns == stored:
            return
        async with self._target(mapped.source.fence) as connection:
            await store_source_columns(connection, mapped.relation_id, columns, backfilled)
        if backfilled:
            log.info(
                "backfilling columns of existing rows",
                source=_label(mapped),
                table=str(mapped.mapping.source),
                columns=", ".join(backfilled),
            )

    async def _check_actions(self, mapped: MappedRelation, plan: ApplyPlan) -> None:
        """Refuse a table whose deletes would change rows of another mapped table.

        Workers write tables in parallel, so such an action may delete rows that the source inserted
        again meanwhile, without an error.
        """
        if not plan.target.is_referenced or plan.type is TableType.HISTORY:
            return
        async with self._target(mapped.source.fence) as connection:
            rows = await connection.fetch(_ACTIONS_SQL, plan.target.oid)
            ours = await read_targets(connection)
            acting = [
                row for row in rows if str(RelationName(row["namespace"], row["name"])) in ours
            ]
            if not acting or await may_replace_role(connection):
                return
            name = await connection.fetch_value("select current_user::text")
            grant = Grants(name).to_replace_role(connection.server_version)
        constraint = acting[0]["constraint"]
        table = quote_qualified(acting[0]["namespace"], acting[0]["name"])
        raise TargetSchemaError(
            f'deleting rows of target table "{plan.mapping.target}" would change rows of {table}, '
            f'by the action of foreign key "{constraint}", because role "{name}" may not set '
            "session_replication_role",
            hint=Remedy.of(
                "have an administrator run at the target: ",
                at_target(grant),
                ", and restart streamer; or run at the target: ",
                at_target(f"alter table {table} drop constraint {quote_identifier(constraint)}"),
            ),
        )

    async def describe_types(
        self, mapped: MappedRelation, names: Sequence[str]
    ) -> Sequence[DefinedType]:
        """Return types of the source of *mapped* by name. Raises SourceError."""
        return await self._read_types(mapped.source.database, mapped.source.sid, names)

    async def describe_present(self, mapped: MappedRelation) -> SourceDefinition | None:
        """Return the present definition of the source's table. Raises SourceError."""
        source = mapped.source
        message = await self._read_present(source.database, source.sid, mapped.mapping.source)
        return None if message is None else message.definition

    async def describe_columns(
        self, mapped: MappedRelation, relations: Sequence[Relation]
    ) -> tuple[DefinitionMessage | None, list[dict[str, str | None]]]:
        """Return the source's present definition, and the columns of *relations* with the known
        type names. Raises StreamerError.
        """
        source, shown = mapped.source, []
        message = await self._read_present(source.database, source.sid, mapped.mapping.source)
        for relation in relations:
            names = [column.name for column in relation.columns]
            types = await self._name_types(mapped, relation, names)
            shown.append({name: types.get(name) for name in names})
        return message, shown

    async def plan_again(self, mapped: MappedRelation, definition: Definition) -> ApplyPlan:
        """Plan changes from quarantine, as text. Raises like `plans`.

        Leave out a column that the target lacks and the source no longer has.
        """
        target = await self._read_target(mapped)
        relation = definition.relation(mapped.mapping.source)
        if target is not None:
            missing = missing_columns(relation, mapped.mapping, target)
            dropped = frozenset(name for name, _ in missing if name not in mapped.source.types)
            relation = definition.relation(mapped.mapping.source, dropped)
        facts = await self._describe(mapped)
        types = mapped.source.types
        return await self._plan(mapped, relation, target, types, facts, binary=False)

    async def _plan(
        self,
        mapped: MappedRelation,
        relation: Relation,
        target: TargetRelation | None,
        types: Mapping[str, str],
        facts: ExpressionFacts,
        *,
        binary: bool,
    ) -> ApplyPlan:
        plan = make_plan(
            relation,
            mapped.mapping,
            target,
            primary_key=mapped.source.primary_key,
            source_keys=mapped.source.unique_keys,
            has_partial_key=mapped.source.has_partial_key,
            is_partitioned=mapped.source.is_partitioned,
            type_names=types,
            binary=binary,
            number=next(self._numbers),
            input_types=await self._input_types(mapped, relation, facts),
            computed_types=facts.types,
        )
        return replace(plan, outlives=True) if mapped.outlives else plan

    async def _describe(self, mapped: MappedRelation) -> ExpressionFacts:
        """Return the source's facts about the rule's expressions."""
        mapping = mapped.mapping
        if not mapping.rule.expressions:
            return ExpressionFacts({}, {})
        return await self._read_expressions(mapped.source.database, mapped.source.sid, mapping)

    async def _input_types(
        self, mapped: MappedRelation, relation: Relation, facts: ExpressionFacts
    ) -> dict[str, str]:
        """Return the types of the columns that expressions use, as in RELATION."""
        if not mapped.mapping.rule.expressions:
            return {}
        names = [column.name for column in relation.columns]
        inputs = mapped.mapping.expression_inputs(names)
        types = await self._name_types(mapped, relation, inputs)
        return facts.with_collations(types)

    async def _name_types(
        self, mapped: MappedRelation, relation: Relation, names: Sequence[str]
    ) -> dict[str, str]:
        """Return the names of the columns' types; omit types that exist at neither server.

        Only a type that is not built-in needs a query to the source. Raises StreamerError.
        """
        source = mapped.source
        keys = type_keys(relation, names)
        async with self._target(mapped.source.fence) as connection:
            type_names = await read_own_type_names(connection, list(keys.values()))
        if unknown := [key for key in keys.values() if key not in type_names]:
            type_names |= await self._read_type_names(source.database, source.sid, unknown)
        return {name: type_names[key] for name, key in keys.items() if key in type_names}

    @staticmethod
    def invalidate(lane_transaction: LaneTransaction) -> None:
        """Discard the plans of the transaction after the target refused one of the plans."""
        for mapped, _ in lane_transaction.changes:
            mapped.plan = None

    async def close(self) -> None:
        await self._connection.close()


def _find_unplanned(
    transactions: Iterable[LaneTransaction],
) -> dict[MappedRelation, Relation]:
    """Return the relations without a plan that change before the next definition change."""
    unplanned: dict[MappedRelation, Relation] = {}
    for lane_transaction in takewhile(
        lambda lane_transaction: not lane_transaction.redefines, transactions
    ):
        for mapped, changes in lane_transaction.changes:
            if mapped.plan is None and not mapped.has(lane_transaction.transaction):
                unplanned.setdefault(mapped, changes.relation)
    return unplanned


def _grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _check_binary(plan: ApplyPlan, mapped: MappedRelation) -> None:
    obstacle = binary_obstacle(
        plan.relation,
        plan.mapping,
        plan.target,
        types=mapped.source.binary_types,
        type_names=mapped.source.types,
    )
    if obstacle is not None:
        raise TransportError(obstacle)


def existing_plans(lane_transaction: LaneTransaction) -> list[ApplyPlan | None] | None:
    """Return the plans of a transaction; None unless the planner has made all of them."""
    plans: list[ApplyPlan | None] = []
    for mapped, changes in lane_transaction.changes:
        plan = mapped.plan_for(changes.relation)
        if plan is None and not mapped.has(lane_transaction.transaction):
            return None
        plans.append(plan)
    return plans


def _changed_columns(
    mapped: MappedRelation,
    relation: Relation,
    stored: dict[str, int] | None,
    present: dict[str, DefinedColumn],
) -> dict[str, DefinedColumn]:
    """Return the *present* columns if the columns of *relation* differ from the last copy.

    Raises ColumnsRenamedError.
    """
    names = [column.name for column in relation.columns]
    if stored is None or (stored.keys() >= set(names) and in_order(names, stored)):
        return {}
    if swapped := swapped_names(names, stored, present):
        source, table = mapped.source, str(mapped.mapping.source)
        listed = ", ".join(f'"{name}"' for name in swapped)
        options = after_loss([mapped.mapping.type])
        resync = run("resync", table, *options, database=source.database, sid=source.sid)
        raise ColumnsRenamedError(
            f'columns {listed} of table "{table}" swapped names at the source, so its '
            "changes may name the wrong columns",
            hint=Remedy.of("run: ", resync, "; with `ddl: capture`, streamer applies such changes"),
        )
    return present


def in_order(names: Sequence[str], stored: Mapping[str, int]) -> bool:
    """Return whether *names* has the *stored* columns in the order of column numbers. Pure.

    A number is negative if the target does not get the column.
    """
    numbers = [abs(stored[name]) for name in names if name in stored]
    return numbers == sorted(numbers)


def swapped_names(
    names: Sequence[str], stored: Mapping[str, int], now: Mapping[str, DefinedColumn]
) -> list[str]:
    """Return the columns of a message that may use the former name of another column. Pure.

    *names*: the columns of RELATION, in the order of column numbers, which no command changes. A
    column that was dropped and added again has a new number and comes last. A number under a
    different stored name is a rename. If a later rename restores the name, only the order shows
    that the message's values belong to different columns.
    """
    if in_order(names, stored):
        return []
    present = {name: now[name].number for name in names if name in now}
    former = {abs(number): name for name, number in stored.items()}
    renamed = [name for name, number in present.items() if former.get(number, name) != name]
    if renamed or in_order(names, present):
        return renamed
    common = [name for name in names if name in stored]
    ordered = sorted(common, key=lambda name: abs(stored[name]))
    return [name for name, in_place in zip(common, ordered, strict=True) if name != in_place]


def _former_labels(mapped: MappedRelation, relation: Relation) -> FormerLabels | None:
    """Return the former enum labels that rows of *relation* may have, if any."""
    by_kind: tuple[dict[int, Labels], dict[int, Labels]] = ({}, {})
    for number, column in enumerate(relation.columns):
        if column.name in mapped.former_labels:
            is_array, labels = mapped.former_labels[column.name]
            by_kind[is_array][number] = labels
    return FormerLabels(*by_kind) if any(by_kind) else None


def columns_to_store(
    plan: ApplyPlan, stored: Mapping[str, int], now: Mapping[str, DefinedColumn]
) -> dict[str, int]:
    """Return the columns to store; a number is negative if the target does not get the column.

    *now*: the source's present columns, if different from *stored*. Pure.
    """
    numbers = {name: abs(number) for name, number in stored.items() if name in now or not now}
    numbers = {name: column.number for name, column in now.items()} | numbers
    written = plan.written
    return {name: number if name in written else -number for name, number in numbers.items()}


def columns_to_backfill(
    plan: ApplyPlan,
    stored: Mapping[str, int],
    now: Mapping[str, DefinedColumn],
    added: Mapping[str, str | None],
) -> list[str]:
    """Return the names of target columns for which existing rows lack values.

    The source or the target has added such a column, or the mapping now includes the column. No
    change contains the values of existing rows. Leave out renamed columns, columns that *added* has
    filled, and new columns without a default. Pure.
    """
    numbers = {abs(number): name for name, number in stored.items()}
    lacking = []
    for name, target_name in plan.written.items():
        if name in stored:
            if stored[name] < 0:
                lacking.append(target_name)
        elif (column := now.get(name)) is not None and column.number not in numbers:
            has_values = column.may_hide_values or column.fill is not None
            if has_values and added.get(target_name) is None:
                lacking.append(target_name)
    return lacking


def _label(mapped: MappedRelation) -> str:
    return SourceLabel(mapped.source.database, mapped.source.sid)
