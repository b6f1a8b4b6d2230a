"""``streamer resync``, ``pause`` and ``resume``: asked through the bookkeeping in the target.

A running process hears of a request at once; a stopped one finds it at its next start.
"""

import getpass
from typing import Any

from streamer.errors import MappingError
from streamer.mapping.rules import parse_name, parse_relation
from streamer.progress.store import RelationRecord, SourceRecord, Store
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
    store = Store(address, f"streamer {action}")
    try:
        if not await store.exists():
            raise MappingError("nothing is set up yet", hint="start `streamer run` first")
        found: list[tuple[SourceRecord, RelationRecord]] = []
        for source in await store.sources():
            if (database is not None and source.database != database) or (
                sid is not None and source.sid != sid
            ):
                continue
            found += [
                (source, relation)
                for relation in await store.relations(source.source_id)
                if pattern.matches(parse_name(relation.source))
            ]
        if not found:
            raise MappingError(
                f'no table "{table}" is streamed', hint="`streamer status` lists those that are"
            )
        await store.make_requests(
            [relation.relation_id for _, relation in found],
            action,
            options,
            actor=actor or command_actor(),
        )
    finally:
        await store.close()
    return [f"{source.label} {relation.source}" for source, relation in found]
