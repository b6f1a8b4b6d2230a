"""Makers of definitions with defaults for the facts that a test does not state."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from streamer.apply.lanes.lane import MappedRelation, RelationSource
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.make_plan import make_plan
from streamer.decode.pgoutput import Column, Relation
from streamer.mapping.relation_names import parse_name, parse_relation
from streamer.mapping.rule_options import OnColumnAdded, TableType, Transport
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.schema.source_definition import DefinedColumn
from streamer.schema.target_relation import TargetColumn, TargetRelation
from streamer.source.catalog import SourceRelation
from streamer.source.replica_identity import RelationIdentity, TableIdentity
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import Lsn

EQUALS = "operator(pg_catalog.=)"
NOWHERE = Secret("host=nowhere")


def relation(
    columns: Sequence[str],
    key: Iterable[str] = (),
    *,
    identity: str = "d",
    relid: int = 16385,
    name: str = "t",
) -> Relation:
    """A RELATION message; with identity FULL all columns are flagged, as PostgreSQL does."""
    keys = set(columns) if identity == "f" else set(key)
    defined = tuple(Column(column, 25, -1, column in keys) for column in columns)
    return Relation(relid, "public", name, identity, defined)


def target_column(
    name: str,
    type_name: str = "text",
    *,
    base_type: str | None = None,
    not_null: bool = False,
    has_default: bool = False,
    generated: bool = False,
    identity_always: bool = False,
) -> TargetColumn:
    return TargetColumn(
        name=name,
        type=type_name,
        base_type=base_type or type_name,
        equality=EQUALS,
        type_oid=25,
        type_facts="25 -1 100",
        not_null=not_null,
        has_default=has_default,
        generated=generated,
        identity_always=identity_always,
    )


def target_relation(
    columns: Sequence[str | TargetColumn],
    *,
    name: str = "public.t",
    unique_keys: Sequence[tuple[str, ...]] = (),
    is_referenced: bool = False,
    has_row_triggers: bool = False,
    leading_index_columns: Iterable[str] = (),
) -> TargetRelation:
    """A relation in the target's catalogs; columns of unique keys are NOT NULL."""
    in_keys = {column for key in unique_keys for column in key}
    made = [
        target_column(column, not_null=column in in_keys) if isinstance(column, str) else column
        for column in columns
    ]
    return TargetRelation(
        oid=20000,
        name=parse_name(name),
        is_partitioned=False,
        columns={column.name: column for column in made},
        primary_key=tuple(unique_keys[0]) if unique_keys else (),
        unique_keys=tuple(unique_keys),
        leading_index_columns=frozenset(leading_index_columns),
        has_row_triggers=has_row_triggers,
        is_referenced=is_referenced,
        is_writable=True,
        facts="p f f f {}",
    )


def table_rule(
    pattern: str = "public.t",
    *,
    target: str | None = None,
    table_type: TableType = TableType.CLONE,
    columns: dict[str, str] | None = None,
    exclude: Iterable[str] = (),
) -> TableRule:
    return TableRule(
        pattern=parse_relation(pattern, "public"),
        target=None if target is None else parse_relation(target, "public"),
        type=table_type,
        columns=None if columns is None else tuple(columns.items()),
        exclude=frozenset(exclude),
    )


def relation_mapping(
    *,
    source: str = "public.t",
    target: str = "public.t",
    table_type: TableType = TableType.CLONE,
    columns: dict[str, str] | None = None,
    exclude: Iterable[str] = (),
    on_column_added: OnColumnAdded = OnColumnAdded.STOP,
    sid: str | None = None,
) -> RelationMapping:
    rule = table_rule(source, table_type=table_type, columns=columns, exclude=exclude)
    rule = replace(rule, on_column_added=on_column_added)
    return RelationMapping(parse_name(source), parse_name(target), rule, sid)


def apply_plan(
    columns: Sequence[str],
    key: Sequence[str] = (),
    *,
    identity: str = "d",
    table_type: TableType = TableType.CLONE,
    binary: bool = False,
    sid: str | None = None,
    number: int = 0,
) -> ApplyPlan:
    """A plan for a target with the same columns, unique by *key*, and the sid *sid*, if any."""
    there: list[str | TargetColumn] = list(columns)
    if sid is not None:
        there.append(target_column("sid", not_null=True))
    if table_type is TableType.HISTORY:
        there += ["kvsz_start", "kvsz_end", "kvsz_deleted"]
    return make_plan(
        relation(columns, key, identity=identity),
        relation_mapping(table_type=table_type, sid=sid),
        target_relation(there, unique_keys=[tuple(key)] if key else []),
        source_keys=(tuple(key),) if key else (),
        binary=binary,
        number=number,
    )


def source_mapping(
    database: str = "shop",
    sid: str | None = None,
    rules: Iterable[TableRule] = (),
    *,
    streaming: bool = True,
    transport: Transport = Transport.TEXT,
    forward_origins: bool = False,
    url: Secret = NOWHERE,
) -> SourceMapping:
    return SourceMapping(
        database=database,
        sid=sid,
        url=url,
        rules=tuple(rules),
        streaming=streaming,
        transport=transport,
        forward_origins=forward_origins,
    )


def source_column(
    name: str,
    type_name: str = "text",
    *,
    not_null: bool = False,
    generated: str = "",
    default: str | None = None,
    identity: str = "",
    collation: str | None = None,
) -> DefinedColumn:
    return DefinedColumn(
        0,
        name=name,
        type=type_name,
        type_oid=25,
        not_null=not_null,
        generated=generated,
        default=default,
        identity=identity,
        collation=collation,
    )


def source_relation(
    name: str = "public.t",
    columns: Sequence[str | DefinedColumn] = ("id", "name"),
    *,
    key: tuple[str, ...] = (),
    primary_key: tuple[str, ...] = (),
    replica_identity: str = "d",
    primary_key_timing: str = "",
) -> SourceRelation:
    given = (source_column(c) if isinstance(c, str) else c for c in columns)
    described = tuple(replace(column, number=n) for n, column in enumerate(given, 1))
    root = TableIdentity(
        16385,
        parse_name(name),
        replica_identity,
        key,
        has_generated_key=any(c.generated and c.name in key for c in described),
    )
    return SourceRelation(
        RelationIdentity(root, (), False, {c.name: c.number for c in described}),
        primary_key=primary_key,
        columns=described,
        row_count_estimate=0,
        size_bytes=0,
        row_security=False,
        owned=True,
        selectable=True,
        primary_key_timing=primary_key_timing,
    )


def mapped_relation(
    relation_id: int = 1,
    *,
    source: str = "public.t",
    end_lsn: int = 0,
    table_type: TableType = TableType.CLONE,
) -> MappedRelation:
    facts = RelationSource(
        database="shop",
        sid=None,
        fence=FencingToken(1, "token", 1, "session"),
        binary_types=frozenset(),
        primary_key=(),
        unique_keys=(),
        has_partial_key=False,
        is_partitioned=False,
        types={},
    )
    mapping = relation_mapping(source=source, target=source, table_type=table_type)
    return MappedRelation(relation_id, mapping, Lsn(end_lsn), facts)
