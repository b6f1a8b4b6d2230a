"""``streamer ddl``: lists changes of definitions, and stores decisions about those that wait.

A running process acts on a decision within seconds; a stopped one at its next start.
"""

from collections.abc import Sequence
from typing import Final

from streamer.commands.listing import Listing, ListingColumn
from streamer.commands.requests import command_actor
from streamer.errors import MappingError
from streamer.hints import command
from streamer.mapping.names import parse_name, parse_relation
from streamer.mapping.rules import SourceLabel
from streamer.progress.definition_changes import DdlRecord, decide, read_ddl
from streamer.progress.relations import read_relation_records
from streamer.progress.schema import installed
from streamer.progress.sources import read_source_records
from streamer.target.connection import TargetAddress


async def read_records(
    address: TargetAddress, database: str | None, sid: str | None, *, with_done: bool
) -> list[DdlRecord]:
    """Return the commands of some sources that wait, oldest first; *with_done*: all."""
    async with installed(address, "streamer ddl") as bookkeeping:
        records = await read_ddl(bookkeeping, with_done=with_done)
    return [r for r in records if database in (None, r.database) and sid in (None, r.sid)]


async def store_decision(
    address: TargetAddress,
    action: str,
    table: str,
    database: str | None,
    sid: str | None,
    statements: Sequence[str] | None = None,
) -> list[str]:
    """Decide about the command for which each matching table waits; return these tables.

    *statements*: those to run at the target in place of streamer's own. Raises MappingError if no
    such table waits.
    """
    pattern = parse_relation(table, "public")
    decided = []
    async with installed(address, "streamer ddl") as bookkeeping:
        for source in await read_source_records(bookkeeping):
            if database not in (None, source.database) or sid not in (None, source.sid):
                continue
            for relation in await read_relation_records(bookkeeping, source.source_id):
                if not pattern.matches(parse_name(relation.source)):
                    continue
                actor = command_actor()
                if await decide(bookkeeping, relation.relation_id, action, statements, actor=actor):
                    decided.append(f"{source.label} {relation.source}")
    if not decided:
        raise MappingError(
            f'no table "{table}" waits for a decision', hint=f"see `{command('ddl list')}`"
        )
    return decided


LISTING: Final[Listing[DdlRecord]] = Listing(
    "ddl",
    (
        ListingColumn("id", lambda record: record.id, is_number=True),
        ListingColumn("source", lambda record: SourceLabel(record.database, record.sid)),
        ListingColumn("table", lambda record: record.table),
        ListingColumn("state", lambda record: record.state),
        ListingColumn("changes", lambda record: "; ".join(record.changes)),
        ListingColumn("at the target", lambda record: "; ".join(record.statements)),
        ListingColumn("reason", lambda record: record.reason),
    ),
    "no change to a definition waits for a decision",
)
