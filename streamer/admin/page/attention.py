"""Problems that need an operator, each with its runbook, command and form. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from streamer import hints
from streamer.admin.page.manual import help_address
from streamer.admin.page.view import NOT_STREAMING, address, table_address
from streamer.mapping.rules import SourceLabel
from streamer.sync.states import is_turn

Row = dict[str, Any]

RUNBOOKS: Final = {
    "target": "runbooks/target-away",
    "source": "runbooks/source-unreachable",
    "slot": "runbooks/slot-lost",
    "restored": "runbooks/restored",
    "wal": "runbooks/source-disk-fills",
    "table": "runbooks/table-in-error",
    "copy": "runbooks/copy-does-not-finish",
    "gone": "runbooks/table-gone",
    "waits": "runbooks/source-lags",
    "quarantine": "runbooks/rows-in-quarantine",
}
"""Pages of the documentation by symptom."""
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
        found.append(_item("Target", what, None, "bad", "target"))
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
    symptom: str,
    command: str | None = None,
    actions: Iterable[tuple[str, str, str]] = (),
    **fields: str | None,
) -> Row:
    """Return a problem. *actions*: path, value of ``action``, label; *fields*: of their forms."""
    return {
        "place": place,
        "what": what,
        "address": page,
        "kind": kind,
        "runbook": help_address(RUNBOOKS[symptom]),
        "command": command,
        "sql": hints.find_sql(what) if symptom in ("table", "copy", "gone") else None,
        "actions": [{"to": to, "do": do, "label": label} for to, do, label in actions],
        "fields": {name: value for name, value in fields.items() if value is not None},
    }


def _of_source(source: Row) -> Iterable[Row]:
    label = SourceLabel(source["database"], source["sid"])
    page = address("/source", database=source["database"], sid=source["sid"])
    if source["error"] or source["state"] in NOT_STREAMING:
        words = source["error"] or f"the source is {source['state']}"
        what = "; ".join(filter(None, (words, source.get("hint"))))
        # The hint of a source has its command where one helps.
        command = None if "streamer " in what else hints.command("doctor")
        yield _item(label, what, page, "bad", _symptom_of_source(what), command)
    if source.get("here"):
        yield _item(label, source["here"], page, "warning", "source")
    backlog = source.get("backlog")
    if backlog and backlog.get("state") not in (None, "ok"):
        kind = "bad" if backlog["state"] == "over" else "warning"
        what = f"the WAL that it retains is {_BACKLOG.get(backlog['state'], backlog['state'])}"
        yield _item(label, what, page, kind, "wal", hints.command("doctor"))


def _symptom_of_source(what: str) -> str:
    if any(words in what for words in ("restored", "timeline", "another history")):
        return "restored"
    return "slot" if "slot" in what and "resync" in what else "source"


def symptom_of_table(table: Row) -> str:
    """Return the symptom of a table with an error, as a key of `RUNBOOKS`."""
    if table["state"] != "error":  # streamer tries the copy again by itself
        return "copy"
    is_unpublished = any(word in table["error"] for word in ("published", "publication"))
    return "gone" if is_unpublished else "table"


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
        symptom = symptom_of_table(table | {"error": what})
        # After SQL that fixes it, the table continues by itself; an earlier resume would fail.
        line = command("resync") if needs_copy else None
        if line is None and hints.find_sql(what) is None:
            line = command("resume")
        actions = (resync,) if needs_copy else (resume, resync)
        yield _item(place, what, page, "bad", symptom, line, actions, **which)
    elif table["error"]:
        yield _item(place, table["error"], page, "warning", symptom_of_table(table))
    if table["state"] == "paused":
        what = "is paused; its changes wait"
        yield _item(place, what, page, "warning", "wal", command("resume"), (resume,), **which)
    if table.get("waiting_for") and not is_turn(table["waiting_for"]):
        what = f"waits for {table['waiting_for']}"
        yield _item(place, what, page, "warning", "waits")
    if table["quarantined"]:
        changes = "change is" if table["quarantined"] == 1 else "changes are"
        what = f"{table['quarantined']} {changes} in quarantine"
        retry = ("/table/quarantine", "retry", "Retry all")
        line = command("quarantine retry")
        fields = which | {"which": "all"}
        yield _item(place, what, page, "warning", "quarantine", line, (retry,), **fields)
