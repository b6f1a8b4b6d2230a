"""The tables of a database, and the obstacles to their replication, for the API. Pure."""

from typing import Any

from streamer.commands.check.rule_findings import SeenTable
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.source_findings import check_source
from streamer.mapping.relation_names import RelationPattern

Row = dict[str, Any]


def discovered(
    facts: SourceFacts, mapped: list[RelationPattern], excluded: list[RelationPattern]
) -> Row:
    """Return the tables of *facts*. *mapped*, *excluded*: the rules of the draft."""
    server = facts.server
    assert server is not None
    findings = check_source(facts, None, is_survey=True)
    by_object: dict[str, list[Row]] = {}
    for finding in findings:
        by_object.setdefault(finding.place.object or "", []).append(finding.to_json())
    tables = []
    for seen in facts.seen:
        relation = facts.relations.get(seen.relation)
        if relation is None and seen.root is not None:
            continue  # the root table represents its partitions
        table_findings = by_object.pop(str(seen.relation), [])
        pattern = RelationPattern(seen.namespace, seen.name)
        table: Row = {
            "schema": pattern.written_namespace,
            "name": pattern.written_name,
            "obstacle": _obstacle(seen),
            "mapped": _is_mapped(seen, mapped, excluded),
            "findings": table_findings,
        }
        if relation is not None:
            rows, size_bytes = facts.size_of(relation)
            table |= {
                "rows": rows,
                "size_bytes": size_bytes,
                "is_partitioned": relation.is_partitioned,
                "key": list(relation.key or relation.primary_key),
                "primary_key": list(relation.primary_key),
                "replica_identity": relation.replica_identity,
                "columns": [
                    {"name": column.name, "type": column.type, "not_null": column.not_null}
                    for column in relation.columns
                ],
            }
        tables.append(table)
    return {
        "server": {
            "version": server.version_text,
            "database": server.database,
            "role": server.role,
            "wal_level": server.wal_level,
            "in_recovery": server.in_recovery,
        },
        "tables": tables,
        "findings": [finding for leftover in by_object.values() for finding in leftover],
    }


def _obstacle(seen: SeenTable) -> str | None:
    """Return why the page does not offer a table. Patterns match no table of an extension."""
    if seen.extension is not None and seen.obstacle is None:
        return f"part of the extension {seen.extension}"
    return seen.obstacle


def _is_mapped(
    seen: SeenTable, mapped: list[RelationPattern], excluded: list[RelationPattern]
) -> bool:
    name = seen.relation
    hidden = seen.extension is not None or any(pattern.matches(name) for pattern in excluded)
    return any(pattern.matches(name) and not (hidden and pattern.is_pattern) for pattern in mapped)
