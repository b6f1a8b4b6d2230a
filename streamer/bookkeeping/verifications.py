"""The rows of streamer.verification: the last comparison of each relation."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Executor, fields_of
from streamer.util.lsn import Lsn


@dataclass(frozen=True, slots=True)
class VerificationRecord:
    """The result of the last comparison of a relation.

    ``verified_at``: the start of the last comparison without a difference, if any. ``lsn``: the
    position of the source then. ``differing_rows``: the differing rows of the last comparison; the
    count may be incomplete. ``error``: the reason why the relation could not be compared.
    """

    relation_id: int
    ended_at: datetime
    verified_at: datetime | None
    lsn: Lsn | None
    differing_rows: int
    undecided_rows: int
    error: str | None = None

    @property
    def is_decided(self) -> bool:
        """Whether the last comparison has a result."""
        return self.error is None and (self.differing_rows > 0 or not self.undecided_rows)


VERIFICATIONS: Final = BookkeepingTable("verification", "v", VerificationRecord)
# The relation may have left the mapping during the comparison.
_IS_MAPPED: Final = "where exists (select from streamer.relation r where r.id = v.relation_id)"
_LAST: Final = {name: f"coalesce(excluded.{name}, v.{name})" for name in ("verified_at", "lsn")}


async def store_verifications(session: Executor, records: Iterable[VerificationRecord]) -> None:
    """Store results. A relation with differences keeps the time when it was last found equal."""
    rows = map(fields_of, records)
    await VERIFICATIONS.put(session, rows, "relation_id", _IS_MAPPED, computed=_LAST)


async def read_verifications(
    session: Executor, relation_id: int | None = None
) -> dict[int, VerificationRecord]:
    """Return the results of all relations or of a single relation, by relation id. Raises
    TargetError.
    """
    records = await VERIFICATIONS.read(
        session, "where $1::int8 is null or relation_id = $1", relation_id
    )
    return {record.relation_id: record for record in records}
