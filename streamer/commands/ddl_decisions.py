"""``streamer ddl``: lists changes of definitions, and requests decisions about waiting changes.

A running process acts on a decision within seconds; a stopped one at its next start.
"""

from collections.abc import Sequence
from typing import Final

from streamer.bookkeeping.bookkeeping_schema import installed
from streamer.bookkeeping.ddl_records import DdlRecord, read_ddl, read_waiting
from streamer.bookkeeping.requests import make_requests
from streamer.commands.table_requests import command_actor, read_matching
from streamer.commands.terminal_table import Listing, ListingColumn
from streamer.errors.command_lines import command
from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import parse_relation
from streamer.mapping.rules import SourceLabel
from streamer.mapping.scope import Scope
from streamer.target.connection import TargetAddress


async def read_records(
    address: TargetAddress, database: str | None, sid: str | None, *, with_done: bool
) -> list[DdlRecord]:
    """Return waiting changes of definitions, oldest first; *with_done*: also finished changes."""
    async with installed(address, "streamer ddl") as bookkeeping:
        records = await read_ddl(bookkeeping, with_done=with_done)
    scope = Scope(database=database, sid=sid)
    return [r for r in records if scope.select(r, [(r.table, r.row_sid, r)])]


async def store_decision(
    address: TargetAddress,
    action: str,
    table: str,
    database: str | None,
    sid: str | None,
    statements: Sequence[str] | None = None,
) -> dict[int, str]:
    """Request *action* for the waiting change of each matching table; return tables by request id.

    *statements*: the statements to run at the target in place of streamer's own. Raises
    MappingError if no such table waits.
    """
    pattern = parse_relation(table, "public")
    options = None if statements is None else {"statements": list(statements)}
    async with installed(address, "streamer ddl") as bookkeeping:
        waiting = await read_waiting(bookkeeping)
        matching = await read_matching(bookkeeping, pattern, database, sid)
        names = {
            relation.relation_id: f"{source.label} {relation.source}"
            for source, relation in matching
            if relation.relation_id in waiting
        }
        if not names:
            raise MappingError(
                f'no table "{table}" waits for a decision', hint=f"see `{command('ddl list')}`"
            )
        made = await make_requests(
            bookkeeping, list(names), f"ddl_{action}", options, actor=command_actor()
        )
    return {number: names[relation_id] for relation_id, number in made.items()}


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
