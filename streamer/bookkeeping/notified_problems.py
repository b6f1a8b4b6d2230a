"""The rows of streamer.notification: the problems of which streamer has notified the receiver.

All replicas and later processes read the rows, so the receiver gets each change of a problem once.
"""

from collections.abc import Iterable
from typing import Final

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Executor, fields_of, to_json
from streamer.report.problem_notices import Key, NotifiedProblem

NOTIFICATIONS: Final = BookkeepingTable("notification", "n", NotifiedProblem)


async def read_notified(session: Executor) -> dict[Key, NotifiedProblem]:
    """Return the problems by key. Raises TargetError."""
    return {record.key: record for record in await NOTIFICATIONS.read(session)}


async def store_notified(session: Executor, problems: Iterable[NotifiedProblem]) -> None:
    """Store the state of each problem as last sent to the receiver. Raises TargetError."""
    await NOTIFICATIONS.put(session, map(fields_of, problems), "kind, subject")


async def delete_notified(session: Executor, keys: Iterable[Key]) -> None:
    """Delete problems whose end streamer has sent to the receiver. Raises TargetError."""
    for kind, subject in keys:
        where = "where kind = $1 and subject = $2::text::jsonb"
        await NOTIFICATIONS.delete(session, where, str(kind), to_json(subject.to_json()))
