"""The rows of streamer.verification: the last comparison of each relation."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from streamer.lsn import Lsn
from streamer.progress.bookkeeping import Bookkeeping


@dataclass(frozen=True, slots=True)
class VerificationRecord:
    """The result of the last comparison of a relation.

    ``verified_at``: when the last comparison that found it equal began; None if none did. ``lsn``:
    the position of the source then. ``differing_rows``: of the last comparison; it need not count
    all of them. ``error``: why the relation could not be compared.
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
        """Whether the last comparison has an answer."""
        return self.error is None and (self.differing_rows > 0 or not self.undecided_rows)


async def store_verifications(
    bookkeeping: Bookkeeping, records: Iterable[VerificationRecord]
) -> None:
    """Store results. A relation that was not found equal keeps the time when it last was."""
    records = list(records)
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "insert into streamer.verification as v"
            " (relation_id, ended_at, verified_at, lsn, differing_rows, undecided_rows, error)"
            " select n.* from unnest($1::int8[], $2::timestamptz[], $3::timestamptz[],"
            " $4::text[]::pg_lsn[], $5::int8[], $6::int8[], $7::text[]) n (relation_id)"
            " where exists (select from streamer.relation r where r.id = n.relation_id)"
            " on conflict (relation_id) do update set ended_at = excluded.ended_at,"
            " verified_at = coalesce(excluded.verified_at, v.verified_at),"
            " lsn = coalesce(excluded.lsn, v.lsn), differing_rows = excluded.differing_rows,"
            " undecided_rows = excluded.undecided_rows, error = excluded.error",
            [r.relation_id for r in records],
            [r.ended_at for r in records],
            [r.verified_at for r in records],
            [None if r.lsn is None else str(r.lsn) for r in records],
            [r.differing_rows for r in records],
            [r.undecided_rows for r in records],
            [r.error for r in records],
        )


async def read_verifications(
    bookkeeping: Bookkeeping, relation_id: int | None = None
) -> dict[int, VerificationRecord]:
    """Read the results of all relations or one, by the id of the relation. Raises TargetError."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            "select relation_id, ended_at, verified_at, lsn::text as lsn, differing_rows,"
            " undecided_rows, error from streamer.verification"
            " where $1::int8 is null or relation_id = $1",
            relation_id,
        )
    return {
        row["relation_id"]: VerificationRecord(
            **dict(row) | {"lsn": None if row["lsn"] is None else Lsn.parse(row["lsn"])}
        )
        for row in rows
    }
