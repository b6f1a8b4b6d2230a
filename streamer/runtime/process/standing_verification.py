"""Standing verification: in quiet times `run` compares table after table with its source.

A table is due when its `verify_interval` has passed since the end of its last comparison, by this
process or by a command. A verification runs only while its source streams with little lag and no
copy runs. Otherwise the verification stops at once. The next verification continues with the
remaining ranges, as every comparison does.

`streamer.compare` does the work, in a process without Spark. The bookkeeping stores the results
(``streamer.verification``), and every pipeline's health shows the results.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_records import RelationRecord, read_relation_records
from streamer.bookkeeping.sources import read_source_records
from streamer.bookkeeping.verifications import VerificationRecord, read_verifications
from streamer.compare.comparison import Comparison, ComparisonScope, Options, TableResult
from streamer.compare.local_launcher import LocalProcess
from streamer.config.settings import Settings
from streamer.errors.error_classes import StreamerError
from streamer.mapping.relation_names import parse_name
from streamer.mapping.rules import Mapping, SourceMapping, find_rules
from streamer.postgres.secret import Secret
from streamer.runtime.session.supervisor import Supervisor

log = structlog.get_logger()

CHECK_SECONDS: Final = 30.0
"""How often the process checks for tables that are due, and for results of commands."""
BUSY_SECONDS: Final = 1.0
"""How long a due table waits for the next check while its source is busy."""
QUIET_SECONDS: Final = 1.0
"""How often a verification checks that its source is still quiet."""
LAG_SECONDS_MAX: Final = 10.0
"""A source with more lag is not quiet."""
RETRY_SECONDS: Final = 300.0
"""The longest pause before the next verification of an undecided table."""


@dataclass(frozen=True, slots=True)
class VerificationSettings:
    """``interval``: seconds between verifications of a table, unless its rule differs; 0: none."""

    interval: float
    rows_per_second: float
    target_url: Secret

    @classmethod
    def of(cls, settings: Settings) -> "VerificationSettings":
        rates = (settings.sync.rows_per_second, settings.verify_rows_per_second)
        rate = min(rate for rate in rates if rate is not None)
        return cls(settings.verify_interval, rate, settings.target.url)

    def __repr__(self) -> str:
        return "VerificationSettings(…)"


@dataclass(frozen=True, slots=True)
class DueTable:
    """A table to verify from ``at`` on."""

    source: SourceMapping
    relation: RelationRecord
    at: datetime


def due_at(interval: float, last: VerificationRecord | None, began_at: datetime) -> datetime | None:
    """Return when a table is due; None for never. Pure.

    *began_at*: the start of this process, when a table that was never verified is due.
    """
    if not interval:
        return None
    if last is None:
        return began_at
    seconds = interval if last.is_decided else min(interval, RETRY_SECONDS)
    return last.ended_at + timedelta(seconds=seconds)


def is_quiet(*, is_copying: bool, is_throttling: bool, lag_seconds: float) -> bool:
    """Return whether a source that streams is quiet enough for a verification. Pure.

    *is_copying*: a copy of any source runs, because copies share the target. *is_throttling*: the
    source retains too much WAL.
    """
    return not is_copying and not is_throttling and lag_seconds <= LAG_SECONDS_MAX


class Verification:
    """Verifies the tables of the sources that this process streams."""

    def __init__(
        self,
        settings: VerificationSettings,
        bookkeeping: Bookkeeping,
        mapping: Callable[[], Mapping],
        supervisors: Sequence[Supervisor],
    ) -> None:
        self._settings = settings
        self._mapping = mapping
        self._supervisors = supervisors
        self._bookkeeping = bookkeeping
        self._began_at = datetime.now(UTC)
        self._failed_at: dict[int, datetime] = {}
        """When a server error last ended the verification of a relation."""

    async def run(self) -> None:
        """Verify until cancelled."""
        while True:
            now = datetime.now(UTC)
            for table in sorted(await self._find_due_tables(), key=lambda table: table.at):
                if table.at <= now and self._is_quiet(table.source):
                    await self._verify(table)
            await asyncio.sleep(self._pause(await self._find_due_tables()))

    def _pause(self, due: Iterable[DueTable]) -> float:
        """Return the seconds until the next check."""
        now = datetime.now(UTC)
        waits = [(table.at - now).total_seconds() for table in due]
        return min([CHECK_SECONDS, *(max(BUSY_SECONDS, wait) for wait in waits)])

    # ---- what is due ---------------------------------------------------------------------------

    async def _find_due_tables(self) -> list[DueTable]:
        """Copy the stored results to the health of the sources, and return the time at which each
        table is due.
        """
        due: list[DueTable] = []
        try:
            records = await read_verifications(self._bookkeeping)
            if not records and not any(map(self._verifies, self._supervisors)):
                return due
            sources = {r.label: r.source_id for r in await read_source_records(self._bookkeeping)}
            for supervisor in list(self._supervisors):
                if (source_id := sources.get(supervisor.source.label)) is not None:
                    relations = await read_relation_records(self._bookkeeping, source_id)
                    supervisor.health.verifications = {
                        relation.source: records[relation.relation_id]
                        for relation in relations
                        if relation.relation_id in records
                    }
                    due += self._due(supervisor.source, relations, records)
        except StreamerError as exc:  # another task reports the state of the target
            log.debug("cannot read the tables to verify", error=str(exc))
        return due

    def _verifies(self, supervisor: Supervisor) -> bool:
        return bool(self._settings.interval) or any(
            rule.verify_interval for rule in supervisor.source.rules
        )

    def _due(
        self,
        source: SourceMapping,
        relations: Sequence[RelationRecord],
        records: dict[int, VerificationRecord],
    ) -> Iterator[DueTable]:
        """Yield the tables of a source with a verification interval."""
        rules = find_rules(source, [parse_name(relation.source) for relation in relations])
        for relation in relations:
            rule = rules.get(parse_name(relation.source))
            interval = self._settings.interval
            if rule is not None and rule.verify_interval is not None:
                interval = rule.verify_interval
            at = due_at(interval, records.get(relation.relation_id), self._began_at)
            if at is None or relation.state != "ready":
                continue
            failed = self._failed_at.get(relation.relation_id)
            if failed is not None:
                at = max(at, failed + timedelta(seconds=min(interval, RETRY_SECONDS)))
            yield DueTable(source, relation, at)

    def _is_quiet(self, source: SourceMapping) -> bool:
        supervisors = list(self._supervisors)
        owner = next((item for item in supervisors if item.source.label == source.label), None)
        if owner is None or owner.pipeline is None or not owner.pipeline.is_streaming:
            return False
        return is_quiet(
            is_copying=any(item.is_copying for item in supervisors),
            is_throttling=owner.guard.is_throttling,
            lag_seconds=owner.pipeline.lag_seconds(),
        )

    # ---- the work ------------------------------------------------------------------------------

    async def _verify(self, table: DueTable) -> None:
        """Verify a table; stop once the source is no longer quiet."""
        comparison = Comparison(
            self._settings.target_url,
            self._mapping(),
            LocalProcess(is_background=True),
            Options(1, self._settings.rows_per_second, continues=True, purpose="verification"),
        )
        relation_id = table.relation.relation_id
        of_source = ComparisonScope.of(table.source)
        scope = replace(of_source, relation_ids=frozenset({relation_id}))
        comparing = asyncio.create_task(comparison.run(scope), name="verification")
        try:
            while not comparing.done() and self._is_quiet(table.source):
                await asyncio.wait([comparing], timeout=QUIET_SECONDS)
        finally:
            comparing.cancel()
            await asyncio.wait([comparing])
        if comparing.cancelled():
            return
        try:
            results = comparing.result()
        except StreamerError as exc:
            self._failed_at[relation_id] = datetime.now(UTC)
            log.warning(
                "verification failed",
                source=table.source.label,
                table=table.relation.source,
                error=str(exc),
            )
            return
        self._failed_at.pop(relation_id, None)
        await self._show(table)
        for result in results:
            _report(table.source, result)

    async def _show(self, table: DueTable) -> None:
        """Copy the result that the comparison stored to the health of the source."""
        relation_id = table.relation.relation_id
        with contextlib.suppress(StreamerError):  # the next check shows the result
            records = await read_verifications(self._bookkeeping, relation_id)
            for supervisor in self._supervisors:
                if supervisor.source.label == table.source.label and relation_id in records:
                    supervisor.health.verifications[table.relation.source] = records[relation_id]


def _report(source: SourceMapping, result: TableResult) -> None:
    names = {"source": source.label, "table": result.source}
    if result.is_different:
        log.error(
            "table differs from its source",
            **names,
            missing=result.missing,
            extra=result.extra,
            different=result.different,
            code="compare",
        )
    elif result.error is not None:
        log.warning("table cannot be verified", **names, error=result.error, code="compare")
    elif result.undecided:
        log.info("verification inconclusive", **names, undecided=result.undecided)
    else:
        log.info("table verified", **names, rows=result.rows_source, seconds=result.seconds)
