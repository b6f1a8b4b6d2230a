"""Relations that left the mapping, for which the bookkeeping still records that streamer wrote
their target rows.

A relation that returns to the mapping continues if streamer has acknowledged no change to its
source meanwhile. Otherwise a copy replaces its rows.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from streamer.bookkeeping.bookkeeping_table import Executor
from streamer.bookkeeping.relation_records import RELATIONS
from streamer.control.resync_options import Resync
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy

# Rows in quarantine are deleted with the relation, so a table with such rows cannot continue.
_KEEP_FORMER_SQL: Final = """
insert into streamer.former_relation
select r.source_id, r.source, s.acknowledged_lsn,
       to_jsonb(r) || case when q.has_some then '{"snapshot_lsn": null}'::jsonb else '{}' end
from streamer.relation r join streamer.source s on s.id = r.source_id,
     lateral (select exists (select from streamer.quarantine where relation_id = r.id)) q (has_some)
where r.id = $1
  and (r.owns_rows or r.target_created or r.was_in_sync or r.snapshot_lsn is not null)
on conflict (source_id, source) do update
set acknowledged_lsn = excluded.acknowledged_lsn, relation = excluded.relation
"""
_FORMER_SQL: Final = """
select f.relation::text as relation, f.acknowledged_lsn = s.acknowledged_lsn as is_current
from unnest($2::text[], $3::text[], $4::text[]) w (source, target, sid)
join streamer.former_relation f on f.source_id = $1 and f.source = w.source
join streamer.source s on s.id = f.source_id
where f.relation->>'target' = w.target and f.relation->>'row_sid' is not distinct from w.sid
  and not exists (select from streamer.relation o where o.source_id = $1 and o.source = w.source)
"""
_OWNED_SQL: Final = """
select source_id, source, relation->>'target' as target, relation->>'row_sid' as row_sid
from streamer.former_relation
where (relation->>'owns_rows')::bool or (relation->>'target_created')::bool
"""
_FORGET_SID_SQL: Final = """
delete from streamer.former_relation f using streamer.source s
where s.id = f.source_id and s.database = $1 and f.relation->>'row_sid' = $2
"""
_OF_PROCESS: Final = (
    *("id", "columns", "chunks", "transport", "transport_reason", "source_oid"),
    *("waiting_for", "wait", "lag_since", "visible_lsn", "changed_at"),
    *("partition_error", "partition_error_code", "partition_error_remedy"),
)
"""Columns that the next process reads or computes itself."""
_NO_COPY: Final[dict[str, Any]] = {
    "snapshot_lsn": None,
    "resync": Resync(),
    "mass_delete": None,
    "outlives": False,
    "storage": None,
}


def _restored_values(relation: dict[str, Any], *, may_resume: bool) -> dict[str, Any]:
    """Return the values of a relation that was mapped before. Pure."""
    values = {name: value for name, value in relation.items() if name not in _OF_PROCESS}
    is_in_sync = may_resume and relation["snapshot_lsn"] and relation["resync"] is None
    text, code, remedy = (values.pop(name) for name in ("error", "error_code", "error_remedy"))
    if not is_in_sync:
        values |= _NO_COPY
        if not relation["needs_resync"]:
            return values | {"state": "init", "error": None}
    report = None if text is None else ErrorReport(text, code, Remedy.from_json(remedy))
    return values | {"error": report}


async def store_former(session: Executor, relation_id: int) -> None:
    """Store a relation that is about to leave the mapping."""
    await session.execute(_KEEP_FORMER_SQL, relation_id)


async def restore_records(
    session: Executor,
    source_id: int,
    rows_of: Mapping[str, tuple[str, str | None]],
    *,
    may_resume: bool,
) -> set[str]:
    """Create the records of relations that were mapped before; return their source names.

    *rows_of*: the target and the sid of the rows, by source name. *may_resume*: the stream is about
    to begin at the acknowledged position.
    """
    targets, sids = zip(*rows_of.values(), strict=True) if rows_of else ((), ())
    rows = await session.fetch(_FORMER_SQL, source_id, list(rows_of), list(targets), list(sids))
    returned = [
        _restored_values(json.loads(row["relation"]), may_resume=may_resume and row["is_current"])
        for row in rows
    ]
    by_columns: defaultdict[frozenset[str], list[dict[str, Any]]] = defaultdict(list)
    for values in returned:
        by_columns[frozenset(values)].append(values)
    # A relation that left before a migration has no value for a column that the migration added.
    for alike in by_columns.values():
        await RELATIONS.insert(session, alike)
    await session.execute(
        "delete from streamer.former_relation where source_id = $1 and source = any ($2::text[])",
        source_id,
        list(rows_of),
    )
    return {relation["source"] for relation in returned}


async def read_owned_rows(session: Executor) -> frozenset[tuple[int, str, str, str | None]]:
    """Return source id, name, target and sid of each unmapped relation whose rows or target table
    streamer wrote or created. If the mapping gets such a relation again, its copy may replace these
    rows.
    """
    return frozenset(
        (row["source_id"], row["source"], row["target"], row["row_sid"])
        for row in await session.fetch(_OWNED_SQL)
    )


async def forget_former_of_sid(session: Executor, database: str, sid: str) -> None:
    """Delete the former relations of *database* whose rows have *sid*."""
    await session.execute(_FORGET_SID_SQL, database, sid)


async def forget_former(session: Executor, source_id: int) -> None:
    """Delete the former relations of a source."""
    await session.execute("delete from streamer.former_relation where source_id = $1", source_id)
