"""Every view of an error links to the runbook of the error code."""

import json
from unittest import mock

import pytest

from streamer.admin.api.error_answers import error_answer
from streamer.admin.live.problem_view import problems_for_operator
from streamer.commands.check.findings import from_problem
from streamer.commands.status import SourceStatus, TableStatus
from streamer.errors import error_reports
from streamer.errors.error_classes import StreamerError, ThrottledError
from streamer.errors.error_reports import ErrorReport, classes_of_errors, runbook_address
from streamer.report.problem_facts import ReportedTarget
from streamer.report.problems import of_source, of_target
from streamer.runtime.health.readiness import reason_of, source_facts
from streamer.runtime.services import Health
from streamer.runtime.target_health import TargetHealth, TargetState
from tests.unit.build import source_mapping


def an_instance(kind: type[StreamerError]) -> StreamerError:
    error = kind.__new__(kind)
    StreamerError.__init__(error, "it failed")
    if isinstance(error, ThrottledError):
        error.seconds = 1
    return error


def shown(code: str) -> SourceStatus:
    """A source with the error, and a table with the same error."""
    table = TableStatus(
        "public.t", "public.t", "clone", "error", "0/1", 0, 0, "it failed", 0, error_code=code
    )
    return SourceStatus(
        "shop", None, "error", "streamer_shop", error="it failed", error_code=code, tables=[table]
    )


def test_every_view_of_an_error_names_the_runbook_of_its_code() -> None:
    for kind in classes_of_errors():
        error = an_instance(kind)
        runbook = f"/help/runbooks/{kind.runbook}"
        assert runbook_address(kind.code) == error.log_fields["runbook"] == runbook

        status = shown(kind.code).to_json()
        assert [status["runbook"], status["tables"][0]["runbook"]] == [runbook, runbook]
        assert {item["runbook"] for item in problems_for_operator([status])} == {runbook}
        problems = shown(kind.code).problems
        assert {problem.runbook for problem in problems} == {runbook}
        assert {from_problem(problem).runbook for problem in problems} == {runbook}
        answer = json.loads(bytes(error_answer(error).body))["error"]
        assert (answer["code"], answer["runbook"]) == (kind.code, runbook)

        report = ErrorReport.of(error)
        health = Health(table_states={"public.t": "error"}, table_errors={"public.t": report})
        own = of_source(source_facts(source_mapping(), ("error", report), health))
        target = TargetHealth(state=TargetState.ERROR, error="it failed", error_code=kind.code)
        own += of_target(target.facts)
        assert [reason_of(problem)["runbook"] for problem in own] == [runbook] * 3


def test_an_unknown_code_has_no_runbook_and_still_its_error() -> None:
    assert runbook_address("of_another_version") is None
    target = ReportedTarget("dw", "error", ErrorReport("it failed", "of_another_version"))
    (problem,) = of_target(target)
    assert (problem.text, problem.runbook) == ("it failed", "/help/runbooks/target-away")


def test_problems_of_many_tables_search_the_classes_of_errors_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(error_reports, "_RUNBOOK_ADDRESSES", {})
    searches = mock.Mock(wraps=classes_of_errors)
    monkeypatch.setattr(error_reports, "classes_of_errors", searches)
    for _ in range(3):
        assert runbook_address(None) is None
        assert runbook_address("conflict") == "/help/runbooks/table-in-error"
    assert searches.call_count == 1


def test_an_error_stored_without_a_code_counts_as_a_defect() -> None:
    assert ErrorReport.stored("it failed", None) == ErrorReport("it failed", "internal")
    assert ErrorReport.stored(None, "value") is None
