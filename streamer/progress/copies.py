"""The bookkeeping of copies: how one begins, and how it ends, in the transaction that ends it."""

from dataclasses import dataclass
from typing import Final

from streamer.apply.target import TargetConnection
from streamer.errors import TargetFencedError
from streamer.lsn import Lsn


@dataclass(frozen=True, slots=True)
class BegunCopy:
    """What the bookkeeping says as a copy begins.

    ``is_filling``: the one before filled the target itself, and did not finish. ``owns_rows``: what
    is in the target of this source is ours.
    """

    attempt: int
    is_filling: bool
    owns_rows: bool


async def begin_copy(
    connection: TargetConnection, relation_id: int, *, was_created: bool
) -> BegunCopy:
    """Store ``copying`` and a new attempt."""
    rows = await connection.fetch(_BEGIN_COPY_SQL, relation_id, was_created)
    if not rows:
        raise TargetFencedError("the bookkeeping of this table was removed meanwhile")
    return BegunCopy(**rows[0])


async def hand_over(
    connection: TargetConnection,
    relation_id: int,
    lsn: Lsn,
    *,
    attempt: int | None,
    rows: int,
    size: int,
    owns_rows: bool,
) -> None:
    """The copy is in the target: from *lsn* on the stream brings the changes of a relation.

    Without *attempt* nothing was copied: the relation was declared to be in step. Raises
    TargetFencedError if the copy has begun again meanwhile.
    """
    updated = await connection.execute(
        _HAND_OVER_SQL, relation_id, str(lsn), rows, size, attempt, owns_rows
    )
    if not updated:
        raise TargetFencedError("this copy was begun again, by a request or another process")


async def quarantined_count(connection: TargetConnection, relation_id: int) -> int:
    """Return how many changes of a relation are in quarantine; after a copy of some rows, there may
    be.
    """
    return int(
        await connection.fetch_value(
            "select count(*) from streamer.quarantine where relation_id = $1", relation_id
        )
    )


async def is_handed_over(
    connection: TargetConnection, relation_id: int, lsn: Lsn, *, attempt: int
) -> bool:
    """Whether a hand-over, whose outcome was not heard of, was committed."""
    return bool(
        await connection.fetch_value(
            "select state <> 'copying' and snapshot_lsn = $2::text::pg_lsn and attempt = $3"
            " from streamer.relation where id = $1",
            relation_id,
            str(lsn),
            attempt,
        )
    )


_BEGIN_COPY_SQL: Final = """
update streamer.relation set
    attempt = attempt + 1,
    state = case state when 'paused' then state else 'copying' end,
    error = null,
    snapshot_lsn = case when resync ? 'where' then snapshot_lsn end,
    rows_total = null, rows_copied = 0, bytes_copied = 0,
    target_created = target_created or $2,
    changed_at = now()
where id = $1
returning attempt, filling as is_filling, target_created or owns_rows as owns_rows
"""
# A whole copy has what was in quarantine, too.
_HAND_OVER_SQL: Final = """
with gone as (
    delete from streamer.quarantine where relation_id = $1 and not exists (
        select from streamer.relation where id = $1 and resync ? 'where'))
update streamer.relation set
    state = case state when 'paused' then state else 'catching_up' end,
    snapshot_lsn = $2::text::pg_lsn, end_lsn = $2::text::pg_lsn,
    rows_copied = $3, rows_total = $3, bytes_copied = $4,
    declared = declared or $5::int4 is null,
    owns_rows = owns_rows or $6,
    filling = false, resync = null, error = null, changed_at = now()
where id = $1 and ($5::int4 is null or attempt = $5::int4)
"""
