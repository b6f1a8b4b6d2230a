"""Keeps the time partitions of target tables: creates partitions ahead, and removes old partitions.

The task checks every minute. A removal is final, so the task uses the earlier of two clocks: of the
process and of the target. A lock that does not come within seconds ends the attempt, and the next
check tries again. The bookkeeping stores an error that needs an operator, for the list of problems.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from streamer.apply.rows.make_plan import check_partitioning
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.partition_errors import read_partition_errors, set_partition_errors
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.sources import read_source_records
from streamer.errors.error_classes import Retry, StreamerError, TargetConnectionError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rules import Mapping, RelationMapping, SourceMapping, find_rules
from streamer.observability.metrics import Metrics
from streamer.target.catalog import read_relation
from streamer.target.connection import (
    TargetAddress,
    TargetConnection,
    may_replace_role,
    target_connection,
)
from streamer.target.missing_grants import advise_grants
from streamer.target.target_partitions import (
    create_partitions,
    refuse_taken_names,
    remove_expired,
)
from streamer.util.backoff import Backoff

log = structlog.get_logger()

CHECK_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 10.0
"""The time between two checks while an error needs an operator."""


@dataclass(frozen=True, slots=True)
class KeptTable:
    """A target table with time partitions: a mapping to the table, and all its relations."""

    mapping: RelationMapping
    relation_ids: list[int]


class PartitionKeeper:
    """Checks periodically the tables with `partition_by`. The owner calls `run`."""

    def __init__(
        self,
        address: TargetAddress,
        bookkeeping: Bookkeeping,
        read_mapping: Callable[[], Mapping],
        metrics: Metrics,
    ) -> None:
        self._address = address
        self._bookkeeping = bookkeeping
        self._read_mapping = read_mapping
        self._metrics = metrics
        self._backoff = Backoff()

    async def run(self) -> None:
        """Check at the start, and then every minute; sooner while an operator mends an error."""
        while True:
            has_errors = False
            try:
                has_errors = await self._check()
            except StreamerError as exc:
                self._report(exc)
            await asyncio.sleep(RETRY_SECONDS if has_errors else CHECK_SECONDS)

    async def _check(self) -> bool:
        """Check all tables, and store errors that need an operator; return whether any does."""
        ids = {r.label: r.source_id for r in await read_source_records(self._bookkeeping)}
        led = {ids[s.label]: s for s in self._read_mapping().sources if s.label in ids}
        errors: dict[int, ErrorReport] = {}
        if tables := await self._find_tables(led):
            async with target_connection(self._address, "streamer partitions") as target:
                errors = await self._keep(target, tables)
        stored = {
            record.relation_id: record.partition_error
            for record in await read_partition_errors(self._bookkeeping)
            if record.source_id in led
        }
        changed = {
            relation_id: errors.get(relation_id)
            for relation_id in stored.keys() | errors.keys()
            if stored.get(relation_id) != errors.get(relation_id)
        }
        await set_partition_errors(self._bookkeeping, changed)
        return bool(errors)

    async def _find_tables(self, led: dict[int, SourceMapping]) -> dict[RelationName, KeptTable]:
        """Return the target tables with time partitions, by name. *led*: the sources, by id."""
        tables: dict[RelationName, KeptTable] = {}
        for source_id, source in led.items():
            if not any(rule.partition_by for rule in source.rules):
                continue
            records = await read_relation_records(self._bookkeeping, source_id)
            rules = find_rules(source, [parse_name(record.source) for record in records])
            for record in records:
                name, target = parse_name(record.source), parse_name(record.target)
                if name in rules and rules[name].partition_by is not None:
                    mapping = RelationMapping(name, target, rules[name])
                    tables.setdefault(target, KeptTable(mapping, [])).relation_ids.append(
                        record.relation_id
                    )
        return tables

    async def _keep(
        self, target: TargetConnection, tables: dict[RelationName, KeptTable]
    ) -> dict[int, ErrorReport]:
        """Create and remove partitions. Return the errors that need an operator, by relation id."""
        now = min(datetime.now(UTC), await target.fetch_value("select pg_catalog.now()"))
        if await may_replace_role(target):
            # The target's own triggers do not act on rows that change their partition.
            await target.execute("set session_replication_role = replica")
        errors: dict[int, ErrorReport] = {}
        for name, table in tables.items():
            try:
                await keep_partitions(target, name, table.mapping, now)
            except TargetConnectionError:
                raise
            except StreamerError as exc:
                await advise_grants(exc, target, [table.mapping])
                if exc.retry is not Retry.TIMED:
                    errors |= dict.fromkeys(table.relation_ids, ErrorReport.of(exc))
                exc.add_note(f'while keeping the partitions of target table "{name}"')
                self._report(exc)
        return errors

    def _report(self, exc: StreamerError) -> None:
        self._metrics.count_error(exc)
        self._backoff.log(log, "partitions cannot be changed yet", exc)


async def keep_partitions(
    target: TargetConnection, name: RelationName, mapping: RelationMapping, now: datetime
) -> None:
    """Create and remove partitions of a target table, as its rule says for *now*.

    Raises TargetSchemaError for a table that is not partitioned as the rule says. Taken names of
    partitions are an error, too, after all other work.
    """
    rule = mapping.rule.partition_by
    relation = await read_relation(target, name)
    if rule is None or relation is None:
        return
    check_partitioning(mapping, relation)
    for partition in await create_partitions(target, name, rule, now):
        log.info("partition created", target=str(name), partition=str(partition))
    for partition in await remove_expired(target, name, rule, now):
        log.info(
            "old partition removed",
            target=str(name),
            partition=str(partition),
            on_expired=rule.on_expired.value,
        )
    await refuse_taken_names(target, name, rule, now)
