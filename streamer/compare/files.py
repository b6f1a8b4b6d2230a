"""The files of a comparison: a report in lines of JSON, and statements of SQL.

Spark and the process that compares without it both hand over verdicts in the order of the file.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from streamer.compare.readings import Tables
from streamer.compare.results import shown
from streamer.compare.statements import statements
from streamer.postgres.session import TEXT_FORMAT, pin_sql

PARQUET: Final = ".parquet"
"""The suffix of a report that only Spark writes."""


def write_report(path: Path, tables: Tables, verdicts: Iterable[dict[str, Any]]) -> None:
    """Write a line of JSON for each verdict. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for verdict in verdicts:
            table = tables[verdict["relation"]]
            line = {
                "database": table.database,
                "sid": table.sid,
                "table": table.source_name,
                "target": table.target_name,
                **shown(table, verdict),
                "lsn": verdict["lsn"],
            }
            file.write(json.dumps(line) + "\n")


def write_statements(path: Path, tables: Tables, verdicts: Iterable[dict[str, Any]]) -> None:
    """Write the SQL of `streamer.compare.statements`, in one transaction. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{pin_sql(TEXT_FORMAT)};\nbegin;\n")
        for verdict in verdicts:
            table = tables[verdict["relation"]]
            for statement in statements(table, shown(table, verdict)):
                file.write(f"{statement};\n")
        file.write("commit;\n")
