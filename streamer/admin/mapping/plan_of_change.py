"""The effect of applying a mapping on slots, publications and tables, and the duration of copies.

The plan compares the mapping, as `streamer check` reads it from the servers, with the bookkeeping
in the target. The bookkeeping lacks columns and further details of rules, which the plan compares
with the previous mapping. A plan changes neither side.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from streamer.bookkeeping.copied_parts import read_copy_speed
from streamer.bookkeeping.registered_relations import can_backfill
from streamer.bookkeeping.relation_records import RelationRecord
from streamer.bookkeeping.sources import SourceRecord
from streamer.commands.check.check import Examination, examine
from streamer.commands.check.findings import Finding
from streamer.commands.check.planned_copies import (
    ASSUMED_BYTES_PER_SECOND,
    PlannedCopies,
    plan_copies,
)
from streamer.commands.check.publication_findings import plan_publications
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.config.settings import Settings
from streamer.errors.error_classes import StreamerError
from streamer.mapping.recomputed_columns import recomputed
from streamer.mapping.rule_options import Initial
from streamer.mapping.rules import Mapping, RelationMapping, SourceLabel, SourceMapping
from streamer.postgres.secret import Secret
from streamer.report.problems import Severity
from streamer.runtime.guards.reconcile import planned_changes
from streamer.source.catalog import SourceRelation
from streamer.source.slot_and_publications.publication import drop_publications_sql
from streamer.source.slot_and_publications.slot import drop_slot_sql
from streamer.target.connection import TargetAddress, target_connection

START_SECONDS: Final = 12.0
"""The approximate time that Spark takes to start."""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The effect on a table. ``action``: copy, stream, change, remove, keep."""

    source: str
    target: str
    type: str
    action: str
    reason: str | None = None
    rows: int | None = None
    size_bytes: int | None = None


