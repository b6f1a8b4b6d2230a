"""Relations that the mapping lost. The bookkeeping remembers that their rows in the target are
streamer's.

A relation that returns to the mapping continues if streamer has acknowledged nothing to its source
meanwhile. Otherwise a copy replaces its rows.
"""

import json
from typing import Final

from streamer.mapping.resync import Resync
from streamer.progress.table import Executor

# Its rows in quarantine are gone, so a table that had some cannot continue as it was.
_KEEP_FORMER_SQL: Final = """
insert into streamer.former_relation
select r.source_id, r.source, s.acknowledged_lsn,
       to_jsonb(r) || case when q.has_some then '{"snapshot_lsn": null}'::jsonb else '{}' end
from streamer.relation r join streamer.source s on s.id = r.source_id,
     lateral (select exists (select from streamer.quarantine where relation_id = r.id)) q (has_some)
where r.id = $1 and (r.owns_rows or r.target_created or r.snapshot_lsn is not null)
on conflict (source_id, source) do update
set acknowledged_lsn = excluded.acknowledged_lsn, relation = excluded.relation
"""
_RETURN_SQL: Final = """
insert into streamer.relation (
    source_id, source, target, type, expressions, state, snapshot_lsn, end_lsn, attempt,
    rows_copied, bytes_copied, rows_total, target_created, declared, owns_rows, filling,
    publication_mark, identity, needs_resync, error, error_code, error_remedy, leaves, leaf_joins,
    resync,
    truncates_skipped, brake, outlives, unfilled, copy_is_due, definition,
    former_labels, storage)
select f.source_id, f.source, r.target, r.type, r.expressions,
       case when i.is_in_step or r.needs_resync then r.state else 'init' end,
       case when i.is_in_step then r.snapshot_lsn end, r.end_lsn, r.attempt,
       r.rows_copied, r.bytes_copied, r.rows_total, r.target_created, r.declared, r.owns_rows,
       r.filling, r.publication_mark, r.identity, r.needs_resync,
       case when i.is_in_step or r.needs_resync then r.error end,
       case when i.is_in_step or r.needs_resync then r.error_code end,
       case when i.is_in_step or r.needs_resync then r.error_remedy end, r.leaves, r.leaf_joins,
       case when i.is_in_step then r.resync else $5::text::jsonb end,
       r.truncates_skipped, case when i.is_in_step then r.brake end,
       i.is_in_step and r.outlives, coalesce(r.unfilled, '{}'),
       coalesce(r.copy_is_due, false), r.definition,
       coalesce(r.former_labels, '{}'), case when i.is_in_step then r.storage end
from unnest($2::text[], $3::text[]) w (source, target)
join streamer.former_relation f on f.source_id = $1 and f.source = w.source
join streamer.source s on s.id = f.source_id,
     lateral jsonb_populate_record(null::streamer.relation, f.relation) r,
     lateral (select $4::boolean and r.snapshot_lsn is not null and r.resync is null
                     and f.acknowledged_lsn = s.acknowledged_lsn as is_in_step) i
where r.target = w.target
  and not exists (select from streamer.relation o where o.source_id = $1 and o.source = w.source)
returning source
"""


async def keep_former(session: Executor, relation_id: int) -> None:
    """Remember a relation that the mapping is about to lose."""
    await session.execute(_KEEP_FORMER_SQL, relation_id)


async def bring_back(
    session: Executor, source_id: int, targets: dict[str, str], *, may_resume: bool
) -> set[str]:
    """Make the records of relations that were mapped before; return the source names of those.

    *targets*: by source name. *may_resume*: the stream is about to begin at the acknowledged
    position.
    """
    returned = await session.fetch(
        _RETURN_SQL,
        source_id,
        list(targets),
        list(targets.values()),
        may_resume,
        json.dumps(Resync().to_json()),
    )
    await session.execute(
        "delete from streamer.former_relation where source_id = $1 and source = any ($2::text[])",
        source_id,
        list(targets),
    )
    return {row["source"] for row in returned}


async def forget_former(session: Executor, source_id: int) -> None:
    """Forget the former relations of a source."""
    await session.execute("delete from streamer.former_relation where source_id = $1", source_id)
