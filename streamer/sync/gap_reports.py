"""Reports gaps of ready tables that no change closes.

One kind is a partition that was attached to a published table with rows in it, or that was detached
for a while. The other is a column that a session dropped and added again, or that took another's
name: older rows keep its former values.

The partitions in the snapshot of a copy are known. A later partition that brought rows shows in the
table's status until the next copy.
"""

from collections.abc import Iterable, Mapping

import structlog

from streamer.apply.lane import MappedRelation
from streamer.error_reports import ErrorReport
from streamer.errors import GapError
from streamer.failpoints import failpoint
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.copies import read_columns_known
from streamer.progress.relations import read_known_leaves, report_gap, set_leaves
from streamer.remedies import Remedy, run
from streamer.source.attached_partitions import Leaf, brought_rows, read_leaves
from streamer.source.columns import ColumnNow, read_columns
from streamer.source.connection import Connection
from streamer.sync.attached_rows import AttachedRows
from streamer.target.add_columns import store_known

log = structlog.get_logger()


async def know_leaves(
    bookkeeping: Bookkeeping, plain: Connection, relations: Iterable[MappedRelation]
) -> None:
    """Take the partitions of *relations* that the transaction of *plain* sees as known."""
    for mapped, known in (await read_present(plain, relations)).items():
        await set_leaves(bookkeeping, mapped.relation_id, known)


async def read_present(
    plain: Connection, relations: Iterable[MappedRelation]
) -> dict[MappedRelation, dict[int, str]]:
    """Return the partitions of *relations* that the transaction of *plain* sees, each with the
    transactions that attached it.
    """
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    found = await read_leaves(plain, by_name)
    return {by_name[n]: {leaf.oid: leaf.attached_by for leaf in its} for n, its in found.items()}


async def look_at_leaves(
    bookkeeping: Bookkeeping,
    plain: Connection,
    relations: Iterable[MappedRelation],
    *,
    columns_too: bool = True,
    attached: AttachedRows | None = None,
) -> None:
    """Report partitions that brought rows, or were detached for a while, since the copies of
    *relations*, all in sync.

    *attached* brings these rows, if given. *columns_too*: also report columns that were replaced. A
    stream that brings definitions is behind the catalogs, and makes such a change itself.
    """
    relations = list(relations)
    if not relations:
        return
    if columns_too:
        await look_at_columns(bookkeeping, plain, relations)
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    found = await read_leaves(plain, by_name)
    if not found:
        return
    stored = await read_known_leaves(bookkeeping, [by_name[name].relation_id for name in found])
    for name, leaves in found.items():
        await _look(
            bookkeeping,
            plain,
            by_name[name],
            leaves,
            stored.get(by_name[name].relation_id),
            attached,
        )


async def _look(
    bookkeeping: Bookkeeping,
    plain: Connection,
    mapped: MappedRelation,
    leaves: list[Leaf],
    known: dict[int, str] | None,
    attached: AttachedRows | None,
) -> None:
    # An older version copied without recording partitions, so the present ones count as known.
    new = [] if known is None else [leaf for leaf in leaves if leaf.oid not in known]
    brought = [await brought_rows(plain, leaf) for leaf in new]
    gaps = [leaf for leaf, has in zip(new, brought, strict=True) if has]
    unknown = [leaf for leaf, has in zip(new, brought, strict=True) if has is not False]
    # Nothing that happened to a partition while it was detached is in the stream.
    before = known or {}
    away = [leaf for leaf in leaves if before.get(leaf.oid, "") not in ("", leaf.attached_by)]
    done: list[Leaf] = []
    if attached is not None and (gaps or away):
        done = await attached.bring(bookkeeping, plain, mapped, gaps + away)
    seen = {leaf.oid: leaf.attached_by for leaf in leaves if leaf not in unknown or leaf in done}
    for leaf in away:
        if leaf in done:
            continue
        seen[leaf.oid] = before[leaf.oid]
    if done:
        failpoint("attach.brought")
    if seen != known:
        await set_leaves(bookkeeping, mapped.relation_id, seen)
    if attached is not None or not (gaps or away):
        return
    source, name = mapped.source, str(mapped.mapping.source)
    parts = [
        (gaps, "came as a partition with rows in it, which do not travel"),
        (away, "was detached and attached again, and changes made meanwhile are not replicated"),
    ]
    reasons = [f"{_names(its)} {what}" for its, what in parts if its]
    resync = run("resync", name, "--mode", "diff", database=source.database, sid=source.sid)
    error = GapError("; ".join(reasons), hint=Remedy.of("run: ", resync))
    if await report_gap(bookkeeping, mapped.relation_id, ErrorReport.of(error)):
        log.warning("partition attached", table=name, error=str(error), **error.log_fields)


def _names(leaves: list[Leaf]) -> str:
    return ", ".join(f'"{leaf.name}"' for leaf in leaves)


def replaced_columns(known: Mapping[str, int], now: Mapping[str, ColumnNow]) -> list[str]:
    """Return the columns with another number than *known* has, where one that the target does not
    get is negative. Pure.
    """
    return [c for c, its in now.items() if abs(known.get(c, its.number)) != its.number]


async def look_at_columns(
    bookkeeping: Bookkeeping, plain: Connection, relations: Iterable[MappedRelation]
) -> None:
    """Report columns that differ from those from which copies filled *relations*, all in sync."""
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    async with bookkeeping.connection() as connection:
        ids = [mapped.relation_id for mapped in by_name.values()]
        stored = await read_columns_known(connection, ids)
    for name, columns in (await read_columns(plain, by_name)).items():
        mapped = by_name[name]
        known = stored.get(mapped.relation_id)
        if known is None:
            numbers = {column: now.number for column, now in columns.items()}
            async with bookkeeping.connection() as connection:
                await store_known(connection, mapped.relation_id, numbers)
            continue
        others = replaced_columns(known, columns)
        if others:
            own = mapped.source
            resync = run("resync", str(name), "--mode", "diff", database=own.database, sid=own.sid)
            listed = ", ".join(f'"{column}"' for column in others)
            error = GapError(
                f"column {listed} of the source is another one since a DROP or RENAME, so older "
                "rows keep former values",
                hint=Remedy.of("run: ", resync, "; it brings the present ones"),
            )
            if await report_gap(bookkeeping, mapped.relation_id, ErrorReport.of(error)):
                log.warning(
                    "column replaced", table=str(name), error=str(error), **error.log_fields
                )
