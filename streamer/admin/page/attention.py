"""Problems that need an operator, each with its runbook, command and form. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from streamer import hints
from streamer.admin.page.view import NOT_STREAMING, address, table_address
from streamer.errors import RUNBOOKS
from streamer.mapping.rules import SourceLabel
from streamer.sync.states import is_turn

Row = dict[str, Any]

SYMPTOMS: Final = {
    "target": "target-away",
    "source": "source-unreachable",
    "wal": "source-disk-fills",
    "table": "table-in-error",
    "waits": "source-lags",
    "quarantine": "rows-in-quarantine",
    "differs": "tables-differ",
}
"""Runbooks of problems without an error, whose code decides otherwise."""
_BACKLOG: Final = {
    "warning": "near its limit",
    "throttled": "over its limit, so copies read more slowly",
    "over": "over its limit",
}


def attention(sources: Iterable[Row], target: Row | None = None) -> list[Row]:
    """Return the problems that need an operator, the target first."""
    found: list[Row] = []
    if target is not None and target["error"]:
        what = "; ".join(filter(None, (target["error"], target["hint"])))
        found.append(_item("Target", what, None, "bad", _runbook(target, "target")))
    for source in sources:
        found += _of_source(source)
        for table in source["tables"]:
            found += _of_table(source, table)
    return found


def _item(
    place: str,
    what: str,
    page: str | None,
    kind: str,
    runbook: str,
    command: str | None = None,
    actions: Iterable[tuple[str, str, str]] = (),
    sql: hints.SqlRemedy | None = None,
    **fields: str | None,
) -> Row:
    """Return a problem. *actions*: path, value of ``action``, label; *fields*: of their forms."""
    return {
        "place": place,
        "what": what,
        "address": page,
        "kind": kind,
        "runbook": runbook,
        "command": command,
        "sql": sql,
        "actions": [{"to": to, "do": do, "label": label} for to, do, label in actions],
        "fields": {name: value for name, value in fields.items() if value is not None},
    }


def _runbook(row: Row, symptom: str) -> str:
    """Return the address of the runbook for the error of *row*; without one that of *symptom*."""
    return row.get("runbook") or f"{RUNBOOKS}/{SYMPTOMS[symptom]}"


def runbook_of_table(table: Row) -> str:
    """Return the address of the runbook for the error of a table."""
    return _runbook(table, "table")


def _of_source(source: Row) -> Iterable[Row]:
    label = SourceLabel(source["database"], source["sid"])
    page = address("/source", database=source["database"], sid=source["sid"])
    if source["error"] or source["state"] in NOT_STREAMING:
        words = source["error"] or f"the source is {source['state']}"
        what = "; ".join(filter(None, (words, source.get("hint"))))
        # The hint of a source has its command where one helps.
        command = None if "streamer " in what else hints.command("doctor")
        yield _item(label, what, page, "bad", _runbook(source, "source"), command)
    if source.get("here"):
        runbook = _runbook({"runbook": source.get("here_runbook")}, "source")
        yield _item(label, source["here"], page, "warning", runbook)
    backlog = source.get("backlog")
    if backlog and backlog.get("state") not in (None, "ok"):
        kind = "bad" if backlog["state"] == "over" else "warning"
        what = f"the WAL that it retains is {_BACKLOG.get(backlog['state'], backlog['state'])}"
        yield _item(label, what, page, kind, _runbook({}, "wal"), hints.command("doctor"))


def _of_table(source: Row, table: Row) -> Iterable[Row]:
    database, sid, name = source["database"], source["sid"], table["source"]
    place, page = f"{SourceLabel(database, sid)} {name}", table_address(source, name)

    def command(action: str, *options: str) -> str:
        return hints.command(action, name, *options, database=database, sid=sid)

    resume = ("/table/act", "resume", "Resume")
    resync = ("/table/act", "resync", "Resync")
    which = {"database": database, "sid": sid, "name": name}
    if table["state"] == "error":
        what = table["error"] or "the table stopped"
        needs_copy = "resync" in what
        sql = hints.find_sql(what)
        # After SQL that fixes it, the table continues by itself; an earlier resume would fail.
        line = command("resync") if needs_copy else None
        if line is None and sql is None:
            line = command("resume")
        actions = (resync,) if needs_copy else (resume, resync)
        runbook = runbook_of_table(table)
        yield _item(place, what, page, "bad", runbook, line, actions, sql, **which)
    elif table.get("waits_before"):
        skip = ("/table/act", "skip", "Resume without its deletes")
        runbook, line = runbook_of_table(table), command("resume")
        yield _item(place, table["error"], page, "bad", runbook, line, (resume, skip), **which)
        return
    elif table["error"]:
        sql = hints.find_sql(table["error"])
        yield _item(place, table["error"], page, "warning", runbook_of_table(table), sql=sql)
    if table["state"] == "paused":
        what = "is paused; its changes wait"
        runbook = _runbook({}, "wal")
        yield _item(place, what, page, "warning", runbook, command("resume"), (resume,), **which)
    if table.get("waiting_for") and not is_turn(table["waiting_for"]):
        what = f"waits for {table['waiting_for']}"
        yield _item(place, what, page, "warning", _runbook({}, "waits"))
    if table["quarantined"]:
        changes = "change is" if table["quarantined"] == 1 else "changes are"
        what = f"{table['quarantined']} {changes} in quarantine"
        retry = ("/table/quarantine", "retry", "Retry all")
        line = command("quarantine retry")
        fields = which | {"which": "all"}
        runbook = _runbook({}, "quarantine")
        yield _item(place, what, page, "warning", runbook, line, (retry,), **fields)
    if table.get("differing_rows"):
        rows = "row differs" if table["differing_rows"] == 1 else "rows differ"
        what = f"{table['differing_rows']} {rows} from the source, by the last comparison"
        yield _item(place, what, page, "bad", _runbook({}, "differs"), command("repair"))
