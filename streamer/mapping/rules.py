"""The mapping: the relations of sources, their target relations, and the rules.

Immutable and pure. Both the static configuration and the admin store produce a `Mapping`; later
layers do not know its origin. Rules name relations or patterns; `resolve` applies the rules to the
existing relations of a source.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Final, Protocol, Self, TypeVar

from streamer.errors.error_classes import MappingError
from streamer.mapping.expressions import Expression
from streamer.mapping.relation_names import (
    NAME_BYTES_MAX,
    PLACEHOLDER,
    RelationName,
    RelationPattern,
    can_be_stored,
)
from streamer.mapping.row_sid import SidTemplate
from streamer.mapping.rule_options import (
    ON_DDL_DEFAULT,
    Create,
    DdlCapture,
    DdlKind,
    Initial,
    Keys,
    MetadataKind,
    OnColumnAdded,
    OnDdl,
    OnDelete,
    OnError,
    OnMaxRetainedWal,
    OnTableDropped,
    TableType,
    Transport,
)
from streamer.mapping.sid_and_history_columns import USUAL_HISTORY, HistoryColumns
from streamer.mapping.time_partitions import PartitionBy
from streamer.postgres.keyed_hash import KeyedHash
from streamer.postgres.secret import Secret

BOOKKEEPING: Final = "streamer"
"""The schema of the bookkeeping in the target."""


@dataclass(frozen=True)
class ColumnHash:
    """A *column* of the source whose values streamer hashes for the column *target*.

    ``check``: see `key_check`.
    """

    target: str
    column: str
    key_name: str
    check: str
    key: Secret = field(compare=False, repr=False)

    @cached_property
    def state(self) -> KeyedHash:
        return KeyedHash(self.key.reveal().encode())


@dataclass(frozen=True, slots=True)
class TableRule:
    """The rule for a single relation, or for all relations that match a pattern."""

    pattern: RelationPattern
    target: RelationPattern | None = None
    sid: SidTemplate | None = None
    """The sid of the table's rows; None for the sid of the url."""
    keys: Keys | None = None
    type: TableType = TableType.CLONE
    columns: tuple[tuple[str, str], ...] | None = None
    exclude: frozenset[str] = frozenset()
    column_list: bool = False
    """Publications omit excluded columns."""
    filter: Expression | None = None
    copy_where: Expression | None = None
    """The first copy reads only rows that match; changes of rows outside the condition arrive, too.
    """
    set: tuple[tuple[str, Expression], ...] = ()
    """Expressions by target column."""
    hashes: tuple[ColumnHash, ...] = ()
    on_error: OnError = OnError.STOP
    initial: Initial = Initial.COPY
    truncate_target: bool = False
    on_column_added: OnColumnAdded = OnColumnAdded.STOP
    on_table_dropped: OnTableDropped = OnTableDropped.STOP
    create: Create = Create.COLUMNS
    partitioned: bool = False
    """A created target has the partitions of the source's table."""
    partition_by: PartitionBy | None = None
    """The target has time partitions, and retention removes the oldest partitions."""
    verify_interval: float | None = None
    """Seconds between two verifications; 0 for none, None for the interval of all tables."""
    skip_truncate: bool = False
    metadata: tuple[tuple[MetadataKind, str], ...] = ()
    """Columns of the target with facts about the last change of a row."""
    history: HistoryColumns = USUAL_HISTORY
    on_delete: OnDelete = OnDelete.APPLY
    max_deleted_rows: int | None = None
    """A source transaction that deletes more rows, or truncates, waits for an operator."""
    priority: int = 0
    """Tables with a higher priority are copied first."""

    @property
    def includes_definitions(self) -> bool:
        """Whether a created target gets more than columns and the primary key."""
        return self.create is not Create.COLUMNS or self.partitioned

    @property
    def deleted_at(self) -> str | None:
        """The column that marks deleted rows; None if the target deletes rows."""
        if self.on_delete is not OnDelete.MARK:
            return None
        return dict(self.metadata)[MetadataKind.DELETED_AT]

    @property
    def is_disjoint(self) -> bool:
        """Whether only keys distinguish the table's rows from the rest of the target's rows."""
        return self.keys is Keys.DISJOINT

    @property
    def may_lack_rows(self) -> bool:
        """Whether the target may lack rows that the source changes."""
        return bool(self.limits)

    @property
    def limits(self) -> list[str]:
        """The options that keep rows out of the target."""
        options = {
            "filter": self.filter,
            "copy_where": self.copy_where,
            "partition_by": self.expiry,
        }
        return [name for name, value in options.items() if value is not None]

    @property
    def expiry(self) -> PartitionBy | None:
        """The time partitions that expire while the source may keep their rows.

        A version of a history expires only after its end.
        """
        rule = self.partition_by
        if rule is None or rule.is_of_versions or rule.keep is None:
            return None
        return rule

    @property
    def keeps_history(self) -> bool:
        """Whether rows of the target record earlier changes, which no copy can restore.

        A clone without marks contains only the present rows of the source.
        """
        return self.type is not TableType.CLONE or self.on_delete is OnDelete.MARK

    @property
    def expressions(self) -> tuple[Expression, ...]:
        filters = () if self.filter is None else (self.filter,)
        return (*filters, *(expression for _, expression in self.set))

    @property
    def named_expressions(self) -> tuple[tuple[str, Expression], ...]:
        """The expressions with their places: ``filter``, ``set email``."""
        filters = () if self.filter is None else (("filter", self.filter),)
        return (*filters, *((f"set {name}", expression) for name, expression in self.set))

    @property
    def checked_expressions(self) -> tuple[tuple[str, Expression], ...]:
        """`named_expressions`, and the condition that only copies and comparisons evaluate."""
        conditions = () if self.copy_where is None else (("copy_where", self.copy_where),)
        return (*self.named_expressions, *conditions)

    @property
    def expressions_fingerprint(self) -> str | None:
        """A text that changes when `filter`, `set` or a hash key changes; then rows need a new
        copy.
        """
        if not self.expressions and not self.hashes:
            return None
        condition = None if self.filter is None else self.filter.text
        values = {name: expression.text for name, expression in self.set}
        mark: dict[str, object] = {"filter": condition, "set": values}
        if self.hashes:
            mark["hash"] = {entry.target: [entry.column, entry.check] for entry in self.hashes}
        return json.dumps(mark, sort_keys=True)


