"""The positions that the bookkeeping has of all sources and tables, in one look."""

from dataclasses import dataclass, field
from typing import Final

from streamer.lsn import Lsn
from streamer.mapping.rules import SourceLabel
from streamer.progress.bookkeeping import Bookkeeping

_POSITIONS_SQL: Final = """
select s.database, s.sid, s.acknowledged_lsn::text as acknowledged_lsn,
       r.id as relation_id, r.source, r.state, r.visible_lsn::text as visible_lsn,
       r.id in (select relation_id from streamer.request) as has_request
from streamer.source s left join streamer.relation r on r.source_id = s.id
order by s.database, s.sid, r.source
"""


@dataclass(frozen=True, slots=True)
class RelationPosition:
    """A mapped table: its state, and the position up to which all its changes are visible.

    ``has_request``: its process has not fulfilled a request of an operator yet.
    """

    relation_id: int
    source: str
    state: str
    visible_lsn: Lsn | None
    has_request: bool


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A source with its mapped tables, in the order of their names."""

    label: str
    acknowledged_lsn: Lsn
    relations: list[RelationPosition] = field(default_factory=list)


async def read_positions(bookkeeping: Bookkeeping) -> dict[str, SourcePosition]:
    """Return the positions of each source by its label, all as of one moment.

    Clients that wait ask for them several times a second, so this reads no more than they need.
    """
    rows = await bookkeeping.fetch(_POSITIONS_SQL)
    found: dict[str, SourcePosition] = {}
    for row in rows:
        label = SourceLabel(row["database"], row["sid"])
        if label not in found:
            found[label] = SourcePosition(label, Lsn.parse(row["acknowledged_lsn"]))
        if row["relation_id"] is not None:
            visible = row["visible_lsn"]
            found[label].relations.append(
                RelationPosition(
                    row["relation_id"],
                    row["source"],
                    row["state"],
                    None if visible is None else Lsn.parse(visible),
                    row["has_request"],
                )
            )
    return found
