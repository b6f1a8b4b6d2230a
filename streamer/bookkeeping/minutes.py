"""The rows of streamer.minute: lag, rate and retained WAL of each source by the minute, for a day.

The process that runs a source stores its minutes, and the pages of all processes read these. Two
processes may store the same minute, because the source moved between them in that minute. A process
may store a minute twice, because an answer was lost or its clock was set back. The row then
summarizes both: the highest lag and WAL, and the mean rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.mapping.rules import SourceLabel

Values = tuple[float | None, float | None, float | None]
"""Lag in seconds, changes per second and retained WAL in bytes of a source at a moment; None if
unknown.
"""


@dataclass(frozen=True, slots=True)
class Minute:
    """The values of a source in a minute. ``at``: the unix time at which the minute begins."""

    at: int
    source: str
    values: Values


_ADD_SQL: Final = """
with pruned as (
    delete from streamer.minute where at < now() - make_interval(secs => $6::float8))
insert into streamer.minute as m
    (at, source_id, lag_seconds, changes_per_second, retained_wal_bytes)
select to_timestamp(v.at), s.id, max(v.lag), avg(v.rate), max(v.wal)
from unnest($1::float8[], $2::text[], $3::float4[], $4::float4[], $5::float4[])
    v (at, source, lag, rate, wal)
join streamer.source s on concat_ws(':', s.database, s.sid) = v.source
group by 1, 2
order by 1, 2
on conflict (at, source_id) do update set
    lag_seconds = greatest(m.lag_seconds, excluded.lag_seconds),
    changes_per_second = (
        select avg(rate)
        from unnest(array[m.changes_per_second, excluded.changes_per_second]) rate),
    retained_wal_bytes = greatest(m.retained_wal_bytes, excluded.retained_wal_bytes)
"""
_READ_SQL: Final = """
select extract(epoch from m.at)::int8 as at, s.database, s.sid,
       m.lag_seconds, m.changes_per_second, m.retained_wal_bytes
from streamer.minute m join streamer.source s on s.id = m.source_id
where m.at >= to_timestamp($1::float8) and m.at < to_timestamp($2::float8)
"""


async def add_minutes(
    bookkeeping: Bookkeeping, minutes: Sequence[Minute], kept_seconds: float
) -> None:
    """Store minutes of registered sources, and remove all minutes that are older than
    *kept_seconds*.

    Raises TargetConnectionError, TargetRejectedError.
    """
    await bookkeeping.execute(
        _ADD_SQL,
        [float(minute.at) for minute in minutes],
        [minute.source for minute in minutes],
        *([minute.values[field] for minute in minutes] for field in range(3)),
        kept_seconds,
    )


async def read_minutes(bookkeeping: Bookkeeping, since: float, until: float) -> list[Minute]:
    """Return the minutes of all sources from *since* until before *until*, in unix time.

    Raises TargetConnectionError, TargetRejectedError.
    """
    rows = await bookkeeping.fetch(_READ_SQL, since, until)
    return [
        Minute(
            row["at"],
            SourceLabel(row["database"], row["sid"]),
            (row["lag_seconds"], row["changes_per_second"], row["retained_wal_bytes"]),
        )
        for row in rows
    ]
