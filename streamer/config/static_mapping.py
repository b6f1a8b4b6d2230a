"""The ``sources`` of the configuration file as a `Mapping`, without a mapping database.

`MappingBuilder` also builds the mapping of the mapping database, so both accept the same rules.
"""

from collections.abc import Callable, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from streamer.config.hash_keys import HashKeyError, HashSettings, read_keys
from streamer.config.settings import Settings, SourceSettings, TableSettings, load_settings
from streamer.config.yaml_file import Document, Location, Replaced, format_location, read_document
from streamer.errors.command_lines import command
from streamer.errors.error_classes import MappingError, SettingsError
from streamer.mapping.disjoint_keys import find_unfit
from streamer.mapping.expressions import Expression, ExpressionError, parse_expression
from streamer.mapping.relation_names import (
    RelationName,
    RelationPattern,
    is_name,
    parse_relation,
    parse_target,
)
from streamer.mapping.row_sid import SidTemplate
from streamer.mapping.rule_options import (
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
    VersionColumn,
    on_ddl_by_kind,
)
from streamer.mapping.rules import (
    ColumnHash,
    Mapping,
    MappingFault,
    SourceMapping,
    TableRule,
    check_target,
    sid_of,
    target_of,
)
from streamer.mapping.shared_targets import TableWriter, find_clashes
from streamer.mapping.sid_and_history_columns import (
    SID,
    USUAL_HISTORY,
    HistoryColumns,
)
from streamer.mapping.time_partitions import PartitionBy
from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.keyed_hash import key_check
from streamer.postgres.secret import Secret


def load(path: Path, overrides: dict[str, Any] | None = None) -> tuple[Settings, Mapping]:
    """Read a configuration file. Raises ConfigurationError that names file, line and key.

    With a ``mapping_database``, the mapping is empty: the sources are in that database.
    """
    document, settings = read(path, overrides)
    if settings.mapping_database is not None and settings.sources:
        raise SettingsError(
            f"{document.where(('sources',))}: sources: the mapping is in "
            f"{settings.mapping_database}",
            hint=f"run `{command('import', str(path))}` and remove `sources` from the file, "
            "or remove `mapping_database`",
        )

    def describe(location: Location) -> str:
        return f"{document.where(location)}: {format_location(location)}"

    builder = MappingBuilder(
        settings.sources,
        settings.target.schema_,
        settings.on_error,
        settings,
        describe,
        document.replaced,
        {
            at: MappingFault(f"{describe(at)}: {text}")
            for at, text in document.replaced.missing.items()
        },
        read_keys(settings.hash_keys),
        settings.history,
    )
    return settings, builder.build()


def require_usable(mapping: Mapping) -> None:
    """Raise SettingsError if no source of a mapping has a usable configuration."""
    faults = [source.fault for source in mapping.sources if source.fault is not None]
    if faults and len(faults) == len(mapping.sources):
        raise SettingsError(faults[0].problem, hint=faults[0].hint)


def require_sources(settings: Settings, mapping: Mapping, place: str = "") -> None:
    """Raise MappingError if there is no source. *place*: the origin of the mapping."""
    if mapping.sources:
        return
    if settings.mapping_database is None:
        raise MappingError(f"{place}no sources", hint="list at least one under `sources`")
    raise MappingError(
        f"{place}no sources: the mapping in {settings.mapping_database} is empty",
        hint="add one with `streamer sources add DATABASE URL` or `streamer import FILE`; then "
        "`streamer apply`",
    )


def read(path: Path, overrides: dict[str, Any] | None = None) -> tuple[Document, Settings]:
    """Read a configuration file without a check of its sources. Raises SettingsError."""
    document = read_document(path)
    return document, load_settings(document, overrides)


def _patterns(names: Sequence[str]) -> tuple[RelationPattern, ...]:
    return tuple(parse_relation(name, "public") for name in names)


def _without(
    rules: tuple[TableRule, ...], excluded: Sequence[RelationPattern]
) -> tuple[TableRule, ...]:
    """Return *rules* without the rules whose patterns *excluded* contains."""
    return tuple(rule for rule in rules if rule.pattern not in excluded)


