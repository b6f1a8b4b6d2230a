"""Runs a comparison: reads definitions, plans ranges, runs the job, and returns the result.

A comparison first reads the definitions of both sides. Then it cuts ranges at keys from a sample of
the source, and stores the ranges in the target (``streamer.compared_range``). Tasks mark equal
ranges. On request, a comparison of the same tables continues with the unmarked ranges of an
interrupted comparison. After a copy, a repair, a rewrite or a new definition of the table, a new
comparison begins.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from streamer.bookkeeping import comparisons
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import require_installed
from streamer.bookkeeping.comparisons import (
    ComparisonRecord,
    RangeRecord,
    begin_comparison,
    end_comparison,
    find_comparison,
)
from streamer.bookkeeping.relation_definitions import read_others
from streamer.bookkeeping.relation_records import RelationRecord, read_relation_records
from streamer.bookkeeping.server_of_run import connection_of_run
from streamer.bookkeeping.sources import SourceRecord, read_source_records
from streamer.bookkeeping.verifications import VerificationRecord, store_verifications
from streamer.compare.build_compared_table import TableFacts, build_table
from streamer.compare.change_counters import tables_sql
from streamer.compare.compared_table import ComparedTable
from streamer.compare.cut_ranges import (
    RANGE_ROWS,
    CutRange,
    count_buckets,
    count_page_readers,
    count_parts,
    count_ranges,
    cut_ranges,
    sampled_percent,
)
from streamer.compare.read_both_definitions import read_differences
from streamer.compare.readings import ComparisonEnds, Unit
from streamer.compare.row_hashes import PROBE_SQL, HashKind, choose_hash
from streamer.control.resync_options import KeySet
from streamer.copy.parts.ctid_ranges import task_rate
from streamer.errors.error_classes import (
    ComparisonError,
    MappingError,
    SourceError,
    StreamerError,
)
from streamer.mapping.expressions import Expression
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import Mapping, RelationMapping, SourceMapping, resolve
from streamer.mapping.scope import Scope
from streamer.postgres.credentials import passwords_renewed
from streamer.postgres.key_ranges import KeyRange
from streamer.postgres.quoting import quote_qualified
from streamer.postgres.secret import Secret
from streamer.schema.table_difference import DefinitionDifference
from streamer.schema_changes.create_tables import published_relation
from streamer.source.catalog import SourceRelation, flush_wal, read_relations
from streamer.source.connection import Connection, fetch_all, fetch_one, login_of_source
from streamer.source.tables import distant_keys
from streamer.target.catalog import read_relation
from streamer.target.connection import TargetAddress, TargetConnection, login_of_target
from streamer.util.lsn import Lsn

if TYPE_CHECKING:
    from streamer.source.reached_server import ServerIdentity

log = structlog.get_logger()

JUDGE_SECONDS: Final = 120.0
EXPIRY_DISTANCE: Final = timedelta(days=1)
"""Retention may remove rows while a comparison runs. So the comparison leaves out rows that expire
within this time.
"""
COUNTED_ROWS_MAX: Final = 10_000_000

_BYTES_SQL: Final = """
select coalesce(pg_catalog.pg_table_size({oid}), 0)
       + coalesce((select pg_catalog.sum(pg_catalog.pg_table_size(relid))
                     from pg_catalog.pg_partition_tree({oid}) where isleaf and relid <> {oid}), 0)
       as bytes
