"""``streamer resync``, ``pause`` and ``resume``: asked through the bookkeeping in the target.

A notification wakes a running process at once; a stopped one finds the request at its next start.
"""

import getpass
from collections.abc import Sequence
from typing import Any

from streamer.errors import MappingError
from streamer.mapping.rules import parse_name, parse_relation
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.relations import RelationRecord, read_relation_records
from streamer.progress.requests import make_requests
from streamer.progress.schema import installed
from streamer.progress.sources import SourceRecord, read_source_records
from streamer.target.catalog import read_relations
from streamer.target.connection import TargetAddress


def command_actor() -> str:
    """Return the user of the command line, as the audit names them."""
    try:
        return f"command line: {getpass.getuser()}"
    except (OSError, KeyError):
        return "command line: unknown"


async def request(
    address: TargetAddress,
    action: str,
    table: str,
    *,
    database: str | None,
    sid: str | None,
    options: dict[str, Any] | None = None,
    actor: str | None = None,
) -> list[str]:
    """Ask for *action* on the tables that *table*, a name or a pattern, means; return their names.

    *actor*: the operator, for the audit; by default the user of the command line.

    Raises MappingError when it means none.
    """
    pattern = parse_relation(table, "public")
    async with installed(address, f"streamer {action}") as bookkeeping:
        found: list[tuple[SourceRecord, RelationRecord]] = []
        for source in await read_source_records(bookkeeping):
            if (database is not None and source.database != database) or (
                sid is not None and source.sid != sid
            ):
                continue
            found += [
                (source, relation)
                for relation in await read_relation_records(bookkeeping, source.source_id)
                if pattern.matches(parse_name(relation.source))
            ]
        if (options or {}).get("skip_deletes"):
            found = [each for each in found if each[1].waiting_brake is not None]
            if not found:
                raise MappingError(
                    f'no table "{table}" waits before a mass delete',
                    hint="`streamer status` shows the transaction for which a table is paused",
                )
        if not found:
            raise MappingError(
                f'no table "{table}" is streamed', hint="`streamer status` lists the tables"
            )
        await _check_columns(bookkeeping, found, (options or {}).get("columns") or ())
        await make_requests(
            bookkeeping,
            [relation.relation_id for _, relation in found],
            action,
            options,
            actor=actor or command_actor(),
        )
    return [f"{source.label} {relation.source}" for source, relation in found]


async def _check_columns(
    bookkeeping: Bookkeeping,
    found: list[tuple[SourceRecord, RelationRecord]],
    columns: Sequence[str],
) -> None:
    """Refuse columns that a target table lacks. Raises MappingError."""
    if not columns:
        return
    names = [parse_name(relation.target) for _, relation in found]
    async with bookkeeping.connection() as target:
        there = await read_relations(target, names)
    for name in names:
        present = there[name].columns if name in there else {}
        missing = [column for column in columns if column not in present]
        if missing:
            raise MappingError(
                f'target table "{name}" has no column "{missing[0]}"',
                hint=f"its columns are: {', '.join(present)}",
            )
