"""``streamer check``: reads the facts of all sources at the same time, then judges them.

A failing source does not prevent the check of the other sources.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from streamer.apply.rows.check_expressions import confirm_expressions
from streamer.commands.check.capacity_findings import check_capacity, check_connections
from streamer.commands.check.definition_findings import check_calls, check_definitions
from streamer.commands.check.findings import TARGET, CheckReport, from_error, in_order
from streamer.commands.check.planned_copies import plan_copies
from streamer.commands.check.shared_table_findings import shared_tables
from streamer.commands.check.source_facts import SourceFacts, read_server_again, read_source
from streamer.commands.check.source_findings import (
    check_heartbeat,
    check_same_database,
    check_source,
)
from streamer.commands.check.spark_findings import check_driver, check_spark
from streamer.commands.check.table_pair import Pair
from streamer.commands.check.target_facts import (
    TargetFacts,
    read_records,
    read_server,
    read_tables,
)
from streamer.commands.check.target_findings import check_server, check_target
from streamer.commands.check.target_table_findings import check_target_tables, make_pair_plan
from streamer.commands.check.transport_findings import check_transport
from streamer.config.settings import Settings
from streamer.config.static_mapping import require_sources
from streamer.errors.error_classes import MappingError, StreamerError, TargetSchemaError
from streamer.mapping.rule_options import Initial
from streamer.mapping.rules import Mapping, SourceMapping
from streamer.postgres.supported_versions import VERSION_MIN
from streamer.runtime.session_needs import address_of_target, target_needs
from streamer.target.connection import TargetAddress, TargetConnection, target_connection
from streamer.target.session_counts import DRAINERS_MAX, hot_worker_count

SOURCES_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Examination:
    """The facts and the findings. ``target`` is None if `check` could not read the target."""

    report: CheckReport
    sources: list[SourceFacts]
    target: TargetFacts | None


async def check(settings: Settings, mapping: Mapping) -> CheckReport:
    """Check all sources and the target. Raises ConfigurationError; other errors are findings."""
    require_sources(settings, mapping)
    report = (await examine(settings, mapping)).report
    report.findings += check_spark(settings.sync)
    copies = any(
        rule.initial is not Initial.NONE for source in mapping.sources for rule in source.rules
    )
    report.findings += await asyncio.to_thread(lambda: list(check_driver(copies=copies)))
    return report


async def examine(settings: Settings, mapping: Mapping) -> Examination:
    """Run the check, and return the facts, too. The mapping may be empty."""
    address = address_of_target(settings)
    create_tables = settings.target.create_tables
    sources = await _read_sources(mapping)
    report = CheckReport(
        source_count=len(sources),
        table_count=sum(len(facts.mappings) for facts in sources),
        is_reachable=not any(facts.is_out_of_reach for facts in sources),
        roles={facts.label: facts.role for facts in sources},
        urls={facts.label: facts.source.url for facts in sources} | {None: settings.target.url},
    )
    target: TargetFacts | None = None
    try:
        target = await _read_target(address, sources, mapping.target_namespace)
    except StreamerError as exc:
        report.is_reachable &= exc.exit_code != 3
        report.findings.append(from_error(TARGET, exc))
    else:
        if target.server.version < VERSION_MIN:
            report.findings += check_server(target.server)
            target = None
        else:
            # Workers, workers for hot lanes, drainers, copies, and the deletes before a copy.
            connections = sum(
                [
                    settings.workers,
                    hot_worker_count(settings.workers),
                    DRAINERS_MAX,
                    settings.sync.jobs,
                    1,
                ]
            )
            needs = target_needs(settings, len(sources))
            report.findings += check_connections(target, needs)
            report.findings += in_order(
                check_target(target, sources, create_tables=create_tables, connections=connections)
            )
    report.findings += check_same_database(sources)
    report.copies = plan_copies(
        sources,
        target,
        rows_per_second=settings.sync.rows_per_second,
        resumable_above=settings.sync.resumable_above,
    )
    report.findings += check_capacity(sources, target, settings)
    shared = {}
    if target is not None:
        shared = shared_tables(sources, target, create_tables=create_tables)
    for facts in sources:
        findings = check_source(facts, target)
        findings += check_heartbeat(facts, settings.heartbeat_interval)
        if target is not None:
            findings += check_target_tables(facts, target, shared, create_tables=create_tables)
            findings += check_definitions(facts, target, create_tables=create_tables)
            findings += check_calls(facts, target, create_tables=create_tables)
            findings += check_transport(facts, target)
        report.findings += in_order(findings)
    return Examination(report, sources, target)


async def _read_sources(mapping: Mapping) -> list[SourceFacts]:
    limit = asyncio.Semaphore(SOURCES_AT_ONCE)

    async def read(source: SourceMapping) -> SourceFacts:
        async with limit:
            return await read_source(source, mapping.target_namespace)

    async with asyncio.TaskGroup() as group:
        reading = [
            group.create_task(read(source), name=f"check {source.label}")
            for source in mapping.sources
        ]
    return [task.result() for task in reading]


async def _read_target(
    address: TargetAddress, sources: list[SourceFacts], target_namespace: str
) -> TargetFacts:
    """Read the target. Raises TargetError."""
    async with target_connection(address, "streamer check") as connection:
        facts = await read_server(connection)
        if facts.server.version < VERSION_MIN:
            return facts
        if facts.bookkeeping.is_readable and facts.are_records_readable:
            await read_records(address, facts, sources, target_namespace)
            await _follow_running(facts, sources)
        await read_tables(connection, facts, sources)
        await _confirm_expressions(connection, facts, sources)
    return facts


async def _confirm_expressions(
    connection: TargetConnection, target: TargetFacts, sources: list[SourceFacts]
) -> None:
    """Check at the target the expressions that the source accepts."""
    for source in sources:
        for mapping, relation in source.mapped():
            table = target.tables.get(mapping.target)
            described = source.expressions.get(mapping.source)
            if described is None or table is None or table.relation is None:
                continue
            try:
                plan = make_pair_plan(Pair(source, target, mapping, relation), table.relation)
                await confirm_expressions(connection, plan, described.types)
            except TargetSchemaError:
                continue  # `target_table_findings` reports this error
            except MappingError as exc:
                source.expression_errors[mapping.source] = exc


async def _follow_running(facts: TargetFacts, sources: list[SourceFacts]) -> None:
    """Read the server of each source again whose stored position is ahead of the WAL position that
    `check` read.

    Usually a process streams this source. Otherwise, somebody has restored the source to an earlier
    time.
    """
    for source in sources:
        record = facts.sources.get(source.label)
        if record and source.server and source.server.flush_lsn < record.acknowledged_lsn:
            await read_server_again(source)