"""


@dataclass(frozen=True, slots=True)
class ComparisonScope(Scope):
    """The rows of a comparison. ``where``: a condition over columns of the source."""

    where: Expression | None = None
    relation_ids: frozenset[int] | None = None
    """The ids of the relations to compare, in streamer.relation; None for all relations."""


@dataclass(frozen=True, slots=True)
class Options:
    """``seconds``: how long tasks read undecided keys again. ``continues``: omit the
    ranges that an interrupted comparison found equal.
    """

    jobs: int
    rows_per_second: float | None = None
    seconds: float = JUDGE_SECONDS
    with_values: bool = False
    report: Path | None = None
    sql: Path | None = None
    """The file for statements that make the target equal."""
    continues: bool = False
    keys_max: int = 0
    """The maximum number of differing rows for which a result contains keys."""
    purpose: str = ""
    """Comparisons of different purposes do not share ranges."""
    definitions: bool = False
    """Compare the definitions of tables, too."""
    since: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The first transactions of source and target that may have changed rows since an earlier
    comparison, by relation id. That comparison has found older rows equal.
    """


class JobRunner(Protocol):
    """Runs a job with Spark (`SparkLauncher`), in a process (`LocalProcess`), or with either
    (`ComparisonRunner`).
    """

    async def submit(self, job: dict[str, Any]) -> list[dict[str, Any]]: ...


@dataclass(slots=True)
class TableResult:
    """The result for a table of a source. ``undecided``: keys that changed in each reading.
    ``error``: the reason why the counts are missing. ``continued_from``: the beginning of the
    interrupted comparison that read some ranges; None if this comparison has read all ranges.
    """

    source: str
    target: str
    database: str
    sid: str | None
    relation_id: int
    rows_source: int = 0
    rows_target: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    undecided: int = 0
    lsn: str | None = None
    seconds: float = 0.0
    error: str | None = None
    continued_from: str | None = None
    sample: list[dict[str, Any]] = field(default_factory=list)
    keys: KeySet | None = None
    """The keys of all rows that differ; None if too many, or without a key."""
    definitions: list[DefinitionDifference] | None = None
    """The differences of the definitions; None if these were not compared."""
    repaired: int | None = None
    """How many rows a repair has made equal; None without a repair."""
    row_sid: str | None = None
    """The sid of the table's rows."""

    @property
    def is_different(self) -> bool:
        return bool(self.missing or self.extra or self.different)

    @property
    def is_equal(self) -> bool:
        return not (self.is_different or self.undecided or self.error)

    @property
    def differing(self) -> int:
        return self.missing + self.extra + self.different

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "keys"}
        differences = fields.pop("definitions")
        if differences is not None:
            fields["definitions"] = {
                "equal": not differences,
                "differences": [difference.to_json() for difference in differences],
            }
        return {**dict(list(fields.items())[:4]), "equal": self.is_equal, **fields}


@dataclass(slots=True)
class _ScopedTable:
    """A table of the scope, with its size and, finally, its result."""

    source: SourceMapping
    record: RelationRecord
    result: TableResult
    table: ComparedTable | None = None
    is_unread: bool = False
    """The source could not be read, so the table may still be equal."""
    rows: int = 0
    size_bytes: int = 0
    storage: tuple[str, ...] = ()
    """Definition and files of the table on both sides, as hashes."""

    @property
    def identity(self) -> str:
        """The facts on which the result for a range depends, except changes of rows."""
        assert self.table is not None
        table = self.table.to_json() | {"buckets": 0}
        return json.dumps([table, self.record.attempt, self.storage], sort_keys=True)


