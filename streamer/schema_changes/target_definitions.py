"""The definitions of a copied table besides columns: planned, and created at the target.

The round reads the source's definitions after the snapshot, and stores the statements in the
bookkeeping (`plan_definitions`). Only the copy writes to a table that it fills directly. So the
definitions of such a table, except foreign keys, are created before the switch to streaming. All
remaining definitions are created beside the stream, without long locks (`make_online`): indexes
concurrently, foreign keys NOT VALID at first.

A definition that the target refuses stops no table: the reason and the SQL stay in the bookkeeping.
Each attempt first checks for the parts of an earlier attempt. An interrupted build leaves an
invalid index, which the next attempt drops.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.deferred_indexes import has_primary_key
from streamer.bookkeeping.planned_definitions import (
    DefinitionRecord,
    forget_unwanted,
    give_up,
    is_pending,
    is_remade,
    read_given_up,
    read_pending,
    read_reference,
    read_taken,
    read_unwanted,
    set_failed,
    set_made,
    store_definitions,
)
from streamer.bookkeeping.relation_definitions import has_other_streams
from streamer.bookkeeping.relation_records import read_created
from streamer.control.table_state import CopyScope
from streamer.errors.error_classes import (
    MappingError,
    Retry,
    StreamerError,
    TargetContentionError,
    TargetSchemaError,
)
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping, SourceMapping, resolve_new
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.postgres.session_settings import INDEX_MEMORY_MB, memory_sql
from streamer.schema.planned_definition import ObjectKind, Places, TargetLimits, TargetPlace
from streamer.schema.render_definitions import Renderer
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.read_definitions import read_at_source, read_places
from streamer.source.catalog import SourceRelation, read_relation_names
from streamer.source.connection import Connection
from streamer.target.connection import TargetConnection, may_replace_role, transaction
from streamer.target.foreign_functions import refuse_in_trial
from streamer.util.failpoints import failpoint

log = structlog.get_logger()

LOCK_SECONDS: Final = 30
"""How long a concurrent build waits for transactions that use its table."""
QUEUED_SECONDS: Final = 2
"""How long a statement waits for a strong lock, behind which sessions queue."""
FOREIGN_KEY_ATTEMPTS: Final = 30
"""Maximum attempts to create a foreign key. Tables stream independently, so a referencing row may
reach the target before the referenced row.
"""
LOCKED_BYTES_MAX: Final = 64 * 1024 * 1024
"""A larger table in use gets no index whose build locks the table."""

BUILD_LOCK: Final = 0x646566696E65  # "define"
"""The advisory lock of the session that creates definitions."""
_ENOUGH_MEMORY_SQL: Final = memory_sql("maintenance_work_mem", INDEX_MEMORY_MB, is_local=False)

_FACTS_SQL: Final = """
select (select i.indisvalid and i.indisready
          from pg_catalog.pg_class x join pg_catalog.pg_index i on i.indexrelid = x.oid
         where x.relnamespace = c.relnamespace and x.relname = $3 and i.indrelid = c.oid)
         as index_is_valid,
       exists (select from pg_catalog.pg_constraint k
                where k.conrelid = c.oid and k.conname = $3) as has_constraint,
       exists (select from pg_catalog.pg_constraint k
                where k.conrelid = c.oid and k.conname = $3 and not k.convalidated)
         as is_unvalidated,
       exists (select from pg_catalog.pg_attribute a
                where a.attrelid = c.oid and a.attname = $3
                  and (a.atthasdef or a.attidentity <> '')) as has_default,
       exists (select from pg_catalog.pg_attribute a
                where a.attrelid = c.oid and a.attname = $3 and a.attnotnull) as is_not_null,
       exists (select from pg_catalog.pg_statistic_ext s
                where s.stxrelid = c.oid and s.stxname = $3) as has_statistics,
       (select pg_catalog.sum(pg_catalog.pg_table_size(p.oid))::int8
          from (select c.oid union
                select relid from pg_catalog.pg_partition_tree(c.oid)) p (oid)) as size_bytes
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2
"""
# The stream sets all other defaults in order.
_MADE_DEFAULT_SQL: Final = """
select case when a.attidentity <> '' then 'identity'
            when pg_catalog.pg_get_expr(d.adbin, d.adrelid) like 'nextval(%' then 'default' end
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_attribute a on a.attrelid = c.oid and not a.attisdropped
left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where n.nspname = $1 and c.relname = $2 and a.attname = $3
"""


# ---- planning ----------------------------------------------------------------------------------


class TableWithDefinitions(Protocol):
    """A table under copy, with the facts that its definitions depend on."""

    mapped: MappedRelation
    relation: SourceRelation
    target: TargetRelation
    scope: CopyScope


async def plan_definitions(
    source: SourceMapping,
    target_namespace: str,
    plain: Connection,
    target: TargetConnection,
    copies: Sequence[TableWithDefinitions],
) -> None:
    """Store the definitions that the tables of *copies* are to get, if streamer created the table.

    Raises SourceError, TargetError.
    """
    # A table that gets only some rows or columns receives its definitions from the stream.
    eligible = [
        copy
        for copy in copies
        if copy.mapped.mapping.rule.includes_definitions and not copy.scope.resync.is_partial
    ]
    if not eligible:
        return
    created = await read_created(target, [copy.mapped.mapping.target for copy in eligible])
    eligible = [copy for copy in eligible if copy.mapped.mapping.target in created]
    definitions = await read_at_source(plain, [copy.relation.oid for copy in eligible])
    names = {name for definition in definitions.values() for name in definition.referenced}
    places = await _places(source, target_namespace, plain, target, names)
    limits = TargetLimits(target.server_version, acts=not await may_replace_role(target))
    for copy in eligible:
        definition = definitions.get(copy.relation.oid)
        if definition is None:
            continue
        mapping = copy.mapped.mapping
        place = TargetPlace.at(mapping, copy.target)
        names_to_use = [*definition.all_indexes]
        names_to_use += [c.sequence.name for c in definition.columns if c.sequence is not None]
        taken_names = await read_taken(target, mapping.target, names_to_use)
        renderer = Renderer(definition, place, places, taken_names)
        planned = renderer.plan(mapping.rule.create)
        # The source may have added the key after the creation of the target.
        if not await has_primary_key(target, mapping.target):
            planned += renderer.primary_key()
        planned = [limits.apply(plan) for plan in planned]
        await store_definitions(target, copy.mapped.relation_id, planned)
    failpoint("definitions.planned")


async def _places(
    source: SourceMapping,
    target_namespace: str,
    plain: Connection,
    target: TargetConnection,
    names: set[RelationName],
) -> Places:
    """Return the targets of the tables that foreign keys refer to."""
    mappings: list[RelationMapping] = []
    if names:
        present = await read_relation_names(plain, source)
        rules = tuple(
            rule
            for rule in source.rules
            if rule.pattern.is_pattern
            or RelationName(rule.pattern.namespace, rule.pattern.name) in present
        )
        try:
            ruled = replace(source, rules=rules)
            mappings, _ = resolve_new(ruled, names, present, target_namespace)
        except MappingError as exc:  # the join of the table reports the error
            log.warning("omitting foreign keys", source=source.label, error=exc.message)
    return await read_places(target, [m for m in mappings if m.source in names])


# ---- making ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DefinitionFacts:
    """The parts of a definition that the target contains. ``index_is_valid``: None if the index is
    missing.
    """

    index_is_valid: bool | None
    has_constraint: bool
    is_unvalidated: bool
    has_default: bool
    is_not_null: bool
    has_statistics: bool
    size_bytes: int

    def shows(self, kind: ObjectKind) -> bool:
        """Whether the target contains the definition; False for a kind that these facts do not
        show.
        """
        match kind:
            case ObjectKind.INDEX:
                return bool(self.index_is_valid)
            case ObjectKind.DEFAULT:
                return self.has_default
            case ObjectKind.NOT_NULL:
                return self.is_not_null
            case ObjectKind.EXTENDED_STATISTICS:
                return self.has_statistics
            case _:
                return kind in _CONSTRAINTS and self.has_constraint


_CONSTRAINTS: Final = frozenset(
    {ObjectKind.UNIQUE, ObjectKind.EXCLUSION, ObjectKind.CHECK, ObjectKind.FOREIGN_KEY}
)
_KINDS_WITH_EXPRESSIONS: Final = frozenset(
    {
        *(ObjectKind.INDEX, ObjectKind.UNIQUE, ObjectKind.EXCLUSION, ObjectKind.CHECK),
        *(ObjectKind.DEFAULT, ObjectKind.EXTENDED_STATISTICS),
    }
)
_BUILT: Final = frozenset({ObjectKind.INDEX, ObjectKind.EXCLUSION, ObjectKind.UNIQUE})


def remaining_statements(
    record: DefinitionRecord, facts: DefinitionFacts, *, online: bool
) -> tuple[str, ...]:
    """Return the statements of *record* to run. All but the first may run twice. Pure."""
    statements = record.online if online else record.statements
    builds_index = online and record.kind in _CONSTRAINTS and record.index is not None
    if facts.shows(record.kind) and record.kind is not ObjectKind.NOT_NULL:
        if record.kind is ObjectKind.DEFAULT:
            # An earlier plan may have created the sequence before a column owned the sequence.
            return tuple(sql for sql in record.statements if sql.startswith("alter sequence "))
        return statements[2 if builds_index else 1 :]
    return statements[1:] if builds_index and facts.index_is_valid else statements


def around_table(record: DefinitionRecord) -> tuple[str, str] | None:
    """Return the parts of the first statement of *record* before and after the table's name.

    None without an expression of the source. Pure.
    """
    if record.kind not in _KINDS_WITH_EXPRESSIONS:
        return None
    statement = record.statements[0]
    table = quote_qualified(record.target.namespace, record.target.name)
    name = quote_identifier(record.name)
    heads = ("alter table ", f"create index {name} on ", f"create unique index {name} on ")
    for head in heads:
        if statement.startswith(f"{head}{table} "):
            return head, statement[len(head) + len(table) :]
    if statement.endswith(f" from {table}"):
        return statement.removesuffix(table), ""
    return None  # a sequence of the column, whose statements streamer writes


async def make_before_switch(target: TargetConnection, relation_id: int) -> None:
    """Create the definitions of a relation, except foreign keys, if only the copy writes the table.

    Raises TargetError if the target is lost; a refused definition stays in the bookkeeping.
    """
    records = await read_pending(target, relation_id)
    if not records or await has_other_streams(target, relation_id):
        return
    await target.execute(f"set lock_timeout = '{QUEUED_SECONDS}s'")
    await target.fetch(_ENOUGH_MEMORY_SQL)
    try:
        for record in records:
            await _attempt(target, record, online=False)
    finally:
        if not target.is_closed:
            # RESET would restore the limit of the role or the database, but the caller works
            # without a limit.
            await target.execute("set lock_timeout = 0; reset maintenance_work_mem")


async def make_online(target: TargetConnection) -> int:
    """Create the definitions of ready tables, beside the stream; return the number of definitions.

    Raises TargetError, and TargetContentionError while a second process creates definitions.
    """
    unwanted, records = await read_unwanted(target), await read_pending(target)
    if not records and not unwanted:
        return 0
    # The session owns the lock, so the lock stays while a backend still builds after the death of
    # its client.
    if not await target.fetch_value("select pg_catalog.pg_try_advisory_lock($1)", BUILD_LOCK):
        raise TargetContentionError("target: another process creates definitions")
    await target.fetch(_ENOUGH_MEMORY_SQL)
    for record in unwanted:
        await _remove(target, record)
    for record in records:
        # The stream may have dropped or changed the definition since the query above.
        if await is_pending(target, record):
            await _attempt(target, record, online=True)
    return len(records)


async def mark_made(target: TargetConnection) -> None:
    """Mark failed definitions as made once an operator has made them."""
    for record in await read_given_up(target):
        facts = await _read_facts(target, record)
        if facts is not None and facts.shows(record.kind) and not facts.is_unvalidated:
            await set_made(target, record)


async def _remove(target: TargetConnection, record: DefinitionRecord) -> None:
    """Remove an object that the source dropped while a session may have created it.

    The caller's lock excludes that session. An object of a different plan stays.
    """
    place = record.target
    if await is_remade(target, record):
        await forget_unwanted(target, record.id)
        return
    quoted = quote_identifier(record.name)
    table = quote_qualified(place.namespace, place.name)
    try:
        if record.kind is ObjectKind.DEFAULT:
            made = await target.fetch_value(
                _MADE_DEFAULT_SQL, place.namespace, place.name, record.name
            )
            if made is not None:
                await target.execute(f"set lock_timeout = '{QUEUED_SECONDS}s'")
                await target.execute(f"alter table {table} alter column {quoted} drop {made}")
        if record.kind in _CONSTRAINTS:
            await target.execute(f"set lock_timeout = '{QUEUED_SECONDS}s'")
            await target.execute(f"alter table {table} drop constraint if exists {quoted}")
        if record.index is not None:
            await target.execute(f"set lock_timeout = '{LOCK_SECONDS}s'")
            index = quote_qualified(place.namespace, record.index)
            await target.execute(f"drop index concurrently if exists {index}")
    except StreamerError as exc:
        if target.is_closed:
            raise
        log.warning(
            "the target still has a definition that was dropped at the source",
            table=str(place),
            kind=record.kind.value,
            name=record.name,
            error=exc.message,
        )
        return  # the next check tries again
    await forget_unwanted(target, record.id)


async def _attempt(target: TargetConnection, record: DefinitionRecord, *, online: bool) -> None:
    is_reference = record.kind is ObjectKind.FOREIGN_KEY
    former = await read_reference(target, record) if is_reference else None
    try:
        await _make(target, record, online=online)
    except StreamerError as exc:
        if target.is_closed:
            raise
        is_lag = former is not None and former.may_succeed_later(
            await read_reference(target, record), exc
        )
        is_final = exc.retry is not Retry.TIMED and not (
            is_lag and record.attempts + 1 < FOREIGN_KEY_ATTEMPTS
        )
        if not is_final:
            await set_failed(target, record, exc.message)
        else:
            statements = await _operator_steps(target, record)
            await give_up(target, record, exc.message, statements)
            log.warning(
                "the target refuses a definition; the table continues without the definition",
                table=str(record.target),
                kind=record.kind.value,
                name=record.name,
                error=exc.message,
                sql="; ".join(statements),
            )
    else:
        await set_made(target, record)
        log.info(
            "created a definition at the target",
            table=str(record.target),
            kind=record.kind.value,
            name=record.name,
        )


async def _operator_steps(target: TargetConnection, record: DefinitionRecord) -> tuple[str, ...]:
    """Return the statements for the missing parts of *record*."""
    try:
        facts = await _clear(target, record)
    except StreamerError:
        if target.is_closed:
            raise
        return record.online
    return record.online if facts is None else remaining_statements(record, facts, online=True)


async def _clear(target: TargetConnection, record: DefinitionRecord) -> DefinitionFacts | None:
    """Drop an invalid index of *record*; return its facts, or None if the table is gone."""
    facts = await _read_facts(target, record)
    if facts is not None and facts.index_is_valid is False and record.index is not None:
        quoted = quote_qualified(record.target.namespace, record.index)
        await target.execute(f"set lock_timeout = '{LOCK_SECONDS}s'")
        await target.execute(f"drop index concurrently if exists {quoted}")
    return facts


async def _read_facts(target: TargetConnection, record: DefinitionRecord) -> DefinitionFacts | None:
    place = record.target
    rows = await target.fetch(_FACTS_SQL, place.namespace, place.name, record.name)
    return DefinitionFacts(**rows[0]) if rows else None


async def _make(target: TargetConnection, record: DefinitionRecord, *, online: bool) -> None:
    place, facts = record.target, await _clear(target, record)
    if facts is None:
        return  # dropped meanwhile
    statements = remaining_statements(record, facts, online=online)
    is_new = bool(statements) and statements[0] in (record.statements[0], record.online[0])
    if is_new and (parts := around_table(record)) is not None:
        table = quote_qualified(place.namespace, place.name)
        await refuse_in_trial(target, table, *parts)
    failpoint("definitions.before_make")
    if not online:
        async with transaction(target):
            for statement in statements:
                await target.execute(statement)
        return
    is_locking = record.kind in _BUILT and record.index is None
    if is_locking and len(statements) == len(record.online) and facts.size_bytes > LOCKED_BYTES_MAX:
        raise TargetSchemaError(
            f'target table "{place}" is in use, and building "{record.name}" locks the table'
        )
    for number, statement in enumerate(statements):
        is_concurrent = record.index is not None and statement == record.online[0]
        seconds = LOCK_SECONDS if is_concurrent else QUEUED_SECONDS
        await target.execute(f"set lock_timeout = '{seconds}s'")
        await target.execute(statement)
        if number == 0:
            failpoint("definitions.part_made")