@dataclass(frozen=True, slots=True)
class RelationMapping:
    """A source relation with its target: a rule applied to a relation that exists.

    ``sid``: the value of the column `sid` in the relation's rows, if the target has the column.
    """

    source: RelationName
    target: RelationName
    rule: TableRule
    sid: str | None = None

    @property
    def rows(self) -> tuple[RelationName, str | None]:
        """The rows that the relation writes: the target, and the sid there."""
        return self.target, self.sid

    @property
    def type(self) -> TableType:
        return self.rule.type

    def target_column(self, column: str) -> str | None:
        """Return the target's name for a source *column*; None if the target does not get the
        column.

        The rule may exclude the column, or `columns` may omit it and give its name to a different
        column. A hash gives its column a name, too.
        """
        rule = self.rule
        hashed = {entry.column: entry.target for entry in rule.hashes}
        if column in hashed:
            return hashed[column]
        if column in rule.exclude or column in hashed.values():
            return None
        listed = rule.columns or ()
        for source_column, target_column in listed:
            if source_column == column:
                return target_column
        return None if any(listed_name == column for _, listed_name in listed) else column

    def own_column(
        self, column: str, existing: Collection[str] = (), *, key: Collection[str] = ()
    ) -> str | None:
        """Return the name of the target column that a source's *column* requires.

        None if `set` computes the value, or the column is optional. Columns of *key*, and columns
        that the target already has (*existing*), are never optional.
        """
        name = self.target_column(column)
        if name is None or self.has_expression(name):
            return None
        is_left_out = self.is_optional(column) and column not in key and name not in existing
        return None if is_left_out else name

    def kept_rows(self, now: datetime) -> Expression | None:
        """Return the condition over the source's columns for the rows that `partition_by` keeps
        at *now*; None for all rows.
        """
        expiry = self.rule.expiry
        if expiry is None:
            return None
        sources = {target: source for source, target in self.rule.columns or ()}
        return expiry.keeps(sources.get(expiry.column, expiry.column), now)

    def columns_from(self, names: frozenset[str]) -> list[str] | None:
        """Return the target's columns that need the source's columns *names*.

        Return None if *names* decide which rows the target contains.
        """
        rule = self.rule
        if rule.filter is not None and not names.isdisjoint(rule.filter.names):
            return None
        mapped = [target for name in names if (target := self.target_column(name)) is not None]
        computed = [name for name, value in rule.set if not names.isdisjoint(value.names)]
        return sorted({*mapped, *computed})

    def expression_inputs(self, names: Sequence[str]) -> list[str]:
        """Return the columns among *names*, of the source, that expressions use.

        Raises MappingError for an expression that uses a column outside *names*.
        """
        for place, expression in self.rule.named_expressions:
            if unknown := expression.unknown(names):
                raise MappingError(
                    f'{place} of table "{self.source}" uses column "{unknown[0]}", which the '
                    "source does not send",
                    hint=f"its columns are: {', '.join(names)}",
                )
        used = {name for expression in self.rule.expressions for name in expression.names}
        return [name for name in names if name in used]

    def has_expression(self, target_column: str) -> bool:
        """Whether an expression of `set` computes a column of the target."""
        return any(name == target_column for name, _ in self.rule.set)

    def hash_of(self, target_column: str) -> ColumnHash | None:
        """Return the hash for a column of the target."""
        return next(
            (entry for entry in self.rule.hashes if entry.target == target_column),
            None,
        )

    def type_of(self, target_column: str, source_type: str) -> str:
        """Return the type of a target column whose type at the source is *source_type*."""
        return source_type if self.hash_of(target_column) is None else "text"

    def is_computed(self, target_column: str) -> bool:
        """Whether `set` computes a column of the target, by an expression or a hash."""
        return self.has_expression(target_column) or self.hash_of(target_column) is not None

    def is_optional(self, column: str) -> bool:
        """Whether *column* may be missing at the target, because `columns` does not list it.

        A hashed column is never optional.
        """
        columns = self.rule.columns
        if columns is None or any(entry.column == column for entry in self.rule.hashes):
            return False
        return all(listed != column for listed, _ in columns)


