"""A verdict as results and reports show it. Pure."""

import json
from typing import Any, Final

from streamer.compare.tables import ComparedTable

SAMPLE_ROWS: Final = 10
"""How many keys of a table the result shows."""


def shown(table: ComparedTable, verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a verdict with the names of its columns: key, kind, columns that differ, values."""
    values = json.loads(verdict["key"])
    entry: dict[str, Any] = {
        "key": dict(zip(table.key_columns, values, strict=True)),
        "kind": verdict["kind"],
        "columns": verdict["columns"],
    }
    for side in ("source", "target"):
        if verdict[side] is not None:
            entry[side] = json.loads(verdict[side])
    return entry
