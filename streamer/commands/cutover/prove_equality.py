"""Whether the target of a cut-over contains the rows of its source.

A comparison reads all rows while programs write. Before that comparison, the command reads the
change counters of both servers (`streamer.compare.change_counters`). So the comparison in the
downtime reads only the changes since then.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.server_of_run import connection_of_run
from streamer.commands.compare_command import comparing
from streamer.commands.compare_command import describe as describe_result
from streamer.compare.change_counters import (
    ChangeCounters,
    Extent,
    ServerCounters,
    extent_of,
    late_sql,
    server_sql,
    table_counters,
    tables_sql,
)
from streamer.compare.comparison import Comparison, ComparisonScope, Options, TableResult
from streamer.config.settings import Settings
from streamer.errors.command_lines import some_of
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import Mapping, RelationMapping, SourceMapping, resolve
from streamer.postgres.quoting import quote_qualified
from streamer.source.catalog import read_relation_names
from streamer.source.connection import Connection, fetch_all, fetch_one

if TYPE_CHECKING:
    from streamer.compare.process_or_spark import ComparisonRunner

_COUNT_SQL: Final = "select pg_catalog.count(*) as number from {}"
NAMED_MAX: Final = 20
"""The maximum number of tables that an outcome names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The compared tables with their results, and the skipped tables, which did not change.

    ``seconds``: the time of the comparison. ``skip_seconds``: the time to read the change counters
    of all tables.
    """

    compared: list[tuple[TableResult, Extent]]
    skipped: list[str]
    skip_seconds: float = 0.0
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """Return the tables that are not equal."""
        return [
            f'table "{result.source}": {describe_result(result)}'
            for result, _ in self.compared
            if not result.is_equal
        ]

    def describe(self) -> str:
        """Return the outcome in words."""
        extents = []
        for extent, label in ((Extent.CHANGES, "changes"), (Extent.WHOLE, "all rows")):
            if names := [result.source for result, kind in self.compared if kind is extent]:
                extents.append(f"{label} of {_named(names)}")
        parts = [f"compared in {self.seconds:.1f} s: {', '.join(extents)}"] if extents else []
        if self.skipped:
            parts.append(
                f"unchanged since the check (verified in {self.skip_seconds:.1f} s): "
                f"{_named(self.skipped)}"
            )
        return f"every table is equal; {'; '.join(parts)}"


def _named(names: Sequence[str]) -> str:
    listed = some_of(sorted(names), NAMED_MAX)
    return f"{len(names)} table{'' if len(names) == 1 else 's'} ({listed})"


class Equality:
    """Compares the tables of a source. Use it as a context manager: Spark starts at most once."""

    def __init__(
        self, settings: Settings, mapping: Mapping, source: SourceMapping, bookkeeping: Bookkeeping
    ) -> None:
        self._settings = settings
        self._mapping = mapping
        self._source = source
        self._bookkeeping = bookkeeping
        self._runner: ComparisonRunner | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Equality":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def mappings(self, plain: Connection) -> list[RelationMapping]:
        """Return the tables of the source with their targets."""
        source = self._source
        names = {*await read_relation_names(plain, source), *source.exact_names}
        return resolve(source, names, self._settings.target.schema_)

    # ---- rows ----------------------------------------------------------------------------------

    async def compare_all(self) -> Answer:
        """Compare all rows of every table."""
        began = time.monotonic()
        scope = ComparisonScope.of(self._source)
        results = await self._compare(scope)
        compared = [(result, Extent.WHOLE) for result in results]
        return Answer(compared, [], seconds=time.monotonic() - began)

    async def compare_changes(
        self, source_id: int, earlier: ChangeCounters, stopped_at: str | None
    ) -> Answer:
        """Compare the changes since the counters *earlier*, read before all rows were found equal.

        *stopped_at*: when the source began to refuse writes of new sessions, if known.
        """
        began = time.monotonic()
        now = await self.read_counters(source_id, stopped_at)
        records = await read_relation_records(self._bookkeeping, source_id)
        extents = {record.relation_id: extent_of(record.source, earlier, now) for record in records}
        skipped = [r.source for r in records if extents[r.relation_id] is Extent.NOTHING]
        due = [record for record in records if extents[record.relation_id] is not Extent.NOTHING]
        skip_seconds = time.monotonic() - began
        if not due:
            return Answer([], skipped, skip_seconds)
        horizons = earlier.source.horizon, earlier.target.horizon
        due_ids = frozenset(record.relation_id for record in due)
        scope = replace(ComparisonScope.of(self._source), relation_ids=due_ids)
        changed = (number for number, extent in extents.items() if extent is Extent.CHANGES)
        results = await self._compare(scope, dict.fromkeys(changed, horizons))
        compared = [(result, extents[result.relation_id]) for result in results]
        return Answer(compared, skipped, skip_seconds, time.monotonic() - began - skip_seconds)

    async def _compare(
        self, scope: ComparisonScope, since: dict[int, tuple[int, int]] | None = None
    ) -> list[TableResult]:
        if self._runner is None:
            self._runner = await self._stack.enter_async_context(comparing(self._settings))
        comparison = Comparison(
            self._settings.target.url,
            self._mapping,
            self._runner,
            Options(jobs=self._settings.sync.jobs, since=since or {}),
        )
        return await comparison.run(scope)

    async def count(self) -> list[str]:
        """Return the tables whose numbers of rows differ."""
        different = []
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            mappings = await self.mappings(plain)
            if obstacles := uncountable(mappings):
                return obstacles
            for mapping in mappings:
                source_table = quote_qualified(mapping.source.namespace, mapping.source.name)
                target_table = quote_qualified(mapping.target.namespace, mapping.target.name)
                row = await fetch_one(plain, _COUNT_SQL.format(source_table))
                async with self._bookkeeping.connection() as target:
                    number = await target.fetch_value(_COUNT_SQL.format(target_table))
                if row["number"] != number:
                    different.append(
                        f'table "{mapping.source}" has {row["number"]} rows, the target {number}'
                    )
        return different

    # ---- change counters -----------------------------------------------------------------------

    async def read_counters(self, source_id: int, stopped_at: str | None = None) -> ChangeCounters:
        """Return the change counters of all tables. Raises SourceError, TargetError."""
        records = await read_relation_records(self._bookkeeping, source_id)
        positions = {record.source: str(record.end_lsn) for record in records}
        async with (
            connection_of_run(self._source, self._bookkeeping) as plain,
            self._bookkeeping.connection() as target,
        ):
            mappings = await self.mappings(plain)
            names = [mapping.source for mapping in mappings]
            targets = [mapping.target for mapping in mappings]
            # This query comes first. The counters below then include the changes of every session
            # that the query does not report.
            is_late = (await fetch_one(plain, late_sql(stopped_at).encode()))["late"]
            is_late = is_late or await target.fetch_value(late_sql(None))
            source_server = await fetch_one(plain, server_sql().encode())
            target_server = dict((await target.fetch(server_sql()))[0])
            rows = await fetch_all(plain, tables_sql(names).encode())
            target_rows = await target.fetch(tables_sql(targets))
        counters = table_counters(
            mappings,
            positions,
            [(row["number"], row["definition"], row["changes"]) for row in rows],
            [(row["number"], row["definition"], row["changes"]) for row in target_rows],
        )
        return ChangeCounters(
            ServerCounters(**source_server), ServerCounters(**target_server), counters, not is_late
        )


def uncountable(mappings: list[RelationMapping]) -> list[str]:
    """Return the tables whose target rows do not correspond one to one to source rows. Pure."""
    return [
        f'rows of table "{mapping.source}" cannot be counted; use --compare changes'
        for mapping in mappings
        if mapping.type is not TableType.CLONE
        or mapping.rule.may_lack_rows
        or mapping.sid is not None
        or mapping.rule.is_disjoint
    ]
