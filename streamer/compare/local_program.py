"""A comparison without Spark, in which threads of a process read range by range.

Each thread has a `streamer.compare.unit_reader.UnitReader`, with two connections and memory for the
rows of a small range. A thread takes the next range and reads it to the end. The results of a job
that only finds ranges (``finds_only``) contain these as ``parts``.

`streamer.compare.local_launcher` writes the job to standard input, as a line of JSON. The answer is
a line of JSON on standard output. The process ends when standard input is closed, so it never
outlives the parent. SIGTERM cancels the statements that run.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import chain
from typing import Any, Final, NoReturn

from streamer.compare.compared_table import ComparedTable
from streamer.compare.comparison_files import VerdictFile, write_files
from streamer.compare.readings import ComparisonEnds, SharedItems, Unit
from streamer.compare.unit_reader import UnitReader
from streamer.compare.verdicts import Findings, TableFinding
from streamer.copy.parts.part_copier import TransientError

DIFFERING_MAX: Final = 10_000
"""The number of differing rows after which a verification stops reading a table, which needs a
repair anyway.
"""
ATTEMPTS: Final = 4
"""The number of attempts of a reading before its failure ends the comparison, as for Spark's
tasks.
"""
END_SECONDS: Final = 3.0
CANCEL_SECONDS: Final = 1.0
"""The time limit for cancelling statements. The parent kills this process after two seconds."""


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the tables of *job*; return a result for each, like the Spark program.

    Raises TransientError, after which the same comparison continues with the remaining ranges;
    OSError for a file that cannot be written.
    """
    ends = ComparisonEnds.read(job["ends"])
    tables = {row["relation_id"]: ComparedTable.from_json(row) for row in job["tables"]}
    units = SharedItems(map(Unit.from_row, job["units"]))
    parts: list[Unit] = []
    count = max(1, min(job["jobs"], len(job["units"])))
    readers = [UnitReader(tables, ends, job, ATTEMPTS) for _ in range(count)]
    pool = ThreadPoolExecutor(count)
    with VerdictFile() as verdicts:
        running = [pool.submit(_read, job, reader, units, parts, verdicts) for reader in readers]
        try:
            for done in as_completed(running):
                done.result()
        except BaseException:
            units.stop()
            _end(readers, running)
            raise
        finally:
            pool.shutdown(wait=False)
        write_files(job, tables, verdicts)
    findings = Findings(tables, job["keys_max"])
    for reader in readers:
        findings.merge(reader.findings.by_table)
    results = findings.results()
    for row in results if job["finds_only"] else ():
        row["parts"] = [part.to_row() for part in parts if part.relation_id == row["relation_id"]]
    return results


def _read(
    job: dict[str, Any],
    reader: UnitReader,
    units: SharedItems[Unit],
    parts: list[Unit],
    verdicts: VerdictFile,
) -> None:
    """Read ranges until none remains, in a thread."""
    is_background, findings = bool(job.get("is_background")), reader.findings
    open_units = (
        u for u in units if not (is_background and _is_enough(findings.get(u.relation_id)))
    )
    with reader:
        differing = chain.from_iterable(map(reader.find, open_units))
        if job["finds_only"]:
            parts.extend(differing)
            return
        for verdict in reader.judge(differing):
            if job["report"] or job["sql"]:
                verdicts.add(verdict)


def _is_enough(finding: TableFinding) -> bool:
    """Return whether a verification may stop reading a table."""
    differing = finding.missing + finding.extra + finding.different
    return finding.error is not None or differing >= DIFFERING_MAX


def _end(readers: list[UnitReader], running: list[Future[None]]) -> None:
    """Cancel statements until all threads end, for a limited time."""
    deadline = time.monotonic() + CANCEL_SECONDS
    while not all(thread.done() for thread in running) and time.monotonic() < deadline:
        for reader in readers:
            reader.cancel()
        time.sleep(0.05)


# ---- the process -------------------------------------------------------------------------------


def _end_with_input() -> None:
    """End this process after the end of the parent."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_SECONDS)
    os._exit(1)


def _cancel(*_: object) -> NoReturn:
    """Cancel the statement that psycopg runs."""
    raise KeyboardInterrupt


def _answer(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run as a program."""
    signal.signal(signal.SIGTERM, _cancel)
    try:
        job = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_input, daemon=True).start()
        if job.get("is_background"):
            os.nice(10)  # the streams have priority
        _answer({"result": run(job)})
    except KeyboardInterrupt:
        return 1
    except Exception as exc:  # noqa: BLE001  # reported to the parent process
        _answer(failure(exc))
        return 1
    return 0


def failure(exc: Exception) -> dict[str, Any]:
    """Return the answer about an error. An error that is not from a server or a file is a defect.
    Pure.

    The traceback contains lines of code, and no values of rows.
    """
    text = str(exc) or type(exc).__name__
    if isinstance(exc, TransientError | OSError):
        return {"error": text}
    frames = "".join(traceback.format_tb(exc.__traceback__))
    return {"error": f"{type(exc).__name__}: {text}", "traceback": frames}


if __name__ == "__main__":
    os._exit(main())  # a thread that cannot be cancelled delays no exit