class Comparison:
    """Compares tables once."""

    def __init__(
        self,
        target_url: Secret,
        mapping: Mapping,
        runner: JobRunner,
        options: Options,
    ) -> None:
        self._bookkeeping = Bookkeeping(TargetAddress.parse(target_url), "streamer compare")
        self._target_url = target_url
        self._mapping = mapping
        self._runner = runner
        self._options = options
        self._sources: dict[int, tuple[str, ServerIdentity]] = {}
        self._source_urls: list[Secret] = []
        self._lsns: dict[int, Lsn] = {}
        self._began_at: datetime | None = None
        self._comparison_id: int | None = None

    async def run(self, scope: ComparisonScope) -> list[TableResult]:
        """Compare the tables of *scope*; return a result for each.

        Raises MappingError if the scope has no table, SourceError, TargetError, SparkJobError.
        """
        began = time.monotonic()
        try:
            items, failure = await self._find_tables(scope)
            if failure is not None and all(item.is_unread for item in items):
                raise failure
            compared = [item for item in items if item.table is not None]
            if compared:
                await self._compare(compared)
            for item in items:
                item.result.seconds = round(time.monotonic() - began, 3)
            if scope.where is None:
                await self._store_results(items)
            return [item.result for item in items]
        finally:
            await self._bookkeeping.close()

    async def count_ranges(self) -> tuple[int, int] | None:
        """Return the number of equal ranges and the number of all ranges; None before the plan.

        Raises TargetError.
        """
        if self._comparison_id is None:
            return None
        return await comparisons.count_ranges(self._bookkeeping, self._comparison_id)

    async def _store_results(self, items: Sequence[_ScopedTable]) -> None:
        """Store the results, for `status`, metrics and the standing verification."""
        now = datetime.now(UTC)
        await store_verifications(
            self._bookkeeping,
            (
                VerificationRecord(
                    item.record.relation_id,
                    now,
                    self._began_at if item.result.is_equal else None,
                    Lsn.parse(item.result.lsn)
                    if item.result.is_equal and item.result.lsn
                    else None,
                    item.result.differing,
                    item.result.undecided,
                    item.result.error,
                )
                for item in items
                if not item.is_unread
            ),
        )

    # ---- definitions ---------------------------------------------------------------------------

    async def _find_tables(
        self, scope: ComparisonScope
    ) -> tuple[list[_ScopedTable], SourceError | None]:
        """Return the tables of *scope*, and why a source cannot be read."""
        await require_installed(self._bookkeeping)
        records = {record.label: record for record in await read_source_records(self._bookkeeping)}
        items: list[_ScopedTable] = []
        failure: SourceError | None = None
        for source in scope.sources_of_tables(self._mapping):
            record = records.get(source.label)
            if record is None:
                continue
            relations = await read_relation_records(self._bookkeeping, record.source_id)
            source_items = [
                _ScopedTable(
                    source,
                    relation,
                    TableResult(
                        relation.source,
                        relation.target,
                        source.database,
                        source.sid,
                        relation.relation_id,
                        row_sid=relation.row_sid,
                    ),
                )
                for relation in scope.select(source, ((r.source, r.row_sid, r) for r in relations))
                if scope.relation_ids is None or relation.relation_id in scope.relation_ids
            ]
            items += source_items
            try:
                if source_items:
                    await self._read_definitions(source, record, source_items, scope.where)
            except SourceError as exc:  # the comparison continues with the remaining sources
                failure = exc
                for item in source_items:
                    item.table, item.is_unread, item.result.error = None, True, str(exc)
        if not items:
            named = " " + ", ".join(f'"{table}"' for table in scope.tables) if scope.tables else ""
            raise MappingError(
                f"no table{named} is streamed",
                hint="`streamer status` lists the tables that are streamed",
            )
        return items, failure

    async def _read_definitions(
        self,
        source: SourceMapping,
        record: SourceRecord,
        items: list[_ScopedTable],
        where: Expression | None,
    ) -> None:
        """Read the definitions of a source's tables on both sides."""
        server = (record.system_identifier or "", record.timeline or 0, 0)
        async with connection_of_run(source, self._bookkeeping) as plain:
            self._source_urls.append(source.url)
            self._sources[record.source_id] = (await login_of_source(source), server)
            relations = await read_relations(plain, [parse_name(f.record.source) for f in items])
            rules = _rules(source, relations, self._mapping.target_namespace)
            self._lsns[record.source_id] = await flush_wal(plain)
            async with self._bookkeeping.connection() as target:
                kind = await agree_on_hash(plain, target)
                for item in items:
                    try:
                        name = parse_name(item.record.source)
                        rule = rules.get(name)
                        if rule is None:
                            place = "in the mapping" if name in relations else "at the source"
                            raise ComparisonError(f'table "{name}" does not exist {place}')
                        target_table = await read_relation(target, rule.target)
                        if target_table is None:
                            raise ComparisonError(f'target table "{rule.target}" does not exist')
                        facts = TableFacts(
                            relation_id=item.record.relation_id,
                            source_id=record.source_id,
                            database=source.database,
                            sid=source.sid,
                            mapping=rule,
                            relation=relations[name],
                            published=published_relation(relations[name]),
                            target=target_table,
                            where=where,
                            copy_where=rule.rule.copy_where,
                            kept=rule.kept_rows(datetime.now(UTC) + EXPIRY_DISTANCE),
                        )
                        if self._options.definitions:
                            neighbours = await read_others(target, item.record.relation_id)
                            item.result.definitions = await read_differences(
                                plain,
                                target,
                                facts.relation.oid,
                                rule,
                                target_table,
                                others=rules.values(),
                                is_shared=target_table.is_shared(rule) and bool(neighbours),
                            )
                        item.rows = await estimate_rows(plain, facts.relation)
                        item.size_bytes = await estimate_bytes(plain, facts.relation)
                        table = build_table(facts, kind, count_buckets(item.rows))
                        table = await choose_order(plain, target, facts, table)
                        item.table = table.since(*self._options.since.get(table.relation_id, ()))
                        self._check_statements(item.table)
                    except StreamerError as exc:
                        item.result.error = str(exc)
                await _read_storage([item for item in items if item.table], plain, target)

    def _check_statements(self, table: ComparedTable) -> None:
        """Raise ComparisonError if no SQL statements can make the table equal."""
        if self._options.sql is not None and table.type == TableType.HISTORY:
            raise ComparisonError(
                f'no SQL statements can repair history table "{table.target_name}"',
                hint="its versions need the times of the changes; run `streamer repair` without"
                " --sql",
            )
        if self._options.sql is not None and table.has_char:
            raise ComparisonError(
                f'no SQL statements can repair table "{table.target_name}", because of a column'
                ' of type "char"',
                hint="run `streamer repair` without --sql",
            )

    # ---- ranges --------------------------------------------------------------------------------

    async def _compare(self, group: Sequence[_ScopedTable]) -> None:
        tables = [item.table for item in group if item.table is not None]
        record = await self._begin(group)
        self._began_at, self._comparison_id = record.began_at, record.comparison_id
        remaining = [r for r in record.ranges if not r.is_done]
        if len(remaining) < len(record.ranges):
            log.info(
                "continuing an interrupted comparison",
                ranges=len(record.ranges),
                done=len(record.ranges) - len(remaining),
            )
        size_bytes = sum(item.size_bytes for item in group)
        unordered_sizes = [
            item.size_bytes for item in group if item.table and not item.table.is_ordered
        ]
        async with passwords_renewed(self._target_url, *self._source_urls):
            results = await self._run_job(tables, record, remaining, size_bytes, unordered_sizes)
        by_id = {item.record.relation_id: item.result for item in group}
        tables_by_id = {table.relation_id: table for table in tables}
        for item in group:
            assert item.table is not None
            item.result.lsn = str(record.lsns[item.table.source_id])
        for row in results:
            relation_id, keys = row.pop("relation_id"), row.pop("keys", None)
            result = by_id[relation_id]
            if keys is not None:
                table = tables_by_id[relation_id]
                result.keys = KeySet(
                    table.key_columns, table.key_types, tuple(tuple(key) for key in keys)
                )
            for name, value in row.items():
                setattr(result, name, value)
        for compared in record.ranges:
            if compared.is_done:
                result = by_id[compared.relation_id]
                result.rows_source += compared.source_rows or 0
                result.rows_target += compared.target_rows or 0
                result.continued_from = record.began_at.isoformat(timespec="seconds")
        await end_comparison(self._bookkeeping, record.comparison_id)

    async def _begin(self, items: Sequence[_ScopedTable]) -> ComparisonRecord:
        """Return the comparison to continue, or a new comparison."""
        tables = sorted(item.identity for item in items)
        fingerprint = hashlib.sha256("\n".join([self._options.purpose, *tables]).encode())
        if self._options.continues:
            record = await find_comparison(self._bookkeeping, fingerprint.hexdigest())
            if record is not None:
                return record
        ranges = await self._plan(items)
        return await begin_comparison(
            self._bookkeeping, fingerprint.hexdigest(), dict(self._lsns), ranges
        )

    async def _plan(self, items: Sequence[_ScopedTable]) -> list[RangeRecord]:
        planned: list[RangeRecord] = []
        rate = task_rate(self._options.rows_per_second, self._options.jobs, self._options.jobs)
        for source in self._mapping.sources:
            source_items = [item for item in items if item.source is source]
            if not source_items:
                continue
            async with connection_of_run(source, self._bookkeeping) as plain:
                for item in source_items:
                    assert item.table is not None
                    ranges = await cut_table(plain, item.table, item.rows, rate)
                    planned += [
                        RangeRecord(
                            item.record.relation_id, number, unit.lower, unit.upper, cuts=cuts
                        )
                        for number, (unit, cuts) in enumerate(ranges)
                    ]
        return planned

    # ---- the job -------------------------------------------------------------------------------

    async def _run_job(
        self,
        tables: list[ComparedTable],
        record: ComparisonRecord,
        remaining: list[RangeRecord],
        size_bytes: int,
        unordered_sizes: list[int],
    ) -> list[dict[str, Any]]:
        options = self._options
        page_readers, further = count_page_readers(unordered_sizes, options.jobs)
        files = {"report": options.report, "sql": options.sql}
        return await self._runner.submit(
            make_job(
                tables,
                [
                    Unit(r.relation_id, r.number, KeyRange(r.lower, r.upper), r.cuts)
                    for r in remaining
                ],
                ComparisonEnds(await login_of_target(self._target_url), self._sources),
                options.jobs,
                task_rate(
                    options.rows_per_second, options.jobs + further, len(remaining) + further
                ),
                size_bytes=size_bytes,
                page_readers=page_readers,
                comparison_id=record.comparison_id,
                seconds=options.seconds,
                values=options.with_values or options.sql is not None,
                keys_max=options.keys_max,
                **{name: str(path.absolute()) for name, path in files.items() if path is not None},
            )
        )


