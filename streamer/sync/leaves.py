"""Tells of partitions that were attached to a published table with rows in them: a gap.

What is there when a table is about to be copied is known from then on; what is new later, and came
with rows, is said in the table's status until it is copied again.
"""

from collections.abc import Iterable

import structlog

from streamer.apply.lane import MappedRelation
from streamer.progress.store import Store
from streamer.source.connection import Connection
from streamer.source.partitions import read_leaves

log = structlog.get_logger()


async def know_leaves(store: Store, plain: Connection, relations: Iterable[MappedRelation]) -> None:
    """Take the partitions of *relations*, which are to be copied, as known."""
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    for name, leaves in (await read_leaves(plain, by_name)).items():
        await store.set_leaves(by_name[name].relation_id, [leaf.oid for leaf in leaves])


async def look_at_leaves(
    store: Store, plain: Connection, relations: Iterable[MappedRelation]
) -> None:
    """Say which partitions have brought rows along since *relations* were copied."""
    by_name = {mapped.mapping.source: mapped for mapped in relations}
    found = await read_leaves(plain, by_name)
    if not found:
        return
    known = await store.leaves([by_name[name].relation_id for name in found])
    for name, leaves in found.items():
        mapped = by_name[name]
        before = known.get(mapped.relation_id)
        oids = [leaf.oid for leaf in leaves]
        if before is not None and set(before) == set(oids):
            continue
        gaps = [leaf for leaf in leaves if leaf.brought_rows and leaf.oid not in (before or oids)]
        error = None
        if gaps:
            names = ", ".join(f'"{leaf.name}"' for leaf in gaps)
            error = (
                f"{names} came as a partition with rows in it, which do not travel; streamer "
                f"resync '{name}' --database {mapped.source.database} --mode diff brings them"
            )
            log.warning("partition attached", table=str(name), error=error)
        await store.set_leaves(mapped.relation_id, oids, error)
