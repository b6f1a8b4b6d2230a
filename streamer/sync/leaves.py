"""Tells of partitions that were attached to a published table with rows in them: a gap.

What the snapshot of a copy sees is known; what is there later, came with rows and is not known, is
said in the table's status until the table is copied again.
"""

from collections.abc import Iterable

import structlog

from streamer.apply.lane import MappedRelation
from streamer.hints import command
from streamer.progress.store import Store
from streamer.source.connection import Connection
from streamer.source.partitions import brought_rows, read_leaves

log = structlog.get_logger()


async def know_leaves(store: Store, plain: Connection, relations: Iterable[MappedRelation]) -> None:
    """Take the partitions of *relations* that the transaction of *plain* sees as known."""
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    for name, leaves in (await read_leaves(plain, by_name)).items():
        await store.set_leaves(by_name[name].relation_id, [leaf.oid for leaf in leaves])


async def look_at_leaves(
    store: Store, plain: Connection, relations: Iterable[MappedRelation]
) -> None:
    """Say which partitions have brought rows along since *relations*, all in step, were copied."""
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    found = await read_leaves(plain, by_name)
    if not found:
        return
    stored = await store.leaves([by_name[name].relation_id for name in found])
    for name, leaves in found.items():
        mapped = by_name[name]
        known = stored.get(mapped.relation_id)
        # What was not looked at when it was copied, by an older version, is taken as it is.
        new = [] if known is None else [leaf for leaf in leaves if leaf.oid not in known]
        brought = [await brought_rows(plain, leaf) for leaf in new]
        gaps = [leaf for leaf, has in zip(new, brought, strict=True) if has]
        unknown = [leaf for leaf, has in zip(new, brought, strict=True) if has is not False]
        oids = [leaf.oid for leaf in leaves if leaf not in unknown]
        if known is None or set(known) != set(oids):
            await store.set_leaves(mapped.relation_id, oids)
        if gaps:
            names = ", ".join(f'"{leaf.name}"' for leaf in gaps)
            own = mapped.source
            resync = command(
                "resync", str(name), "--mode", "diff", database=own.database, sid=own.sid
            )
            error = (
                f"{names} came as a partition with rows in it, which do not travel; "
                f"{resync} brings them"
            )
            if await store.tell_of_gap(mapped.relation_id, error):
                log.warning("partition attached", table=str(name), error=error)