def make_job(
    tables: Sequence[ComparedTable],
    units: Sequence[Unit],
    ends: ComparisonEnds,
    jobs: int,
    rows_per_second: float | None,
    **options: Any,
) -> dict[str, Any]:
    """Return the job of a comparison, for `JobRunner`. Pure.

    *rows_per_second*: the limit of a task. *options*: values that override the defaults below.
    """
    job = {
        "program": "compare",
        "tables": [table.to_json() for table in tables],
        "units": [unit.to_row() for unit in units],
        "ends": ends.to_json(),
        "jobs": jobs,
        "rows_per_second": rows_per_second,
        "size_bytes": 0,  # the size of all tables
        "page_readers": jobs,  # concurrent statements that read a table page by page
        "comparison_id": None,  # the id in the ledger of equal ranges
        "finds_only": False,  # return the ranges that differ, and judge no rows
        "seconds": 0.0,  # the time to read keys again
        "values": False,  # samples and files contain the values of rows
        "keys_max": 0,
        "report": None,  # paths of files
        "sql": None,
    }
    return job | options


async def _read_storage(
    items: Sequence[_ScopedTable], plain: Connection, target: TargetConnection
) -> None:
    """Read the tables, columns and files from which tasks will read the ranges of *items*."""
    tables = [item.table for item in items if item.table is not None]
    source_sql = tables_sql([parse_name(table.source_name) for table in tables])
    target_sql = tables_sql([parse_name(table.target_name) for table in tables])
    for rows in (await fetch_all(plain, source_sql.encode()), await target.fetch(target_sql)):
        for row in rows:
            items[row["number"] - 1].storage += (row["definition"], row["files"])


