"""Status, draft and plan in the shape that templates read. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import urlencode

from streamer.admin.live.effects_of_target import causes_of, state_of_source
from streamer.admin.live.table_activity import TableActivity
from streamer.copy.automatic_waits import STARTING_SPARK
from streamer.errors.error_classes import MappingError
from streamer.errors.error_reports import ErrorReport, error_fields
from streamer.mapping.relation_names import parse_name, parse_relation
from streamer.mapping.rules import SourceLabel
from streamer.report.problem_facts import (
    WAITING,
    WITHOUT_STREAM,
    shown_state,
    source_of_row,
    wait_of_row,
)
from streamer.report.problems import Severity, of_source

Row = dict[str, Any]

TABLES_MAX: Final = 40
"""The limit of a source's tables on the overview; the page of the source shows all."""
_UNDER_WAY: Final = ("copying", "catching_up", "init")


SHOWN_STATES: Final = (
    "error", "paused", WAITING, "queued", "init", "copying", "catching_up", WITHOUT_STREAM, "ready"
)  # fmt: skip
"""The states of tables on the page, see `state_of_table`."""


COPYING: Final = ("init", "copying")


def address(path: str, **parameters: Any) -> str:
    """Return a path with parameters, without parameters of value None."""
    query = {name: value for name, value in parameters.items() if value is not None}
    return f"{path}?{urlencode(query)}" if query else path


def with_own_state(
    sources: Iterable[Row], states: dict[tuple[str, str | None], tuple[str, ErrorReport | None]]
) -> list[Row]:
    """Return the sources of the status; the state of a source in this process takes precedence.

    The bookkeeping holds the state of the process that holds a source's lock. If a source's network
    fails, this process may be unable to store the state there.
    """
    shown = []
    for source in sources:
        label = SourceLabel(source["database"], source["sid"])
        state, error = states.get((label, None), (source["state"], None))
        own_state = source.get("own")
        if error is not None and error.text != source["error"] and state != "streaming":
            own_state = {"state": state, **error_fields(error)}
        shown.append(source | {"own": own_state})
    return shown


def copy_progress(sources: Iterable[Row]) -> Row | None:
    """Return the progress of all copies together; None without copies.

    The remaining time follows from the rows per second of all copies, queued copies included. The
    time is unknown until all copies are planned.
    """
    tables = [t for source in sources for t in source["tables"] if t["state"] in COPYING]
    if not tables:
        return None
    rates = [t.get("rows_per_second") or 0.0 for t in tables]
    bytes_done = sum(t.get("bytes_copied") or 0 for t in tables)
    # A planned copy without a size is the copy of an empty table.
    is_planned = all(t["state"] == "copying" for t in tables)
    bytes_total = sum(t.get("bytes_total") or 0 for t in tables)
    rows_done = sum(t["rows_copied"] or 0 for t in tables)
    bytes_per_second = sum(rates) * bytes_done / rows_done if rows_done else 0.0
    bytes_left = bytes_total - bytes_done
    return {
        "tables": len(tables),
        "queued": sum(map(is_queued, tables)),
        "bytes_done": bytes_done,
        "bytes_total": bytes_total if is_planned else None,
        "share": min(1.0, bytes_done / bytes_total) if is_planned and bytes_total else None,
        "seconds_left": max(0.0, bytes_left / bytes_per_second)
        if is_planned and bytes_per_second
        else None,
    }


def table_address(source: Row, table: str) -> str:
    return address("/table", database=source["database"], sid=source["sid"], name=table)