class SourceLabel(str):
    """A source's name, ``database`` or ``database:sid``; either part may contain a colon."""

    database: str
    sid: str | None

    def __new__(cls, database: str, sid: str | None) -> Self:
        label = super().__new__(cls, database if sid is None else f"{database}:{sid}")
        label.database, label.sid = database, sid
        return label


class Named(Protocol):
    """An object with the names of a source: its rules, its record or its status."""

    @property
    def database(self) -> str: ...

    @property
    def sid(self) -> str | None: ...


N = TypeVar("N", bound=Named)


def find_source(sources: Iterable[N], database: str, sid: str | None) -> N | None:
    """Return the source with these two names. A label does not suffice, because ``a:b`` can mean
    two sources.
    """
    for source in sources:
        if (source.database, source.sid) == (database, sid):
            return source
    return None


@dataclass(frozen=True, slots=True)
class MappingFault:
    """The fault in the configuration of a source: a variable or a password is missing."""

    problem: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class SourceMapping:
    """A source database with its url, and the rules for its relations."""

    database: str
    sid: str | None
    url: Secret
    rules: tuple[TableRule, ...]
    exclude_tables: tuple[RelationPattern, ...] = ()
    """Tables that no rule with a pattern matches."""
    streaming: bool = True
    transport: Transport = Transport.AUTO
    forward_origins: bool = False
    failover: bool = False
    """Standbys synchronize the slot."""
    sequences: bool = False
    """streamer keeps the target's sequences ahead of the source's sequences."""
    ddl: DdlCapture = DdlCapture.OFF
    on_ddl: AnyMapping[DdlKind, OnDdl] = field(default_factory=lambda: ON_DDL_DEFAULT)
    """The reaction to each kind of change of a definition."""
    heartbeat_interval: float | None = None
    """Seconds; None for the interval of all sources, 0 for no heartbeats."""
    priority: int = 0
    """Sources with a higher priority copy first."""
    max_retained_wal_bytes: int | None = None
    on_max_retained_wal: OnMaxRetainedWal = OnMaxRetainedWal.WARN
    fault: MappingFault | None = None
    """A source with a fault stays in the mapping, because streamer tears down a source that
    leaves.
    """
    url_place: str = field(default="", compare=False)
    """The setting that holds the url, and the environment variables in it."""
    written_url: str | None = field(default=None, compare=False)
    """The text of the url, if the text contains environment variables."""

    @property
    def label(self) -> str:
        return SourceLabel(self.database, self.sid)

    @property
    def makes_definitions(self) -> bool:
        """Whether target tables get definitions beside the stream."""
        includes_definitions = any(rule.includes_definitions for rule in self.rules)
        return includes_definitions or self.ddl is DdlCapture.CAPTURE

    @property
    def has_tenants(self) -> bool:
        """Whether rules give tables a sid that the source may lack."""
        return any(rule.sid is not None for rule in self.rules)

    @property
    def exact_names(self) -> dict[RelationName, TableRule]:
        """The rules that name a single table, by its name."""
        return {
            RelationName(rule.pattern.namespace, rule.pattern.name): rule
            for rule in self.rules
            if not rule.pattern.is_pattern
        }

    def excludes(self, relation: RelationName) -> bool:
        """Whether `exclude_tables` hides *relation* from the patterns."""
        return any(pattern.matches(relation) for pattern in self.exclude_tables)

    @property
    def slot(self) -> str:
        return source_object_name(self.database, self.sid)

    @property
    def publication(self) -> str:
        return source_object_name(self.database, self.sid)

    @property
    def publication_inserts(self) -> str:
        """Name of the publication for relations without a usable replica identity."""
        return source_object_name(self.database, self.sid, "_ins")