@dataclass(slots=True)
class SourcePlan:
    """The effect on a source. ``action``: add, change, remove, keep; forgotten: the mapping lacks
    the source, but objects of the source still exist.
    """

    database: str
    sid: str | None
    action: str
    slot: str
    slot_action: str
    publication_sql: list[str] = field(default_factory=list)
    tables: list[TablePlan] = field(default_factory=list)
    error: str | None = None
    role: str | None = None
    """The role of the server: 'primary' or 'standby'; None without an answer."""

    @property
    def label(self) -> str:
        return SourceLabel(self.database, self.sid)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The amount to copy, and the estimated time. ``basis``: measured or assumed."""

    tables: int
    rows: int
    size_bytes: int
    seconds: float
    basis: str


@dataclass(slots=True)
class Plan:
    """All effects. ``findings``: the findings of `streamer check`; ``notes``: remarks."""

    sources: list[SourcePlan]
    estimate: Estimate
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    copies: list[PlannedCopies] = field(default_factory=list)
    """The first copies, in the order of the sources."""
    sources_at_once: int = 1
    """The number of sources that copy at the same time."""

    @property
    def has_changes(self) -> bool:
        return any(source.action not in ("keep", "forgotten") for source in self.sources)

    @property
    def obstacles(self) -> list[Finding]:
        """Return the findings that would stop a source or table which the plan changes."""
        changed = {s.label: s for s in self.sources if s.action not in ("keep", "forgotten")}
        return [
            finding
            for finding in self.findings
            if finding.severity is Severity.ERROR and _concerns(finding, changed)
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "changes": self.has_changes,
            "ready": not self.obstacles,
            "sources": [asdict(source) for source in self.sources],
            "estimate": asdict(self.estimate),
            "findings": [finding.to_json() for finding in self.findings],
            "notes": self.notes,
            "copies": [copy.to_json() for copy in self.copies],
            "sources_at_once": self.sources_at_once,
        }


def _concerns(finding: Finding, changed: dict[str, SourcePlan]) -> bool:
    place = finding.place
    if place.source is None:
        return bool(changed)
    labels = [label for label in place.source.split(", ") if label in changed]
    for label in labels:
        source = changed[label]
        names = {table.source: table.action for table in source.tables}
        if source.action == "add" or names.get(place.object or "") != "keep":
            return True
    return False


async def make_plan(settings: Settings, mapping: Mapping, current: Mapping | None) -> Plan:
    """Read all servers and return the effect of switching to *mapping*.

    *current*: the applied mapping, if known. Raises ConfigurationError; an unreachable server is a
    finding.
    """
    seen = await examine(settings, mapping)
    applied = {source.label: source for source in current.sources} if current is not None else {}
    sources = [_plan_source(facts, seen.target, applied.get(facts.label)) for facts in seen.sources]
    if seen.target is not None:
        sources += _removed(seen.target, mapping, applied if current is not None else None)
    elif current is not None:
        labels = {source.label for source in mapping.sources}
        sources += [
            SourcePlan(source.database, source.sid, "remove", source.slot, "drop")
            for source in current.sources
            if source.label not in labels
        ]
    estimate, speed = await _estimate(settings, seen, sources)
    limit = settings.sync.rows_per_second
    return Plan(
        sources,
        estimate,
        list(seen.report.findings),
        copies=plan_copies(
            seen.sources,
            seen.target,
            rows_per_second=limit,
            bytes_per_second=speed,
            resumable_above=settings.sync.resumable_above,
        ),
        sources_at_once=settings.sync.sources_at_once,
    )


def _plan_source(
    facts: SourceFacts, target: TargetFacts | None, applied: SourceMapping | None
) -> SourcePlan:
    source = facts.source
    record = target.sources.get(source.label) if target is not None else None
    plan = SourcePlan(
        source.database,
        source.sid,
        "keep",
        source.slot,
        "unknown" if not facts.is_complete else "create" if facts.slot is None else "keep",
        error=str(facts.error) if facts.error is not None else None,
        role=facts.role,
    )
    if facts.is_complete and facts.server is not None:
        publication_plan = plan_publications(facts, None)
        plan.publication_sql = planned_changes(publication_plan, source).all
        rules = _rules(applied)
        plan.tables = [_plan_table(facts, target, mapping, rules) for mapping in facts.mappings]
    if target is not None and record is not None and facts.is_complete:
        mapped = {str(mapping.source) for mapping in facts.mappings}
        plan.tables += [
            TablePlan(
                relation.source,
                relation.target,
                relation.type,
                "remove",
                "its rows stay in the target",
            )
            for (label, name), relation in target.relations.items()
            if label == source.label and name not in mapped
        ]
    if (target is not None and record is None) or (target is None and applied is None):
        plan.action = "add"
    elif (
        plan.publication_sql
        or plan.slot_action == "create"
        or any(table.action != "keep" for table in plan.tables)
        or (applied is not None and applied != source)
    ):
        plan.action = "change"
    return plan


def _rules(applied: SourceMapping | None) -> dict[str, Any] | None:
    return None if applied is None else {str(rule.pattern): rule for rule in applied.rules}


def _plan_table(
    facts: SourceFacts,
    target: TargetFacts | None,
    mapping: RelationMapping,
    rules: dict[str, Any] | None,
) -> TablePlan:
    relation = facts.relations.get(mapping.source)
    record = target.record(facts.source, mapping) if target is not None else None
    rows, size = (None, None) if relation is None else facts.size_of(relation)

    def planned(action: str, reason: str | None = None) -> TablePlan:
        return TablePlan(
            str(mapping.source), str(mapping.target), mapping.type.value, action, reason, rows, size
        )

    copies = mapping.rule.initial is not Initial.NONE
    if target is None:
        return planned("unknown", "streamer cannot read the target")
    if record is None:
        return planned("copy", "new table") if copies else planned("stream", "new table")
    if record.target != str(mapping.target):
        reason = f"its target was {record.target}, whose rows stay"
        return planned("copy" if copies else "stream", reason)
    if record.row_sid != mapping.sid:
        reason = f"the sid of its rows was {record.row_sid}, and these rows stay"
        return planned("copy" if copies else "stream", reason)
    if record.type != mapping.type.value:
        return planned("copy" if copies else "change", f"its type was {record.type}")
    rule = mapping.rule
    if record.expressions != rule.expressions_fingerprint and rule.initial is not Initial.NONE:
        columns = columns_alone(record, mapping, relation)
        if columns is None:
            return planned("copy", "its filter or computed columns change")
        if columns:
            return planned("change", f"existing rows get the values of {', '.join(columns)}")
        return planned("change", "its rule changes")
    earlier = rules.get(str(rule.pattern)) if rules is not None else None
    if earlier is not None and earlier != rule:
        if earlier.column_list and earlier.exclude - rule.exclude:
            return planned(
                "copy", "its publication did not send columns that the new rule includes"
            )
        if (earlier.columns, earlier.exclude) != (rule.columns, rule.exclude):
            return planned(
                "change", "existing rows get the values of columns that the new rule includes"
            )
        return planned("change", "its rule changes")
    if record.table_state.is_lost:
        return planned("keep")  # until an operator requests a resync
    if target.needs_copy(facts.source, mapping):
        begins = target.begins_copy(facts.source, mapping)
        return planned("copy" if begins else "stream", "its copy has not finished")
    return planned("keep")


def columns_alone(
    record: RelationRecord, mapping: RelationMapping, relation: SourceRelation | None
) -> tuple[str, ...] | None:
    """Return the columns that a new `set` changes, if streamer can copy only these columns."""
    is_in_sync = record.snapshot_lsn is not None and not record.needs_resync
    if not is_in_sync or record.quarantined or relation is None:
        return None
    if not can_backfill(mapping, relation):
        return None
    changed = recomputed(record.expressions, mapping, relation.column_names)
    return None if changed is None else changed.columns


_NOWHERE: Final = Secret("")


def _removed(
    target: TargetFacts, mapping: Mapping, applied_sources: dict[str, SourceMapping] | None
) -> list[SourcePlan]:
    """Return plans for sources that are in the bookkeeping and not in *mapping*."""
    labels = {source.label for source in mapping.sources}
    plans = []
    for label, record in target.sources.items():
        if label not in labels:
            plans.append(plan := _plan_removal(record, target))
            if applied_sources is not None and label not in applied_sources:
                plan.action, plan.slot_action = "forgotten", "drop it by hand"
    return plans


def _plan_removal(record: SourceRecord, target: TargetFacts) -> SourcePlan:
    removed = SourceMapping(record.database, record.sid, _NOWHERE, ())
    plan = SourcePlan(record.database, record.sid, "remove", record.slot, "drop")
    plan.publication_sql = [drop_slot_sql(record.slot), *drop_publications_sql(removed)]
    plan.tables = [
        TablePlan(
            relation.source, relation.target, relation.type, "remove", "its rows stay in the target"
        )
        for (label, _), relation in target.relations.items()
        if label == record.label
    ]
    return plan


async def _estimate(
    settings: Settings, seen: Examination, sources: list[SourcePlan]
) -> tuple[Estimate, float | None]:
    """Return the estimate, and the measured speed in bytes per second, if any."""
    copies = [table for source in sources for table in source.tables if table.action == "copy"]
    rows = sum(table.rows or 0 for table in copies)
    size = sum(table.size_bytes or 0 for table in copies)
    speed = await _measured_speed(settings, seen.target) if copies else None
    basis = "assumed" if speed is None else "measured"
    seconds = size / (speed or ASSUMED_BYTES_PER_SECOND)
    sync = settings.sync
    per_source = [
        sum(table.rows or 0 for table in source.tables if table.action == "copy")
        for source in sources
    ]
    limits = (
        (max(per_source, default=0), sync.rows_per_second),
        (rows, sync.total_rows_per_second),
        (size, sync.total_bytes_per_second),
    )
    seconds = max(seconds, *(count / limit for count, limit in limits if limit is not None), 0)
    if copies:
        seconds += START_SECONDS
    return Estimate(len(copies), rows, size, round(seconds, 1), basis), speed


async def _measured_speed(settings: Settings, target: TargetFacts | None) -> float | None:
    """Return the speed of the last copies, in bytes per second; None without a copy."""
    if target is None or "sync_partition" not in target.bookkeeping.tables:
        return None
    try:
        address = TargetAddress.parse(settings.target.url)
        async with target_connection(address, "streamer plan") as connection:
            return await read_copy_speed(connection)
    except StreamerError:
        return None  # without the estimate, the plan is still useful