def source_view(
    source: Row, *, target: Row | None = None, is_whole: bool = False, state: str = ""
) -> Row:
    """Return a source of the status with the values of a card, limited to tables in *state*.

    While the target does not answer, the last known values of a source are unconfirmed.
    """
    is_confirmed = target is None or not target["error"]
    places = queue_of(source["tables"])
    worst = _worst_of_tables(source)
    tables = [
        _table_view(source, table, places, worst.get(table["source"])) for table in source["tables"]
    ]
    # Failing tables first, then tables in motion, so that an operator need not search.
    order = {"bad": 0, "warning": 1, "busy": 2}
    if state:
        tables = [table for table in tables if table["shown_state"] == state]
    tables.sort(key=lambda table: (order.get(table["kind"], 3), str(table["source"])))
    shown = tables if is_whole else tables[:TABLES_MAX]
    return source | {
        "label": SourceLabel(source["database"], source["sid"]),
        "address": address("/source", database=source["database"], sid=source["sid"]),
        "tables": shown,
        "table_count": len(tables),
        "shown_state": state_of_source(source, causes_of(target)),
        "is_confirmed": is_confirmed,
        "are_tables_confirmed": is_confirmed and source["state"] == "streaming",
        "heartbeat_seconds": source.get("heartbeat_seconds"),
        "backlog": source.get("backlog"),
    }


def is_queued(table: Row) -> bool:
    """Whether the copy of a table has copied no row yet.

    The bookkeeping says ``copying`` from the moment at which a copy is planned.
    """
    if table["error"]:
        return False  # the copy has failed
    if table["state"] == "copying":
        has_begun = table["rows_copied"] or table.get("bytes_copied")
        return table.get("rows_per_second") is None and not has_begun
    return bool(table["state"] == "init")


def state_of_table(source: Row, table: Row) -> str:
    """Return the state of a table of *source* as badges, filters and counts show the state."""
    if is_queued(table):
        return "queued"
    return shown_state(source["state"], table["state"], wait_of_row(table))


def count_states(sources: Iterable[Row]) -> dict[str, int]:
    """Return the number of tables by shown state, in the order of `SHOWN_STATES`, without zeros."""
    counts = Counter(state_of_table(source, t) for source in sources for t in source["tables"])
    return {state: counts[state] for state in SHOWN_STATES if counts[state]}


def queue_of(tables: Iterable[Row]) -> dict[str, str]:
    """Return the reason why each queued table of a source waits. Copies begin with the largest
    table.
    """
    queued = [table for table in tables if is_queued(table)]
    queued.sort(key=lambda table: (-(table.get("bytes_total") or 0), str(table["source"])))
    return {
        table["source"]: _queue_text(table.get("waiting_for"), place, len(queued))
        for place, table in enumerate(queued, 1)
    }


def _queue_text(waiting_for: str | None, place: int, count: int) -> str:
    if waiting_for == STARTING_SPARK.text:
        return "starting Spark"
    if waiting_for:
        return f"waits for {waiting_for}"
    return f"number {place} of {count} in the queue of copies"


def _worst_of_tables(source: Row) -> dict[str, Severity]:
    """Return the severity of the worst problem of each table."""
    worst: dict[str, Severity] = {}
    for problem in of_source(source_of_row(source)):
        if problem.subject.table is not None:
            severities = problem.severity, worst.get(problem.subject.table, Severity.INFO)
            worst[problem.subject.table] = min(severities, key=list(Severity).index)
    return worst


def _table_view(source: Row, table: Row, places: dict[str, str], worst: Severity | None) -> Row:
    is_under_way = table["state"] in _UNDER_WAY
    return table | {
        "address": table_address(source, table["source"]),
        "kind": "bad"
        if worst is Severity.ERROR
        else "warning"
        if worst is Severity.WARNING
        else "busy"
        if is_under_way
        else "good",
        "is_under_way": is_under_way,
        "shown_state": state_of_table(source, table),
        "queue": places.get(table["source"]),
        "progress": _progress(table),
        "seconds_left": table.get("seconds_left"),
        "rows_per_second": table.get("rows_per_second"),
        "bytes_copied": table.get("bytes_copied"),
        "bytes_total": table.get("bytes_total"),
        "chunks_copied": table.get("chunks_copied"),
        "chunks_total": table.get("chunks_total"),
        "held_changes": table.get("held_changes"),
        "held_bytes": table.get("held_bytes"),
        "verified_at": table.get("verified_at"),
        "differing_rows": table.get("differing_rows"),
        "compared_at": table.get("compared_at"),
        "verification_error": table.get("verification_error"),
        "retained_wal_bytes": table.get("retained_wal_bytes"),
    }