def _rules(
    source: SourceMapping, relations: dict[RelationName, SourceRelation], namespace: str
) -> dict[RelationName, RelationMapping]:
    """Apply the rules of *source* to its existing tables."""
    present = tuple(
        rule
        for rule in source.rules
        if rule.pattern.is_pattern
        or RelationName(rule.pattern.namespace, rule.pattern.name) in relations
    )
    mapped = resolve(replace(source, rules=present), relations, namespace)
    return {mapping.source: mapping for mapping in mapped}


async def estimate_rows(plain: Connection, relation: SourceRelation) -> int:
    """Return the approximate number of rows. Without statistics the source counts rows, up to a
    bound.
    """
    if relation.row_count_estimate > 0:
        return relation.row_count_estimate
    quoted = quote_qualified(relation.name.namespace, relation.name.name)
    row = await fetch_one(
        plain,
        f"select count(*) as rows from (select from {quoted} limit {COUNTED_ROWS_MAX}) r".encode(),
    )
    return int(row["rows"])


async def estimate_bytes(plain: Connection, relation: SourceRelation) -> int:
    """Return the approximate size of a table in bytes at the source, with all partitions.

    The statistics need no lock. For a table without statistics, the source has counted rows
    already, with a lock.
    """
    if relation.row_count_estimate > 0:
        return relation.size_bytes
    row = await fetch_one(plain, _BYTES_SQL.format(oid=relation.oid).encode())
    return int(row["bytes"])