class MappingBuilder:
    """Builds a `Mapping` from settings of sources, in a file or in the mapping database.

    *settings*: the settings of the process. *describe* names the place of a location under
    ``sources``, for errors.
    *replaced*: the environment variables in strings.
    *faults*: missing variables or passwords, each at a location in one source.
    """

    def __init__(
        self,
        groups: Sequence[SourceSettings],
        target_namespace: str,
        on_error: OnError,
        settings: Settings,
        describe: Callable[[Location], str],
        replaced: Replaced | None = None,
        faults: dict[Location, MappingFault] | None = None,
        hash_keys: AnyMapping[str, Secret | HashKeyError] = MappingProxyType({}),
        history: AnyMapping[VersionColumn, str] = MappingProxyType({}),
    ) -> None:
        replaced = replaced or Replaced()
        self._variables = replaced.variables
        self._written = replaced.written
        self._faults = dict(faults or {})
        self._hash_keys = hash_keys
        self._history = history
        self._groups = groups
        self._target_namespace = target_namespace
        self._on_error = on_error
        self._settings = settings
        self._describe = describe

    def _error(self, location: Location, problem: str, hint: str | None = None) -> MappingError:
        return MappingError(f"{self._describe(location)}: {problem}", hint=hint)

    def build(self) -> Mapping:
        """Return the mapping. Raises ConfigurationError for the first fault."""
        sources: dict[str, SourceMapping] = {}
        names: dict[str, str] = {}
        for number, group in enumerate(self._groups):
            location: Location = ("sources", number)
            self._report_unread_keys(group, location)
            # A rule without one of its strings would be a different rule.
            rules = () if self._group_fault(location) else self._rules(group, location)
            for source in self._urls(group, rules, location):
                for name in (source.slot, source.publication_inserts):
                    holder = names.setdefault(name, source.label)
                    if holder != source.label:
                        raise self._error(
                            location,
                            f'"{holder}" and "{source.label}" would share the name {name} of slots '
                            "and publications",
                            hint="give one of them another database name or sid",
                        )
                if source.label in sources:
                    raise self._error(
                        location,
                        f'"{source.label}" occurs twice, and both would write the same rows',
                        hint="give each url of a database a sid of its own",
                    )
                sources[source.label] = source
        mapping = Mapping(tuple(sources.values()), self._target_namespace)
        require_usable(mapping)
        self._check_shared_targets(mapping)
        return mapping

    def _report_unread_keys(self, group: SourceSettings, location: Location) -> None:
        """Make each unreadable key a fault of the sources that use that key."""
        for name, table in group.tables.items():
            for target, value in table.set.items():
                key = self._hash_keys.get(value.key) if isinstance(value, HashSettings) else None
                if isinstance(value, HashSettings) and isinstance(key, HashKeyError):
                    at: Location = (*location, "tables", name, "set", target)
                    place = f"{self._describe(at)}: hash_keys.{value.key}: {key}"
                    self._faults.setdefault(at, MappingFault(place))

    def _group_fault(self, location: Location) -> MappingFault | None:
        """Return the fault that concerns all urls of a database."""
        for at, fault in self._faults.items():
            if at[:2] == location and at[2:3] != ("urls",):
                return fault
        return None

    def _url_fault(self, url: Secret, at: Location) -> MappingFault | None:
        """Return the fault of a url, if any. Raises SettingsError for a malformed url."""
        for place, fault in self._faults.items():
            if place[:4] == at[:4]:
                return fault
        try:
            parse_conninfo(url.reveal())
        except ValueError as exc:
            problem = f"{self._url_place(at)}: {exc}"
            if at not in self._variables:
                raise SettingsError(problem) from None
            return MappingFault(problem)
        return None

    def _url_place(self, at: Location) -> str:
        names = ", ".join(self._variables.get(at, ()))
        return f"{self._describe(at)} (from environment: {names})" if names else self._describe(at)

    def _urls(
        self, group: SourceSettings, rules: tuple[TableRule, ...], location: Location
    ) -> list[SourceMapping]:
        sources = []
        excluded = _patterns(group.exclude_tables)
        on_max_retained_wal = self._on_max_retained_wal(group, location)
        for number, url in enumerate(group.urls):
            place = (*location, "urls", number)
            if url.sid is None and len(group.urls) > 1:
                raise self._error(
                    place,
                    f'the urls of database "{group.database}" would write the same rows',
                    hint="give each of them a sid of its own",
                )
            excluded_here = _patterns(url.exclude_tables)
            at = (*place, "url")
            fault = self._url_fault(url.url, at) or self._group_fault(location)
            sources.append(
                SourceMapping(
                    database=group.database,
                    sid=url.sid,
                    url=url.url,
                    rules=_without(rules, excluded_here),
                    exclude_tables=excluded + excluded_here,
                    streaming=group.streaming,
                    transport=group.transport,
                    forward_origins=group.forward_origins,
                    failover=group.failover,
                    sequences=group.sequences,
                    ddl=group.ddl,
                    on_ddl=on_ddl_by_kind(group.on_ddl),
                    max_retained_wal_bytes=group.max_retained_wal,
                    on_max_retained_wal=on_max_retained_wal,
                    heartbeat_interval=group.heartbeat_interval,
                    priority=group.priority if url.priority is None else url.priority,
                    fault=fault,
                    url_place=self._url_place(at),
                    written_url=self._written.get(at),
                )
            )
        return sources

    def _on_max_retained_wal(self, group: SourceSettings, location: Location) -> OnMaxRetainedWal:
        """Return the reaction. Raises MappingError for a journal without a directory."""
        reaction = group.on_max_retained_wal
        if reaction is OnMaxRetainedWal.SPOOL and not self._settings.spool.is_lasting:
            place = (*location, "on_max_retained_wal")
            problem = "a journal needs a directory that survives a restart"
            raise self._error(place, problem, hint="set spool.directory")
        default = (
            OnMaxRetainedWal.SPOOL if self._settings.spool.is_lasting else OnMaxRetainedWal.WARN
        )
        return reaction or default

    def _rules(self, group: SourceSettings, location: Location) -> tuple[TableRule, ...]:
        rules: dict[RelationPattern, TableRule] = {}
        for name, table in group.tables.items():
            place = (*location, "tables", name)
            rule = self._rule(name, table, place, group.create or self._settings.target.create)
            if (unfit := find_unfit(rule)) is not None:
                raise self._error((*place, unfit.setting), unfit.problem, unfit.hint)
            if group.ddl is not DdlCapture.OFF:
                self._check_capture(rule, place)
            if on_ddl_by_kind(group.on_ddl)[DdlKind.ADD_COLUMN] is OnDdl.IGNORE:
                rule = replace(rule, on_column_added=OnColumnAdded.IGNORE)
            if rule.pattern in rules:
                raise self._error(place, f'table "{rule.pattern}" has two rules')
            rules[rule.pattern] = rule
        for pattern in _patterns(group.exclude_tables):
            if pattern in rules:
                raise self._error(
                    (*location, "exclude_tables"),
                    f'"{pattern}" is also in `tables`',
                    hint="remove it from `tables` or from `exclude_tables`",
                )
        return tuple(rules.values())

    def _check_capture(self, rule: TableRule, place: Location) -> None:
        """Refuse rules that `ddl: capture` excludes."""
        if rule.hashes:
            raise self._error(
                (*place, "set"),
                "`ddl: capture` could write plain values to a hashed column",
                hint="leave `ddl` out for the sources of this table",
            )
        is_shared = rule.sid is not None or rule.is_disjoint
        if is_shared and self._settings.consistency == "transaction":
            raise self._error(
                (*place, "keys" if rule.is_disjoint else "sid"),
                "with `ddl: capture` and `consistency: transaction`, a changed table would wait "
                "for other tables with its target, whose changes come later in the same lane",
                hint="leave `ddl` out for the sources of this table, or set `consistency: table`",
            )

    def _rule(self, name: str, table: TableSettings, place: Location, create: Create) -> TableRule:
        try:
            pattern = parse_relation(name, "public")
            sid = None if table.sid is None else SidTemplate.parse(table.sid)
            target = self._target(pattern, table.target, sid, table.keys)
        except MappingError as exc:
            raise self._error(place, exc.message, exc.hint) from None
        columns = None if table.columns is None else tuple(table.columns.items())
        if columns is not None and len({name for _, name in columns}) < len(columns):
            raise self._error(
                (*place, "columns"), "two columns would be written to the same target column"
            )
        if table.initial is Initial.KEEP and table.truncate_target:
            raise self._error(
                place, "`initial: keep` and `truncate_target: true` contradict each other"
            )
        is_history = table.type is TableType.HISTORY
        if table.on_table_dropped is OnTableDropped.CLOSE and not is_history:
            raise self._error(
                (*place, "on_table_dropped"), "`close` ends versions, which only a history has"
            )
        named = self._metadata(table, place)
        expressions = self._set(table, place)
        hashes = self._hashes(table, place)
        history = self._names_of_versions(table, place)
        return TableRule(
            pattern=pattern,
            target=target,
            sid=sid,
            keys=table.keys,
            type=table.type,
            columns=columns,
            exclude=frozenset(table.exclude).difference(h.column for h in hashes),
            column_list=table.column_list,
            filter=self._condition(table.filter, (*place, "filter")),
            copy_where=self._copy_where(table, place),
            set=expressions,
            hashes=hashes,
            on_error=table.on_error or self._on_error,
            initial=table.initial,
            truncate_target=table.truncate_target,
            on_column_added=table.on_column_added,
            on_table_dropped=table.on_table_dropped,
            verify_interval=table.verify_interval,
            skip_truncate=table.skip_truncate,
            max_deleted_rows=table.max_deleted_rows,
            metadata=tuple((kind, named[kind]) for kind in MetadataKind if kind in named),
            history=history,
            on_delete=table.on_delete,
            priority=table.priority,
            create=table.create or create,
            partitioned=table.partitioned,
            partition_by=self._partition_by(table, history, place),
        )

    def _metadata(self, table: TableSettings, place: Location) -> dict[MetadataKind, str]:
        """Return the columns of `metadata`, checked by the rules alone."""
        named = dict(table.metadata)
        if table.on_delete is OnDelete.MARK:
            if table.type is not TableType.CLONE:
                raise self._error((*place, "on_delete"), "`mark` is for clones")
            named.setdefault(MetadataKind.DELETED_AT, MetadataKind.DELETED_AT.value)
        elif MetadataKind.DELETED_AT in named:
            raise self._error(
                (*place, "metadata", "deleted_at"), "only `on_delete: mark` writes this fact"
            )
        if not named:
            return named
        if table.type is TableType.HISTORY:
            raise self._error(
                (*place, "metadata"),
                "a history table has the columns of `history` instead",
                hint="remove it, or choose another type",
            )
        written = {*(table.columns or {}).values(), *table.set, SID}
        for kind, name in named.items():
            if name in written:
                raise self._error(
                    (*place, "metadata", kind.value),
                    f'column "{name}" already gets another value',
                    hint="give the fact a column of its own",
                )
            if not is_name(name):
                raise self._error(
                    (*place, "metadata", kind.value),
                    f'"{name}" is not a column name: PostgreSQL allows 1 to 63 bytes',
                )
            written.add(name)
        return named

    def _names_of_versions(self, table: TableSettings, place: Location) -> HistoryColumns:
        """Return the columns of versions, checked by the rules alone."""
        if table.type is not TableType.HISTORY:
            if table.history:
                raise self._error((*place, "history"), "only `type: history` has versions")
            return USUAL_HISTORY
        names = {**self._history, **table.history}
        history = HistoryColumns(**{kind.value: name for kind, name in names.items()})
        written = {*(table.columns or {}).values(), *table.set, SID}
        for name in (*history.names, history.id):
            if name in written:
                raise self._error(
                    (*place, "history"),
                    f'column "{name}" already gets another value',
                    hint="give each column of `history` a name of its own",
                )
            if not is_name(name):
                raise self._error(
                    (*place, "history"),
                    f'"{name}" is not a column name: PostgreSQL allows 1 to 63 bytes',
                )
            written.add(name)
        return history

    def _condition(self, text: str | None, place: Location) -> Expression | None:
        return None if text is None else self._expression(text, place)

    def _copy_where(self, table: TableSettings, place: Location) -> Expression | None:
        """Return the condition, which comparisons evaluate at the target, too."""
        condition = self._condition(table.copy_where, (*place, "copy_where"))
        renamed = table.columns or {}
        for name in sorted(condition.names if condition is not None else ()):
            if name in table.exclude or renamed.get(name, name) in table.set:
                raise self._error(
                    (*place, "copy_where"),
                    f'the target does not hold the values of source column "{name}"',
                    hint="use a column that is neither excluded nor in `set`",
                )
        return condition

    def _partition_by(
        self, table: TableSettings, history: HistoryColumns, place: Location
    ) -> PartitionBy | None:
        """Return the rule's time partitions, checked by the rules alone."""
        stated, at = table.partition_by, (*place, "partition_by")
        if stated is None:
            return None
        if table.type is TableType.CLONE:
            raise self._error(
                at,
                "only tables of `type: append` or `type: history` can have time partitions",
                hint="choose one of these types, or partition the target table yourself",
            )
        if table.partitioned:
            raise self._error(
                at, "`partitioned: true` gives the target the source's partitions instead"
            )
        if table.keys is not None:
            raise self._error(
                at, "`keys: disjoint` needs a unique key, which time partitions may exclude"
            )
        is_history = table.type is TableType.HISTORY
        column = (
            self._end_of_versions(stated.column, history, (*at, "column"))
            if is_history
            else self._time_of_rows(stated.column, table, (*at, "column"))
        )
        if stated.keep is not None and stated.since is not None:
            raise self._error(at, "`keep` and `since` exclude each other", hint="remove `since`")
        if stated.keep is None and stated.since is None and not is_history:
            raise self._error(
                at,
                "an append table needs `keep`, or `since` if all rows stay",
                hint="state as `since` the date of the oldest rows",
            )
        return PartitionBy(
            column, stated.interval, stated.keep, stated.on_expired, is_history, stated.since
        )

    def _end_of_versions(self, column: str | None, history: HistoryColumns, at: Location) -> str:
        """Return the column of a history's partitions. An open version must never expire."""
        if column not in (None, history.end):
            raise self._error(
                at,
                f'a history has partitions by the end of its versions, column "{history.end}", '
                "because a version without an end stays",
                hint="remove `column`",
            )
        return history.end

    def _time_of_rows(self, column: str | None, table: TableSettings, at: Location) -> str:
        """Return the column of an append table's partitions, whose values the source sends."""
        if column is None:
            raise self._error(at, "the partitions of an append table need a column")
        listed = table.columns or {}
        renamed = listed.get(column, column) != column
        source = next((s for s, name in listed.items() if name == column), column)
        is_lost = renamed and column not in listed.values()
        if is_lost or source in table.exclude or column in table.set:
            raise self._error(
                at,
                f'target column "{column}" does not hold the values of the source',
                hint="use a column, by the target's name, that is neither excluded nor in `set`",
            )
        return column

    def _set(self, table: TableSettings, place: Location) -> tuple[tuple[str, Expression], ...]:
        renamed = table.columns or {}
        for name in table.set:
            target = renamed.get(name, name)
            if target != name and name not in renamed.values():
                raise self._error(
                    (*place, "set", name),
                    f'column "{name}" is written to "{target}", which has no expression',
                    hint=f"`set` uses the target's names: write {target}",
                )
        return tuple(
            (name, self._expression(text, (*place, "set", name)))
            for name, text in table.set.items()
            if isinstance(text, str)
        )

    def _hashes(self, table: TableSettings, place: Location) -> tuple[ColumnHash, ...]:
        """Return the hashes of `set`. A hashed column appears once in the target: a second target
        column would get the plain value.
        """
        hashes = []
        for target, value in table.set.items():
            if not isinstance(value, HashSettings):
                continue
            at: Location = (*place, "set", target)
            key = self._hash_keys.get(value.key)
            if not isinstance(key, Secret):
                raise self._error(
                    at,
                    f'there is no hash key "{value.key}"',
                    hint="define it in `hash_keys` of the configuration file; rules of a mapping "
                    "database cannot use hashes",
                )
            self._check_hash(table, target, value.hmac, at)
            check = key_check(key.reveal())
            hashes.append(ColumnHash(target, value.hmac, value.key, check, key))
        return tuple(hashes)

    def _check_hash(self, table: TableSettings, target: str, column: str, at: Location) -> None:
        listed = table.columns or {}
        place = None if column in table.exclude else listed.get(column, column)
        if place != target and (place is not None or column in listed or column == target):
            # `columns` lists every replicated column, so the hint changes only an entry.
            steps = [f"write `{column}: {target}` in `columns`"] if column in listed else []
            steps += [f'remove "{column}" from `exclude`'] if column in table.exclude else []
            raise self._error(
                at,
                f'the hash of column "{column}" replaces the column itself, which is not written '
                f'to "{target}"',
                hint=f"to write only the hash, list the column in `exclude`: [{column}]"
                if column != target and column not in listed
                else ", and ".join(steps),
            )
        if any(
            isinstance(value, HashSettings) and value.hmac == column and name != target
            for name, value in table.set.items()
        ):
            raise self._error(at, f'column "{column}" has two hashes')
        if target in (table.columns or {}).values() and column not in (table.columns or {}):
            raise self._error(at, f'another column is written to "{target}"')
        expressions = {"filter": table.filter, **table.set}
        for name, text in expressions.items():
            if isinstance(text, str) and column in parse_expression(text).names:
                raise self._error(
                    at,
                    f'{name} uses column "{column}", and would write its plain value to the target',
                    hint=f"remove the column from {name}, or hash another column",
                )
        if table.initial is Initial.NONE:
            raise self._error(
                at,
                "with `initial: none`, a new key would leave old hashes in the target",
                hint="choose `initial: copy` or `keep`",
            )
        if table.partitioned:
            raise self._error(at, "`partitioned: true` cannot be used with a hashed column")

    def _expression(self, text: str, place: Location) -> Expression:
        try:
            return parse_expression(text)
        except ExpressionError as exc:
            raise self._error(
                place, str(exc), hint="write one SQL expression over the source's columns"
            ) from None

    def _target(
        self,
        pattern: RelationPattern,
        target: str | None,
        sid: SidTemplate | None,
        keys: Keys | None,
    ) -> RelationPattern | None:
        if target is None:
            return None
        parsed = parse_target(target, self._target_namespace)
        check_target(pattern, parsed, sid, keys)
        return parsed

    def _check_shared_targets(self, mapping: Mapping) -> None:
        """Refuse two sources that would write the same rows, judged by the rules alone."""
        writers: dict[RelationName, list[TableWriter]] = {}
        partitions: dict[RelationName, PartitionBy | None] = {}
        for source in mapping.sources:
            for rule in source.rules:
                example = RelationName(rule.pattern.namespace, rule.pattern.name)
                try:
                    target = target_of(source, rule, example, mapping.target_namespace)
                    sid = None if rule.pattern.is_pattern else sid_of(source, rule, example)
                except MappingError as exc:
                    raise self._error(("sources",), exc.message, exc.hint) from None
                if not rule.pattern.is_pattern:
                    writer = TableWriter(source.label, sid, rule.is_disjoint)
                    writers.setdefault(target, []).append(writer)
                    first = partitions.setdefault(target, rule.partition_by)
                    if first != rule.partition_by:
                        raise self._error(
                            ("sources",),
                            f'the rules of target table "{target}" differ in `partition_by`',
                            hint="write the same `partition_by` in each rule of the table",
                        )
        for target, several in writers.items():
            for clash in find_clashes(target, several):
                raise self._error(("sources",), clash.message, clash.hint)
