"""``streamer conflicts``: reads the log of conflicts, which workers and drainers write."""

import json
from dataclasses import dataclass
from typing import Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.sources import read_source_records
from streamer.bookkeeping.stored_conflicts import read_newest_conflicts
from streamer.commands.table_requests import by_name
from streamer.commands.terminal_table import Listing, ListingColumn
from streamer.mapping.scope import Scope
from streamer.target.connection import TargetAddress


@dataclass(frozen=True, slots=True)
class ConflictRecord:
    """A conflict in ``conflicts --json``.

    ``key``: the text of each column, by the source's names. ``lsn``, ``commit_time`` and ``xid``
    belong to the source's transaction. ``existing``: the row of the target that already had the
    key: ``xmin``, and ``committed_at`` with track_commit_timestamp; None without such a row.
    """

    id: int
    database: str
    sid: str | None
    table: str
    target: str
    kind: str
    resolution: str
    operation: str
    key: dict[str, str | None] | None
    lsn: str
    commit_time: str
    xid: int
    existing: dict[str, Any] | None
    noted_at: str


async def read_conflicts(address: TargetAddress, scope: Scope, limit: int) -> list[ConflictRecord]:
    """Return the newest conflicts of the sources and tables of *scope*, at most *limit*.

    Raises TargetConnectionError, TargetRejectedError; MappingError for a faulty pattern.
    """
    bookkeeping = Bookkeeping(address, "streamer conflicts")
    try:
        if not await is_installed(bookkeeping):
            return []
        sources = {r.source_id: r for r in await read_source_records(bookkeeping)}
        relations = {
            relation.relation_id: relation
            for relation in await read_relation_records(bookkeeping)
            if scope.select(sources[relation.source_id], by_name([relation]))
        }
        conflicts = await read_newest_conflicts(bookkeeping, list(relations), limit)
    finally:
        await bookkeeping.close()
    listed = []
    for conflict in conflicts:
        relation = relations[conflict.relation_id]
        source = sources[relation.source_id]
        listed.append(
            ConflictRecord(
                id=conflict.id,
                database=source.database,
                sid=source.sid,
                table=relation.source,
                target=relation.target,
                kind=conflict.kind,
                resolution=conflict.resolution,
                operation=conflict.operation,
                key=_parsed(conflict.key),
                lsn=conflict.lsn,
                commit_time=conflict.commit_time.isoformat(),
                xid=conflict.xid,
                existing=_parsed(conflict.existing),
                noted_at=conflict.noted_at.isoformat(),
            )
        )
    return listed


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def fields_as_text(values: dict[str, Any] | None) -> str:
    """Return names and values on one line."""
    return " ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in (values or {}).items()
        if value is not None
    )


LISTING: Final[Listing[ConflictRecord]] = Listing(
    "conflicts",
    (
        ListingColumn("table", lambda c: c.table if c.sid is None else f"{c.sid} {c.table}"),
        ListingColumn("conflict", lambda c: f"{c.kind}, {c.resolution}"),
        ListingColumn("row", lambda c: fields_as_text(c.key)),
        ListingColumn("change", lambda c: f"{c.operation}, committed {c.commit_time}"),
        ListingColumn("position", lambda c: f"{c.lsn}, xid {c.xid}"),
        ListingColumn("target's row", lambda c: fields_as_text(c.existing)),
        ListingColumn("noted", lambda c: c.noted_at),
    ),
    "no conflicts",
)
