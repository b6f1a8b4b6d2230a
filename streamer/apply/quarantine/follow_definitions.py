"""Applies changes of a table's definition to rows in quarantine (`ddl: capture`).

A row in quarantine stores its values under the column names of the source, and a retry finds the
target's columns by these names. A renamed column gets the new name, and a dropped column is
removed. An INSERT from before ADD COLUMN gets the value that the source gave to existing rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.bookkeeping.quarantined_changes import (
    QuarantinedChange,
    follow_quarantined,
    read_quarantine_page,
)
from streamer.schema.source_definition import ColumnChange, columns_after
from streamer.target.connection import TargetConnection


@dataclass(frozen=True, slots=True)
class Added:
    """A new column. ``text``: the value in existing rows; ``type_oid``: its type at the target."""

    text: str | None
    type_oid: int


def followed(
    row: QuarantinedChange, moved: Mapping[str, str | None], added: Mapping[str, Added]
) -> tuple[str | None, str | None, str | None, str]:
    """Return key, old and new values, and definition of a row in quarantine after a change. Pure.

    *row* holds these values as JSON. *moved*: columns by former name; None for a dropped column.
    """
    definition = json.loads(row.definition)
    columns = [
        [moved.get(name, name), *facts]
        for name, *facts in definition["columns"]
        if moved.get(name, name) is not None
    ]
    new = _renamed(row.new, moved)
    if row.operation == "insert" and new is not None:
        new |= {name: column.text for name, column in added.items()}
        columns += [[name, column.type_oid, -1, False] for name, column in added.items()]
    key, old = _renamed(row.key, moved), _renamed(row.old, moved)
    return _json(key), _json(old), _json(new), json.dumps(definition | {"columns": columns})


def _renamed(text: str | None, moved: Mapping[str, str | None]) -> dict[str, Any] | None:
    if text is None:
        return None
    renamed = {moved.get(name, name): value for name, value in json.loads(text).items()}
    return {name: value for name, value in renamed.items() if name is not None}


def _json(values: dict[str, Any] | None) -> str | None:
    return None if values is None else json.dumps(values)


async def follow_changes(
    connection: TargetConnection,
    relation_id: int,
    changes: Sequence[ColumnChange],
    new_types: Mapping[str, str],
) -> None:
    """Change the rows in quarantine of a relation; *new_types*: the types of the target's new
    columns, by the source's names.
    """
    moved: dict[str, str | None] = {}
    added: dict[str, Added] = {}
    last = 0
    while rows := await read_quarantine_page(connection, relation_id, last):
        if not last:
            for former, column in columns_after(changes).items():
                if column is None or column.name != former:
                    moved[former] = None if column is None else column.name
            for change in changes:
                if change.before is None and change.after is not None:
                    name, constant = change.after.name, change.after.constant
                    if constant is not None and name in new_types:
                        added[name] = await _read_added(connection, constant, new_types[name])
            if not moved and not added:
                return
        last = rows[-1].id
        written = [(row.id, *followed(row, moved, added)) for row in rows]
        await follow_quarantined(connection, written)


async def _read_added(connection: TargetConnection, constant: str, kind: str) -> Added:
    (row,) = await connection.fetch(
        f"select ({constant})::{kind}::text as text, pg_catalog.to_regtype($1)::oid::int8 as oid",
        kind,
    )
    return Added(row["text"], row["oid"])
