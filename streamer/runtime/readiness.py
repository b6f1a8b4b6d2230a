"""Why not everything is in step: the reasons of ``/readyz``. Pure."""

from collections.abc import Iterator
from typing import Final

from streamer.error_reports import ErrorReport, runbook_address
from streamer.errors import TargetError
from streamer.runtime.services import Health
from streamer.runtime.target_watch import TargetHealth
from streamer.sync.states import State

Reason = dict[str, str]

STREAMING: Final = "streaming"


def reason_fields(report: ErrorReport | None) -> Reason:
    """Return the error of a reason, with its code, runbook and hint; an empty text for none."""
    if report is None:
        return {"error": "", "hint": ""}
    fields = {"error": report.text, "error_code": report.code, "hint": report.hint or ""}
    runbook = runbook_address(report.code)
    return fields if runbook is None else fields | {"runbook": runbook}


def target_reasons(target: TargetHealth) -> Iterator[Reason]:
    """Yield the reason that the target is; nothing while it accepts writes."""
    if target.error is not None:
        report = ErrorReport(target.error, target.error_code or TargetError.code, target.hint)
        yield {"target": target.name, "state": target.state.value} | reason_fields(report)


def source_reasons(
    label: str, state: str, error: ErrorReport | None, health: Health
) -> Iterator[Reason]:
    """Yield the reasons that a source and its tables are. *state*, *error*: of the source."""
    if state != STREAMING:
        found = reason_fields(error)
        if error is None and health.waiting_for is not None:
            found["error"] = f"waits for {health.waiting_for}"
        yield {"source": label, "state": state} | found
    for table, table_state in health.table_states.items():
        if table_state != State.READY:
            found = reason_fields(health.table_errors.get(table))
            yield {"source": label, "table": table, "state": table_state} | found
    for table, reason in health.table_waits.items():
        yield {
            "source": label,
            "table": table,
            "state": "waiting",
            "error": f"waits for {reason}",
        }
