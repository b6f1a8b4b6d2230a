"""For lagging tables: the sessions that block streamer, and requests to store positions."""

from collections.abc import Collection
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.requests import CHANNEL, WAITING, WAITING_FOR_TABLES
from streamer.postgres.blocking_sessions import BACKENDS, Blockers, blockers_of, blockers_sql

_BLOCKERS_SQL: Final = blockers_sql(BACKENDS.format("$1"))


async def read_blockers(bookkeeping: Bookkeeping, pids: Collection[int]) -> dict[int, Blockers]:
    """Return the sessions at the target that block streamer's backends, by the pid of the
    backend.
    """
    return blockers_of(await bookkeeping.fetch(_BLOCKERS_SQL, list(pids)))


async def request_positions(bookkeeping: Bookkeeping, *, of_tables: bool) -> None:
    """Request that the streaming process stores its positions as soon as these advance."""
    payload = WAITING_FOR_TABLES if of_tables else WAITING
    await bookkeeping.execute(f"notify {CHANNEL}, '{payload}'")
