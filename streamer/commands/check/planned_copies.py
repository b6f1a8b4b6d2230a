"""The copies that `run` would begin or continue: their order, sizes and times. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.source_findings import copied
from streamer.commands.check.target_facts import TargetFacts
from streamer.mapping.rules import RelationMapping
from streamer.source.catalog import SourceRelation
from streamer.source.tables.chunk_columns import chunk_columns
from streamer.util.quantities import format_bytes, format_duration

ASSUMED_BYTES_PER_SECOND: Final = 20_000_000
"""The assumed rate of all copies together, before the first copy. Small machines reach this rate
with two jobs.
"""


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A table to copy."""

    source: str
    rows: int
    size_bytes: int
    priority: int
    in_chunks: bool = False
    """An interrupted copy of this table continues at the next chunk."""
    in_one_piece: str | None = None
    """The reason why a table above `sync.resumable_above` is copied in one piece."""
    is_distant: bool = False
    """The table is large, and rows with neighbouring keys are in distant pages."""


@dataclass(frozen=True, slots=True)
class PlannedCopies:
    """The tables that a source copies, in order. ``seconds``: an estimate without other copies."""

    database: str
    sid: str | None
    label: str
    priority: int
    rows: int
    size_bytes: int
    seconds: float
    tables: tuple[PlannedTable, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_copies(
    sources: Iterable[SourceFacts],
    target: TargetFacts | None,
    *,
    rows_per_second: float | None,
    bytes_per_second: float | None = None,
    resumable_above: int,
) -> list[PlannedCopies]:
    """Return the sources that have tables to copy, in the order of `streamer.copy.source_turns`.

    *rows_per_second*: the limit for each source. *bytes_per_second*: the last measured rate.
    *resumable_above*: the setting `sync.resumable_above`, in bytes.
    """
    planned: list[tuple[int, PlannedCopies]] = []
    for facts in sources:
        mappings = {mapping.source: mapping for mapping in copied(facts, target)}
        relations = [facts.relations[name] for name in mappings if name in facts.relations]
        if not relations:
            continue
        is_utf8 = target is None or target.server.encoding == "UTF8"
        bytewise = facts.bytewise if is_utf8 else {}
        # `run` orders by the statistics, even if the check has measured the size of a table.
        relations.sort(key=lambda r: (-mappings[r.name].rule.priority, r.size_bytes, str(r.name)))
        tables = []
        for relation in relations:
            table = _planned(
                relation,
                mappings[relation.name],
                resumable_above,
                bytewise.get(relation.oid, ()),
                is_distant=relation.oid in facts.distant,
            )
            row_count, size_bytes = facts.size_of(relation)
            tables.append(replace(table, rows=row_count, size_bytes=size_bytes))
        size, rows = sum(t.size_bytes for t in tables), sum(t.rows for t in tables)
        seconds = size / (bytes_per_second or ASSUMED_BYTES_PER_SECOND)
        if rows_per_second is not None:
            seconds = max(seconds, rows / rows_per_second)
        source = facts.source
        copies = PlannedCopies(
            source.database,
            source.sid,
            str(facts.label),
            source.priority,
            rows,
            size,
            round(seconds, 1),
            tuple(tables),
        )
        planned.append((sum(relation.size_bytes for relation in relations), copies))
    planned.sort(key=lambda item: (-item[1].priority, item[0]))
    return [copies for _, copies in planned]


def _planned(
    relation: SourceRelation,
    mapping: RelationMapping,
    resumable_above: int,
    bytewise: Collection[str],
    *,
    is_distant: bool,
) -> PlannedTable:
    planned = PlannedTable(
        str(relation.name),
        relation.row_count_estimate,
        relation.size_bytes,
        mapping.rule.priority,
        is_distant=is_distant,
    )
    if relation.size_bytes <= resumable_above:
        return planned
    names = [
        name
        for name in relation.column_names
        if (target := mapping.target_column(name)) is not None and not mapping.is_computed(target)
    ]
    columns = chunk_columns(relation, names, bytewise, is_distant=is_distant)
    if isinstance(columns, str):
        return replace(planned, in_one_piece=columns)
    return replace(planned, in_chunks=True)


def copy_lines(copies: Sequence[Mapping[str, Any]], sources_at_once: int) -> Iterable[str]:
    """Return lines about the order of the copies of several sources, given as JSON."""
    if not copies:
        return
    yield f"to copy, in this order, {sources_at_once} at a time (sync.sources_at_once):"
    for number, entry in enumerate(copies, 1):
        count = len(entry["tables"])
        yield (
            f"  {number}. {entry['label']}: {count} table{'' if count == 1 else 's'}, "
            f"about {format_bytes(entry['size_bytes'])}, about {format_duration(entry['seconds'])}"
        )
        for table in entry["tables"]:
            if table["in_chunks"]:
                yield f"     {table['source']}: in chunks (sync.resumable_above)"
            elif table["in_one_piece"]:
                reason = table["in_one_piece"]
                yield f"     {table['source']}: not in chunks, because {reason}"
            elif table["is_distant"]:
                reason = "neighbouring keys are in distant pages"
                yield f"     {table['source']}: compared page by page, because {reason}"
