"""``streamer teardown``: removes streamer's objects at the sources, and its bookkeeping.

Rows in the target stay. A second run is fine.
"""

from pathlib import Path

from streamer.errors import MappingError
from streamer.mapping.rules import Mapping, SourceMapping, parse_name
from streamer.progress.audit import TEARDOWN
from streamer.progress.store import Store
from streamer.source.journal.files import directory_of, remove_journal
from streamer.source.teardown import Teardown, teardown_source
from streamer.sync.stage import drop_leftover_stages
from streamer.target.connection import TargetAddress, target_connection
from streamer.target.deferred_indexes import read_deferred_targets, restore_indexes


def choose(mapping: Mapping, database: str | None, sid: str | None) -> list[SourceMapping]:
    """Return the sources that are meant. Raises MappingError for none."""
    chosen = [
        source
        for source in mapping.sources
        if (database is None or source.database == database) and (sid is None or source.sid == sid)
    ]
    if not chosen:
        known = ", ".join(source.label for source in mapping.sources)
        raise MappingError("no such source", hint=f"there are: {known}")
    return chosen


async def teardown(
    address: TargetAddress, sources: list[SourceMapping], spools: Path, *, actor: str | None
) -> list[Teardown]:
    """Drop slots, publications, journals (below *spools*) and bookkeeping of *sources*, and the
    schema when nothing is left in it.

    *actor*: the operator, for the target's audit. None: the mapping database has the act, which
    outlives the bookkeeping.
    """
    store = Store(address, "streamer teardown")
    try:
        exists = await store.exists()
        installation = await store.installation() if exists else None
        if exists and actor is not None:
            for source in sources:
                await store.write_act(actor, TEARDOWN, source.label)
        results = [await teardown_source(source, installation) for source in sources]
        for source in sources:
            remove_journal(directory_of(spools, source.slot))
        if exists:
            labels = {result.label for result in results}
            for record in await store.sources():
                if record.label in labels:
                    await store.forget_source(record.source_id)
            await _restore(address)
            await store.drop_if_empty()
    finally:
        await store.close()
    return results


async def _restore(address: TargetAddress) -> None:
    """Clean up after an abandoned copy, which only the bookkeeping knows."""
    async with target_connection(address, "streamer teardown") as target:
        await drop_leftover_stages(target)
        for name in await read_deferred_targets(target):
            await restore_indexes(target, parse_name(name))
