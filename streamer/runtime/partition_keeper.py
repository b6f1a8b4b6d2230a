"""Keeps the time partitions of target tables: creates partitions ahead, and removes old partitions.

The task checks every minute. A removal is final, so the task uses the earlier of two clocks: of the
process and of the target. A lock that does not come within seconds ends the attempt, and the next
check tries again.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import structlog

from streamer.apply.rows.make_plan import check_partitioning
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.sources import read_source_records
from streamer.errors.error_classes import StreamerError, TargetConnectionError
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rules import Mapping, RelationMapping, find_rules
from streamer.observability.metrics import Metrics
from streamer.target.catalog import read_relation
from streamer.target.connection import (
    TargetAddress,
    TargetConnection,
    may_replace_role,
    target_connection,
)
from streamer.target.target_partitions import (
    create_partitions,
    refuse_taken_names,
    remove_expired,
)
from streamer.util.backoff import Backoff

log = structlog.get_logger()

CHECK_SECONDS: Final = 60.0


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
        """Check at the start, and then every minute."""
        while True:
            try:
                tables = await self._find_tables()
                if tables:
                    async with target_connection(self._address, "streamer partitions") as target:
                        await self._keep(target, tables)
            except StreamerError as exc:
                self._report(exc)
            await asyncio.sleep(CHECK_SECONDS)

    async def _find_tables(self) -> dict[RelationName, RelationMapping]:
        """Return a relation of each target table with time partitions, by the table's name."""
        sources = [s for s in self._read_mapping().sources if any(r.partition_by for r in s.rules)]
        if not sources:
            return {}
        ids = {r.label: r.source_id for r in await read_source_records(self._bookkeeping)}
        tables: dict[RelationName, RelationMapping] = {}
        for source in sources:
            if source.label not in ids:
                continue
            records = await read_relation_records(self._bookkeeping, ids[source.label])
            rules = find_rules(source, [parse_name(record.source) for record in records])
            for record in records:
                name, target = parse_name(record.source), parse_name(record.target)
                if name in rules and rules[name].partition_by is not None:
                    tables[target] = RelationMapping(name, target, rules[name])
        return tables

    async def _keep(
        self, target: TargetConnection, tables: dict[RelationName, RelationMapping]
    ) -> None:
        now = min(datetime.now(UTC), await target.fetch_value("select pg_catalog.now()"))
        if await may_replace_role(target):
            # The target's own triggers do not act on rows that change their partition.
            await target.execute("set session_replication_role = replica")
        for name, mapping in tables.items():
            try:
                await keep_partitions(target, name, mapping, now)
            except TargetConnectionError:
                raise
            except StreamerError as exc:
                exc.add_note(f'while keeping the partitions of target table "{name}"')
                self._report(exc)

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
