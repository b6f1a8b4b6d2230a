"""``streamer teardown``: removes streamer's objects at the sources, and its bookkeeping.

Rows in the target stay. A second run is harmless.
"""

from pathlib import Path

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import drop_if_empty, is_installed, read_installation
from streamer.bookkeeping.deferred_indexes import read_deferred_targets, restore_indexes
from streamer.bookkeeping.requests import TEARDOWN, begin_act, end_request
from streamer.bookkeeping.server_of_run import read_known_server
from streamer.bookkeeping.sources import forget_source, read_source_records
from streamer.copy.staging_tables import drop_leftover_stages, find_leftover_stages
from streamer.errors.error_classes import SourceError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.relation_names import parse_name
from streamer.mapping.rules import SourceMapping
from streamer.source.journal.journal_files import directory_of, remove_journal
from streamer.source.slot_and_publications.source_teardown import Teardown, teardown_source
from streamer.target.connection import TargetAddress, target_connection
from streamer.util.waiting import in_thread


async def teardown(
    address: TargetAddress,
    sources: list[SourceMapping],
    spools: Path,
    *,
    actor: str | None,
    drops_schema: bool = True,
) -> list[Teardown]:
    """Drop slots, publications, journals (below *spools*) and bookkeeping of *sources*.

    *drops_schema*: also drop a schema that is then empty. *actor*: the operator, for the target's
    audit. None: the mapping database records the act, and outlives the bookkeeping.
    """
    bookkeeping = Bookkeeping(address, "streamer teardown")
    try:
        exists = await is_installed(bookkeeping)
        installation = await read_installation(bookkeeping) if exists else None
        acts = {
            source.label: await begin_act(bookkeeping, actor, TEARDOWN, source.label)
            for source in sources
            if exists and actor is not None
        }
        results = [
            await teardown_source(
                source, installation, await read_known_server(bookkeeping, source)
            )
            for source in sources
        ]
        for source, result in zip(sources, results, strict=True):
            if not result.is_taken:
                await in_thread(remove_journal, directory_of(spools, source.slot))
        if exists:
            labels = {result.label for result in results if not result.is_elsewhere}
            for record in await read_source_records(bookkeeping):
                if record.label in labels:
                    await forget_source(bookkeeping, record.source_id)
            await _restore(address)
            errors = {r.label: ErrorReport(r.error, SourceError.code) for r in results if r.error}
            for label, number in acts.items():
                await end_request(bookkeeping, number, errors.get(label))
            if drops_schema:
                await drop_if_empty(bookkeeping)
    finally:
        await bookkeeping.close()
    return results


async def _restore(address: TargetAddress) -> None:
    """Clean up after abandoned copies, which only the bookkeeping lists."""
    async with target_connection(address, "streamer teardown") as target:
        await drop_leftover_stages(target, await find_leftover_stages(target))
        for name in await read_deferred_targets(target):
            await restore_indexes(target, parse_name(name))
