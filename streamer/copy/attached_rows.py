"""Copies the rows of partitions that were attached with rows (`ddl: capture`).

Attaching moves no row, so the stream lacks these rows. streamer requests a copy of the rows within
the partition's bounds, and the table stays in sync meanwhile. The bookkeeping records the partition
once such a copy has ended. Until then each check repeats a lost request, for example after a pause.
After a failure the table shows the error, and an operator acts.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_states import read_attach_state
from streamer.bookkeeping.requests import request_automatic
from streamer.control.resync_options import Mode, Resync, RowScope
from streamer.copy.resync_scope import parse_condition
from streamer.errors.error_classes import MappingError
from streamer.mapping.rules import RelationMapping
from streamer.source.connection import Connection, fetch_all
from streamer.source.tables.attached_partitions import Leaf
from streamer.util.failpoints import failpoint

log = structlog.get_logger()

_BOUNDS_SQL: Final = """
select o.oid::int8 as oid, pg_catalog.pg_get_partition_constraintdef(o.oid) as bounds
from unnest(%s::oid[]) o (oid)
"""


def resync_of(mapping: RelationMapping, bounds: Sequence[str | None]) -> Resync:
    """Return the options of the copy of the rows within *bounds*. Pure.

    The copy compares all rows if the target cannot evaluate the bounds. For example, the bounds of
    a hash partition refer to a table of the source.
    """
    for text in bounds:
        if text is None or "satisfies_hash_partition" in text:
            return Resync(Mode.DIFF)
        try:
            names = parse_condition(text).names
        except MappingError:
            return Resync(Mode.DIFF)
        target_columns = [mapping.target_column(name) for name in names]
        if any(name is None or mapping.is_computed(name) for name in target_columns):
            return Resync(Mode.DIFF)
    return Resync(Mode.DIFF, scope=RowScope(tuple(text for text in bounds if text is not None)))


class AttachedRows:
    """Requests copies of attached rows, for one attempt to stream a source."""

    def __init__(self) -> None:
        self._requested: dict[tuple[int, Leaf], str] = {}
        """For each leaf, the point of the relation's last copy at the time of the request."""

    async def request_rows(
        self, bookkeeping: Bookkeeping, plain: Connection, mapped: MappedRelation, gaps: list[Leaf]
    ) -> list[Leaf]:
        """Request the rows of *gaps*; return the leaves whose rows are copied by now."""
        relation_id = mapped.relation_id
        async with bookkeeping.transaction() as connection:
            row = await read_attach_state(connection, relation_id)
            if row is None or row["is_requested"] or row["state"] != "ready":
                return []
            point, is_well = row["snapshot_lsn"], row["is_well"]
            points = {leaf: self._requested.get((relation_id, leaf)) for leaf in gaps}
            if not is_well:  # the copy has failed: request again after the error
                for leaf in gaps:
                    self._requested.pop((relation_id, leaf), None)
                return []
            # Only a copy that succeeds changes the point.
            copied = [
                leaf for leaf, requested_at in points.items() if requested_at not in (None, point)
            ]
            if requested := [leaf for leaf in gaps if leaf not in copied]:
                rows = await fetch_all(plain, _BOUNDS_SQL, [leaf.oid for leaf in requested])
                resync = resync_of(mapped.mapping, [row["bounds"] for row in rows])
                await request_automatic(connection, relation_id, resync)
                failpoint("attach.requesting")
        for leaf in copied:
            del self._requested[relation_id, leaf]
        for leaf in requested:
            self._requested[relation_id, leaf] = point
            log.info(
                "copying rows of an attached partition",
                table=str(mapped.mapping.source),
                partition=str(leaf.name),
            )
        return copied