async def cut_table(
    plain: Connection, table: ComparedTable, rows: int, rate: float | None
) -> list[CutRange]:
    """Cut a table of about *rows* into ranges and their parts, at keys of a sample of the source.

    *rate*: the rows per second of a task. An unordered table stays whole.
    """
    count = count_ranges(rows, rate)
    if not table.is_ordered or count == 1:
        return [CutRange(KeyRange())]
    parts = count_parts(min(rows // count, RANGE_ROWS))  # bounds the number of keys in memory
    size = await fetch_one(plain, table.size_sql(table.source).encode())
    percent = sampled_percent(rows, size["pages"], count, parts)
    sample_sql = table.sample_sql(table.source, percent, count * parts)
    sample = await fetch_all(plain, sample_sql.encode())
    return cut_ranges([tuple(row["k"]) for row in sample], parts)


_CORRELATION_SQL: Final = """
select max(abs(s.correlation)) as correlation from pg_catalog.pg_stats s
where s.schemaname = $1 and s.tablename = $2 and s.attname = $3
"""


async def choose_order(
    plain: Connection, target: TargetConnection, facts: TableFacts, table: ComparedTable
) -> ComparedTable:
    """Return *table*, unordered if ranges of the key would read most pages of a side."""
    if not table.is_ordered or facts.relation.size_bytes <= distant_keys.INDEXED_BYTES_MAX:
        return table
    is_distant = bool(await distant_keys.find_distant(plain, [facts.relation]))
    if not is_distant:
        target_name = facts.target.name
        correlation = await target.fetch_value(
            _CORRELATION_SQL, target_name.namespace, target_name.name, table.key_columns[0]
        )
        is_distant = correlation is not None and correlation < distant_keys.CORRELATION_MIN
    return replace(table, is_ordered=False) if is_distant else table


async def agree_on_hash(plain: Connection, target: TargetConnection) -> HashKind:
    """Return a hash that both servers compute equally."""
    row = await fetch_one(
        plain,
        f"select current_setting('server_encoding') as encoding, ({PROBE_SQL}) as probe".encode(),
    )
    rows = await target.fetch(
        f"select current_setting('server_encoding') as encoding, ({PROBE_SQL}) as probe"
    )
    return choose_hash((row["encoding"], rows[0]["encoding"]), (row["probe"], rows[0]["probe"]))