@dataclass(frozen=True, slots=True)
class Mapping:
    """All sources, and the default target schema of their tables."""

    sources: tuple[SourceMapping, ...]
    target_namespace: str = "public"


def source_object_name(database: str, sid: str | None, suffix: str = "") -> str:
    """Return the name of streamer's slot and publication at a source.

    ``streamer_<database>_<sid>`` in lower case, with ``_`` for every character that is neither a
    letter nor a digit, as a slot's name needs (ReplicationSlotValidateName in slot.c). A name of
    more than 63 bytes is cut and gets a hash of the whole.
    """
    full = f"streamer_{database}" if sid is None else f"streamer_{database}_{sid}"
    name = re.sub(r"[^a-z0-9_]", "_", full.lower())
    if len(name) + len(suffix) > NAME_BYTES_MAX:
        digest = hashlib.sha256(full.encode()).hexdigest()[:8]
        name = f"{name[: NAME_BYTES_MAX - len(suffix) - 9]}_{digest}"
    return name + suffix


def resolve(
    source: SourceMapping, relations: Iterable[RelationName], target_namespace: str
) -> list[RelationMapping]:
    """Apply the rules of *source* to its *relations*; in order of name.

    Raises MappingError if two patterns match the same relation, or if two relations would write the
    same rows. A relation without a sid or target also raises MappingError. An exact rule for a
    missing relation is an error, too, unless `on_table_dropped` allows the loss. A renamed relation
    (`former_names`) is not missing.
    """
    return resolve_new(source, (), relations, target_namespace)[0]


def resolve_new(
    source: SourceMapping,
    known: Collection[RelationName],
    relations: Iterable[RelationName],
    target_namespace: str,
) -> tuple[list[RelationMapping], MappingError | None]:
    """Apply the rules like `resolve`, but omit new relations that the rules cannot map.

    Return the mappings, and the first error of an omitted relation.

    *known*: relations that stream already; without any, this function raises each error. Any role
    that may create a schema at the source can create a relation without a sid, which must not stop
    the known relations.
    """
    present, streaming = sorted(set(relations)), frozenset(known)
    missing = source.exact_names.keys() - set(present)
    missing -= former_names(source, present, target_namespace) if missing else set()
    for name in sorted(missing):
        if source.exact_names[name].on_table_dropped is OnTableDropped.STOP:
            raise MappingError(
                f'table "{name}" does not exist at source "{source.label}"',
                hint="create the table there, or correct or remove its name in `tables`",
            )
    judged = _map_each(source, present, target_namespace)
    by_rows: dict[tuple[RelationName, str | None], RelationMapping] = {}
    mapped, refused = [], None
    for name in sorted(judged, key=lambda name: (name not in streaming, name)):
        mapping = judged[name]
        if isinstance(mapping, RelationMapping):
            first = by_rows.setdefault(mapping.rows, mapping)
            if first == mapping or (first.rule.is_disjoint and mapping.rule.is_disjoint):
                mapped.append(mapping)
                continue
            mapping = same_rows(source, [first.source, name], mapping)
        if name in streaming or not streaming:
            raise mapping
        refused = refused or mapping
    return sorted(mapped, key=lambda mapping: mapping.source), refused


