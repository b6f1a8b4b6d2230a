"""The files of a comparison: a report in lines of JSON, and statements of SQL.

Threads and the driver of Spark add verdicts in any order. `VerdictFile` sorts the verdicts.
"""

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from streamer.compare.readings import Tables
from streamer.compare.repair_statements import statements
from streamer.compare.verdicts import UNDECIDED, KeyVerdict, verdict_fields
from streamer.postgres.session_settings import TEXT_FORMAT, pin_sql

PARQUET: Final = ".parquet"
"""The suffix of a report that only Spark writes."""

ReportWriter = Callable[[Path, Tables, Iterable[KeyVerdict]], None]


class VerdictFile(closing["VerdictFile"]):
    """The verdicts for the files of a comparison, in a temporary file that SQLite unlinks at
    once.
    """

    def __init__(self) -> None:
        super().__init__(self)
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute("pragma journal_mode = off")
        names = ", ".join(KeyVerdict._fields)
        self._database.execute(f"create table verdict ({names})")
        self._insert = (
            f"insert into verdict values ({', '.join(f':{name}' for name in KeyVerdict._fields)})"
        )
        self._lock = threading.Lock()

    def add(self, verdict: KeyVerdict) -> None:
        row = {**verdict._asdict(), "columns": json.dumps(verdict.columns)}
        with self._lock:
            self._database.execute(self._insert, row)

    def in_order(self, *, with_undecided: bool) -> Iterator[KeyVerdict]:
        """Yield verdicts in the order of relation and key; with undecided verdicts, in the order of
        relation, kind and key.
        """
        order = "relation, kind, key" if with_undecided else "relation, key"
        for row in self._database.execute(f"select * from verdict order by {order}"):
            verdict = KeyVerdict(*row)
            if with_undecided or verdict.kind != UNDECIDED:
                yield verdict._replace(columns=json.loads(row[KeyVerdict._fields.index("columns")]))

    def close(self) -> None:
        self._database.close()


def write_report(path: Path, tables: Tables, verdicts: Iterable[KeyVerdict]) -> None:
    """Write a line of JSON for each verdict. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for verdict in verdicts:
            table = tables[verdict.relation]
            line = {
                "database": table.database,
                "sid": table.sid,
                "table": table.source_name,
                "target": table.target_name,
                **verdict_fields(table, verdict),
                "lsn": verdict.lsn,
            }
            file.write(json.dumps(line) + "\n")


def write_statements(path: Path, tables: Tables, verdicts: Iterable[KeyVerdict]) -> None:
    """Write the SQL of `streamer.compare.repair_statements`, in a transaction. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{pin_sql(TEXT_FORMAT)};\nbegin;\n")
        for verdict in verdicts:
            table = tables[verdict.relation]
            for statement in statements(table, verdict_fields(table, verdict)):
                file.write(f"{statement};\n")
        file.write("commit;\n")


def write_files(
    job: dict[str, Any],
    tables: Tables,
    verdicts: VerdictFile,
    write_report: ReportWriter = write_report,
) -> None:
    """Write the files of *job*. Raises OSError."""
    if report := job["report"]:
        write_report(Path(report), tables, verdicts.in_order(with_undecided=True))
    if sql := job["sql"]:
        write_statements(Path(sql), tables, verdicts.in_order(with_undecided=False))