def _progress(table: Row) -> float | None:
    """Return the finished fraction of a copy; None if unknown."""
    if table["state"] != "copying":
        return None
    for done, total in (("bytes_copied", "bytes_total"), ("rows_copied", "rows_total")):
        if table.get(done) is not None and table.get(total):
            return min(1.0, float(table[done]) / float(table[total]))
    return None


Activities = Callable[[str, str], TableActivity | None]


def with_activity(shown: Row, activity: Activities) -> Row:
    """Return a source for the page, with the last change and rate of each table."""
    tables = [
        table | {"activity": activity(shown["label"], table["source"])} for table in shown["tables"]
    ]
    return shown | {"tables": tables}


def matching(tables: list[Row], text: str) -> list[Row]:
    """Return the tables whose name at the source or target, or whose sid, contains *text*."""
    lowered = text.lower()
    shown = ("source", "target", "sid")
    return [t for t in tables if any(lowered in (t.get(name) or "").lower() for name in shown)]


def state_filter(sources: Iterable[Row], state: str, path: str, **parameters: Any) -> list[Row]:
    """Return the links that choose tables by state; none if all tables share a state."""
    counts = count_states(sources)
    links = [("", "all", sum(counts.values())), *((s, s, n) for s, n in counts.items())]
    if len(links) <= 2 and not state:
        return []
    return [
        {
            "label": label,
            "count": number,
            "is_chosen": s == state,
            "address": address(path, **parameters, state=s or None),
        }
        for s, label, number in links
    ]


def summary(sources: list[Row], target: Row | None = None) -> str:
    """Return the state of target, sources and tables in a line."""
    if target is not None and target["error"]:
        words = {
            "unreachable": "is unreachable",
            "refused": "refuses connections",
            "error": "has an error",
        }
        state = words.get(target["state"], f"is {target['state']}")
        return f"The target {state}: sources wait until it accepts changes"
    if not sources:
        return "No source streams yet"
    counts = count_states(sources)
    streaming = sum(source["state"] == "streaming" for source in sources)
    parts = [f"{streaming} of {len(sources)} sources stream"]
    if streaming == len(sources):
        parts = ["1 source streams" if len(sources) == 1 else f"{len(sources)} sources stream"]
    for state, word in (
        ("ready", "ready"),
        ("copying", "copying"),
        ("queued", "queued for a copy"),
        ("init", "waiting to copy"),
        ("catching_up", "catching up"),
        (WAITING, "waiting"),
        ("paused", "paused"),
        ("error", "in error"),
        (WITHOUT_STREAM, WITHOUT_STREAM),
    ):
        if number := counts.get(state):
            parts.append(f"{number} {'table' if number == 1 else 'tables'} {word}")
    if rejected := sum(t.get("quarantined") or 0 for source in sources for t in source["tables"]):
        parts.append(f"{rejected} {'change' if rejected == 1 else 'changes'} in quarantine")
    return ", ".join(parts)


def rule_of(rows: Iterable[Row], name: str) -> Row | None:
    """Return the row of the draft that matches a table: an exact name beats a pattern."""
    relation = parse_name(name)
    best: Row | None = None
    for row in rows:
        try:
            pattern = parse_relation(f"{row['schema']}.{row['name']}", "public")
        except MappingError:
            continue
        if pattern.matches(relation):
            if not pattern.is_pattern:
                return row
            best = best or row
    return best


def plan_view(plan: Row) -> Row:
    """Return a plan in order of importance: sources that change, the worst findings."""
    sources = []
    for source in plan["sources"]:
        tables = [table for table in source["tables"] if table["action"] != "keep"]
        sources.append(
            source
            | {
                "label": SourceLabel(source["database"], source["sid"]),
                "tables": tables,
                "kept": len(source["tables"]) - len(tables),
            }
        )
    order = {"error": 0, "warning": 1, "info": 2}
    findings = sorted(plan["findings"], key=lambda finding: order.get(finding["severity"], 3))
    return plan | {"sources": sources, "findings": findings}