def _map_each(
    source: SourceMapping, relations: Iterable[RelationName], target_namespace: str
) -> dict[RelationName, RelationMapping | MappingError]:
    """Return, for each relation with a rule, its mapping or the reason why it has no mapping."""
    exact = source.exact_names
    judged: dict[RelationName, RelationMapping | MappingError] = {}
    for relation in relations:
        try:
            rule = exact.get(relation) or _matching_pattern(source, relation)
            if rule is not None:
                judged[relation] = _map_outside_bookkeeping(
                    source, rule, relation, target_namespace
                )
        except MappingError as exc:
            judged[relation] = exc
    return judged


def _map_outside_bookkeeping(
    source: SourceMapping, rule: TableRule, relation: RelationName, target_namespace: str
) -> RelationMapping:
    mapping = map_relation(source, rule, relation, target_namespace)
    if mapping.target.namespace == BOOKKEEPING:
        raise MappingError(
            f'table "{relation}" of source "{source.label}" would be written to '
            f'"{mapping.target}", in the schema of streamer\'s own bookkeeping',
            hint="give it a `target` in another schema",
        )
    return mapping


def map_relation(
    source: SourceMapping, rule: TableRule, relation: RelationName, default_namespace: str
) -> RelationMapping:
    """Apply *rule* to *relation*. Raises MappingError, see `target_of` and `sid_of`."""
    target = target_of(source, rule, relation, default_namespace)
    return RelationMapping(relation, target, rule, sid_of(source, rule, relation))


def sid_of(source: SourceMapping, rule: TableRule, relation: RelationName) -> str | None:
    """Return the sid of the rows of *relation*. Raises MappingError for a name that does not
    match.
    """
    if rule.is_disjoint:
        return None
    if rule.sid is None:
        return source.sid
    try:
        return rule.sid.fill(_names(source, relation))
    except MappingError as exc:
        raise MappingError(
            f'table "{relation}" of source "{source.label}": {exc.message}', hint=exc.hint
        ) from None


def _names(source: SourceMapping, relation: RelationName) -> dict[str, str | None]:
    """Return the texts of placeholders, by name."""
    return {
        "database": source.database,
        "sid": source.sid,
        "schema": relation.namespace,
        "table": relation.name,
    }


def former_names(
    source: SourceMapping, present: Iterable[RelationName], target_namespace: str
) -> set[RelationName]:
    """Return the tables of exact rules that *source* lacks, if a *present* table writes the rows of
    such a rule.

    A session has renamed such a table, and some tenants may still have the former name.
    """
    judged = _map_each(source, present, target_namespace)
    rows = {mapping.rows for mapping in judged.values() if isinstance(mapping, RelationMapping)}
    return {
        name
        for name, rule in source.exact_names.items()
        if name not in judged
        and not rule.is_disjoint  # several tables write these rows
        and map_relation(source, rule, name, target_namespace).rows in rows
    }


def same_rows(
    source: SourceMapping, names: Sequence[RelationName], mapping: RelationMapping
) -> MappingError:
    """Return the error for the tables *names* of a source that would all write the rows of
    *mapping*.
    """
    listed = " and ".join(f'"{name}"' for name in names)
    words = f', with sid "{mapping.sid}"' if mapping.rule.sid is not None else ""
    return MappingError(
        f'tables {listed} of source "{source.label}" would both be written to '
        f'target table "{mapping.target}"{words}',
        hint="give all but one of them another `target`, or give their rows different values of "
        '`sid`, as in sid: "{schema}". If no two tables contain the same key, write '
        "`keys: disjoint`",
    )


