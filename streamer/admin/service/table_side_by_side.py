"""The definitions of a table at source and target side by side, and the findings of a check."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from streamer.commands.check.check import Examination, examine
from streamer.config.settings import Settings
from streamer.errors.error_classes import MappingError, SourceConnectionError
from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import Mapping, RelationMapping, SourceMapping, TableRule
from streamer.mapping.sid_and_history_columns import SID
from streamer.schema.target_relation import TargetRelation
from streamer.source.catalog import SourceRelation

Row = dict[str, Any]

CHECK_SECONDS: Final = 15.0

_IDENTITIES: Final = {
    "d": "the primary key",
    "i": "an index",
    "f": "the whole row (FULL)",
    "n": "none",
}


async def read_table_pair(
    settings: Settings, source: SourceMapping, table: RelationName, target_namespace: str
) -> Row:
    """Read a table on both sides; an unreachable side is a finding.

    Raises SourceConnectionError after a timeout, MappingError if no rule matches the table.
    """
    rule = _rule(source, table)
    exact = RelationPattern(table.namespace, table.name)
    single = replace(source, rules=(replace(rule, pattern=exact),))
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            examination = await examine(settings, Mapping((single,), target_namespace))
    except TimeoutError:
        raise SourceConnectionError(
            f"the servers did not answer within {CHECK_SECONDS:g} s",
            hint="a server is unreachable, or a session holds a lock on the table",
        ) from None
    return _described(examination, table)


def _rule(source: SourceMapping, table: RelationName) -> TableRule:
    candidates = [rule for rule in source.rules if rule.pattern.matches(table)]
    if not candidates:
        raise MappingError(f'no rule of "{source.label}" matches table "{table}" any more')
    return min(candidates, key=lambda rule: rule.pattern.is_pattern)


def _described(examination: Examination, table: RelationName) -> Row:
    (facts,) = examination.sources
    findings = [
        finding.to_json()
        for finding in examination.report.findings
        if finding.place.object == str(table)
        or (finding.place.object is None and finding.severity.value == "error")
    ]
    relation = facts.relations.get(table)
    mapping = next((m for m in facts.mappings if m.source == table), None)
    if relation is None or mapping is None:
        return {"columns": [], "key": [], "identity": None, "findings": findings, "target": None}
    target_table = (
        examination.target.tables.get(mapping.target) if examination.target is not None else None
    )
    target = target_table.relation if target_table is not None else None
    return {
        "columns": list(_columns(relation, mapping, target)),
        "key": list(relation.key or relation.primary_key),
        "identity": _IDENTITIES.get(relation.replica_identity, relation.replica_identity),
        "findings": findings,
        "target": str(mapping.target),
        "has_target": target is not None,
        "target_key": list(target.primary_key) if target is not None else [],
        "rows": relation.row_count_estimate,
        "size_bytes": relation.size_bytes,
    }


def _columns(
    relation: SourceRelation, mapping: RelationMapping, target: TargetRelation | None
) -> Iterable[Row]:
    """Pair the columns; the target's further columns come last."""
    remaining = dict(target.columns) if target is not None else {}
    key = set(relation.key or relation.primary_key)
    for column in relation.columns:
        name = mapping.target_column(column.name)
        counterpart = remaining.pop(name, None) if name is not None else None
        note = None
        if name is None or (counterpart is None and mapping.is_optional(column.name)):
            note = "left out"
        elif mapping.is_computed(name):
            note = "computed"
        elif target is not None and counterpart is None and not column.generated:
            note = "missing"
        yield {
            "source": column.name,
            "source_type": column.type,
            "target": name,
            "target_type": counterpart.type if counterpart is not None else None,
            "is_key": column.name in key,
            "note": note,
        }
    computed = dict(mapping.rule.set)
    unfilled = {column.name for column in target.unfilled(())} if target is not None else set()
    for name, target_column in remaining.items():
        note = "keeps its default"
        if name in unfilled:
            note = "unfilled"
        if name in computed:
            note = "computed"
        elif name == SID:
            note = "the source's sid"
        elif name in mapping.rule.history.names:
            note = "validity of the version"
        elif name == mapping.rule.history.id and mapping.type is TableType.HISTORY:
            note = "order of versions"
        yield {
            "source": None,
            "source_type": None,
            "target": name,
            "target_type": target_column.type,
            "is_key": False,
            "note": note,
        }