def find_rules(
    source: SourceMapping, relations: Iterable[RelationName]
) -> dict[RelationName, TableRule]:
    """Return the rule of each relation with a rule. Raises MappingError if two patterns match."""
    exact = source.exact_names
    ruled = {}
    for relation in relations:
        rule = exact.get(relation) or _matching_pattern(source, relation)
        if rule is not None:
            ruled[relation] = rule
    return ruled


def _matching_pattern(source: SourceMapping, relation: RelationName) -> TableRule | None:
    if source.excludes(relation):
        return None
    matching = [r for r in source.rules if r.pattern.is_pattern and r.pattern.matches(relation)]
    if len(matching) > 1:
        raise MappingError(
            f'rules "{matching[0].pattern}" and "{matching[1].pattern}" of source "{source.label}" '
            f'both claim table "{relation}"',
            hint="narrow one pattern, or name the table in a rule of its own",
        )
    return matching[0] if matching else None


def target_of(
    source: SourceMapping, rule: TableRule, relation: RelationName, default_namespace: str
) -> RelationName:
    """Return the target to which *rule* writes *relation*.

    ``*`` stands for the schema or the table of the relation, by its place. Raises MappingError for
    ``{sid}`` of a source without a sid, and for a name that is too long.
    """
    target = rule.target
    if target is None:
        is_same = relation.namespace == default_namespace
        return relation if is_same else RelationName(default_namespace, relation.name)
    words = {f"{{{name}}}": text for name, text in _names(source, relation).items()}

    def fill(part: str, star: str) -> str:
        filled = PLACEHOLDER.sub(lambda found: {**words, "*": star}[found[0]] or "", part)
        if not filled or not can_be_stored(filled):
            raise MappingError(
                f'target "{filled}" of table "{relation}" of source "{source.label}" is not a '
                "valid name: PostgreSQL allows 1 to 63 bytes",
                hint="shorten `target`, or give the table a rule of its own",
            )
        return filled

    if source.sid is None and "{sid}" in _placeholders(target):
        raise MappingError(
            f'target {target} contains {{sid}}, and source "{source.label}" has no sid',
            hint="give its url a sid, or remove {sid} from the target",
        )
    is_pattern, name_is_pattern = target.namespace_is_pattern, target.name_is_pattern
    return RelationName(
        fill(target.namespace, relation.namespace) if is_pattern else target.namespace,
        fill(target.name, relation.name) if name_is_pattern else target.name,
    )


def _placeholders(target: RelationPattern) -> set[str]:
    """Return the placeholders in a target, ``*`` included."""
    return {
        placeholder
        for part, is_pattern in (
            (target.namespace, target.namespace_is_pattern),
            (target.name, target.name_is_pattern),
        )
        if is_pattern
        for placeholder in PLACEHOLDER.findall(part)
    }


def check_target(
    pattern: RelationPattern,
    target: RelationPattern,
    sid: SidTemplate | None = None,
    keys: Keys | None = None,
) -> None:
    """Check that a rule for several tables has a target or a sid for each, unless their *keys* are
    disjoint. Raises MappingError.
    """
    placeholders = _placeholders(target)
    if "*" in placeholders and not pattern.is_pattern:
        raise MappingError(
            f"target {target} has a * but the rule names one table", hint="write the name out"
        )
    has_table = target.name_is_pattern and "*" in PLACEHOLDER.findall(target.name)
    has_table |= "{table}" in placeholders
    has_schema = "{schema}" in placeholders or (
        target.namespace_is_pattern and "*" in PLACEHOLDER.findall(target.namespace)
    )
    is_named = has_table if pattern.name_is_pattern else has_table or has_schema
    if sid is not None:
        has_table |= not pattern.name_is_pattern or sid.distinguishes("table")
        has_schema |= not pattern.namespace_is_pattern or sid.distinguishes("schema")
        is_named = is_named or (has_table and has_schema)
    if pattern.is_pattern and not is_named and keys is not Keys.DISJOINT:
        raise MappingError(
            f"pattern {pattern} would write several tables into {target}",
            hint='write a * where the table\'s own name goes, as in target: "archive.*", or '
            'distinguish their rows, as in sid: "{schema}". If no two tables contain the same '
            "key, write `keys: disjoint`",
        )
