"""Every view shows a fact with the same words, severity and remedy."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, patch

import pytest
from structlog.testing import capture_logs

from streamer.admin.live import fleet_overview
from streamer.admin.live.problem_view import problems_for_operator
from streamer.bookkeeping.followed_sequences import SequenceRecord
from streamer.bookkeeping.planned_definitions import DefinitionRecord
from streamer.bookkeeping.verifications import VerificationRecord
from streamer.commands import health_check
from streamer.commands import wait as wait_command
from streamer.commands.check import findings
from streamer.commands.check.findings import Place, from_problem
from streamer.commands.doctor.diagnosis import Diagnosis, merged, sentences
from streamer.commands.health_check import HealthAnswer
from streamer.commands.status import SourceStatus, StatusReport, TableStatus
from streamer.commands.status_output import render_lines
from streamer.commands.status_problems import only_problems, summarize
from streamer.copy.automatic_waits import automatic_wait
from streamer.errors.error_classes import (
    MassDeleteError,
    ProtocolError,
    SlotMissingError,
    SourceConnectionError,
    SourceUnreadyError,
    StreamerError,
    TargetConnectionError,
    TargetPrivilegeError,
    TargetSchemaError,
)
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.errors.remedies import (
    CONTINUES,
    BlockingSession,
    Command,
    Remedy,
    Sql,
    at_source,
    at_target,
    run,
)
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import Mapping
from streamer.postgres.blocking_sessions import Blockers
from streamer.postgres.conninfo import reach_hint
from streamer.report.problem_facts import (
    DRAINER_QUEUE,
    LackingDefinition,
    ReportedBacklog,
    ReportedSequence,
    StoredFacts,
)
from streamer.report.problems import Problem, ProblemKind, Severity, of_target
from streamer.runtime.health.gauges import count_problems
from streamer.runtime.health.problem_log import ProblemLog
from streamer.runtime.health.readiness import find_problems, reason_of
from streamer.runtime.services import Health
from streamer.runtime.target_health import TargetHealth
from streamer.schema.planned_definition import ObjectKind
from streamer.target.connection import TargetAddress
from streamer.target.session_waits import SessionWaits
from streamer.util.lsn import Lsn
from tests.unit.build import source_mapping

TABLE = "public.orders"
URL = "postgresql://u@db-1/shop"
BYTES = 10 * 1024**3
VERIFIED = VerificationRecord(1, datetime(2026, 1, 1, tzinfo=UTC), None, Lsn(1), 0, 0)


def report(error: StreamerError) -> ErrorReport:
    return ErrorReport.of(error)


@dataclass
class Fact:
    """A fact in two forms: from the databases, and from a process."""

    kind: ProblemKind
    severity: Severity
    remedy: tuple[Command | Sql, ...]
    words: str
    source: dict[str, Any] = field(default_factory=dict)
    table: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    stored: StoredFacts | None = None
    backlog: ReportedBacklog = field(default_factory=ReportedBacklog)
    heartbeat_seconds: float | None = None
    lag_seconds: float | None = None
    name: str = TABLE
    blocks: bool = False

    def status(self) -> SourceStatus:
        """Return the fact in the form that `streamer status` reads."""
        usual = TableStatus(self.name, self.name, "clone", "ready", "0/1", 1, 1, None, 0)
        error = self.table.get("error")
        fields = self.table | _error_fields(error) if error else self.table
        given = self.source
        if (failure := given.get("error")) is not None:
            given = given | _error_fields(failure)
        status = SourceStatus("shop", "eu", "streaming", "streamer_shop_eu")
        return replace(status, **given, tables=[replace(usual, **fields)])

    def problems_of_process(self, target: TargetHealth) -> list[Problem]:
        """Return the problems that a process finds."""
        health = Health(state="streaming", table_states={self.name: "ready"})
        for name, value in self.health.items():
            setattr(health, name, value)
        supervisor = SimpleNamespace(
            source=source_mapping("shop", "eu"),
            condition=(health.state, health.error),
            health=health,
            heartbeat_seconds=self.heartbeat_seconds,
            pipeline=SimpleNamespace(lag_seconds=lambda: self.lag_seconds),
        )
        guard = SimpleNamespace(source=supervisor.source, facts=self.backlog)
        stored = {} if self.stored is None else {"shop:eu": self.stored}
        guards, supervisors = cast("Any", ([guard], [supervisor]))
        return find_problems(target, guards, supervisors, stored)


def _error_fields(error: ErrorReport) -> dict[str, Any]:
    return {"error": error.text, "error_code": error.code, "remedy": error.remedy}


def well() -> TargetHealth:
    target = TargetHealth("dw")
    target.confirm()
    return target


def command(action: str, *options: str, table: str | None = TABLE) -> Command:
    return run(action, table, *options, database="shop", sid="eu")


def in_error(error: StreamerError, *remedy: Command | Sql, name: str = TABLE) -> Fact:
    found = report(error)
    return Fact(
        ProblemKind.TABLE, Severity.ERROR, remedy, found.message,
        table={"state": "error", "error": found},
        health={"table_states": {name: "error"}, "table_errors": {name: found}},
        name=name, blocks=True,
    )  # fmt: skip


def of_table(kind: ProblemKind, severity: Severity, words: str, *remedy: Command | Sql) -> Fact:
    return Fact(kind, severity, remedy, words)


ADD = "alter table public.orders add column note text"
DROP = 'alter table "resync" drop constraint "resync_check"'
LOCK = TableWait("a lock on target table", Remedy.of("run: ", at_target("select 1")))
AUTOMATIC_WAIT = automatic_wait("2 copies of this source end first")
INDEX = DefinitionRecord(
    1, 1, TABLE, RelationName("public", "orders"), ObjectKind.INDEX, "by_day", "failed", None, (),
    ("create index by_day on orders (day)",), "create index by_day on orders (day)", "no such type", 5, None,
)  # fmt: skip
GRANT = Remedy.of("run at the source: ", at_source("grant select on sequence s to u"))
FULL = Remedy.of("run at the source: ", at_source(f"alter table {TABLE} replica identity full"))
DENIED = report(
    TargetPrivilegeError("denied", hint=Remedy.of("run at the target: ", at_target("grant create")))
)
MASS = MassDeleteError("9 rows", hint=Remedy.of("run: ", command("resume")))
DOWN = SourceConnectionError('source "shop:eu": no answer', hint=reach_hint(URL))

FACTS = {
    "a source over its WAL limit": replace(
        of_table(ProblemKind.WAL, Severity.ERROR, "over its limit", command("status", table=None)),
        source={
            "backlog": {"state": "over", "retained_bytes": BYTES, "limit_bytes": BYTES, "spooled_bytes": 0},
        },
        backlog=ReportedBacklog("over", BYTES, BYTES),
    ),
    "a heartbeat that is overdue": replace(
        of_table(ProblemKind.HEARTBEAT, Severity.WARNING, "no commit has become visible"),
        source={"heartbeat_seconds": 900.0},
        heartbeat_seconds=900.0,
    ),
    "changes that are not visible for long": replace(
        of_table(ProblemKind.HEARTBEAT, Severity.WARNING, "commits of the last 34 s are not visible"),
        source={"lag_seconds": 34.0},
        lag_seconds=34.0,
    ),
    "a table that gets inserts only": replace(
        of_table(ProblemKind.INSERTS_ONLY, Severity.WARNING, "inserts only", *FULL.steps),
        table={"identity": "none", "identity_remedy": FULL},
        stored=StoredFacts(insert_only={TABLE: FULL}),
    ),
    "time partitions that the role may not change": replace(
        of_table(
            ProblemKind.PARTITIONS,
            Severity.WARNING,
            "its time partitions cannot be changed: denied",
            at_target("grant create"),
        ),
        table={"partition_error": DENIED},
        stored=StoredFacts(partition_errors={TABLE: DENIED}),
    ),
    "a comparison that failed": replace(
        of_table(
            ProblemKind.UNCOMPARED, Severity.WARNING, "cannot be compared", command("compare")
        ),
        table={"verification_error": "no key"},
        health={"verifications": {TABLE: replace(VERIFIED, error="no key")}},
    ),
    "rows that differ": replace(
        of_table(
            ProblemKind.DIFFERENT,
            Severity.ERROR,
            f"3 rows differ from the source, as compared at {VERIFIED.ended_at:%Y-%m-%d %H:%M} UTC",
            command("repair"),
        ),
        table={"differing_rows": 3, "compared_at": VERIFIED.ended_at.isoformat()},
        health={"verifications": {TABLE: replace(VERIFIED, differing_rows=3)}},
    ),
    "a copy that waits for its turn": replace(
        of_table(ProblemKind.COPYING, Severity.INFO, "waits for its turn"),
        table={"state": "init", "waiting_for": str(AUTOMATIC_WAIT), "wait": AUTOMATIC_WAIT},
        health={"table_states": {TABLE: "init"}, "table_waits": {TABLE: AUTOMATIC_WAIT}},
        blocks=True,
    ),
    "a copy that waits for a lock": replace(
        of_table(ProblemKind.WAIT, Severity.WARNING, "waits for a lock", at_target("select 1")),
        table={"waiting_for": str(LOCK), "wait": LOCK},
        health={"table_waits": {TABLE: LOCK}},
        blocks=True,
    ),
    "a sequence that cannot follow": replace(
        of_table(
            ProblemKind.SEQUENCE, Severity.WARNING, "t cannot follow: no right", *GRANT.steps
        ),
        source={"sequences": [SequenceRecord("s", "t", 1, 1, "no right", GRANT)]},
        stored=StoredFacts(sequences=[ReportedSequence("s", "t", "no right", GRANT)]),
    ),
    "changes in quarantine": replace(
        of_table(
            ProblemKind.QUARANTINE,
            Severity.ERROR,
            "5 changes are in quarantine",
            command("quarantine list --table"),
            command("quarantine retry"),
        ),
        table={"quarantined": 5},
        health={"quarantined": {TABLE: 5}},
    ),
    "a paused table": replace(
        of_table(ProblemKind.PAUSED, Severity.WARNING, "is paused", command("resume")),
        table={"state": "paused"},
        health={"table_states": {TABLE: "paused"}},
        blocks=True,
    ),
    "a mass delete that waits": replace(
        of_table(ProblemKind.MASS_DELETE, Severity.ERROR, "9 rows", command("resume")),
        table={"state": "paused", "error": report(MASS), "waits_before": {"xid": 1}},
        health={"table_states": {TABLE: "paused"}, "table_errors": {TABLE: report(MASS)}},
        blocks=True,
    ),
    "a definition that was given up": replace(
        of_table(
            ProblemKind.DEFINITION,
            Severity.WARNING,
            'its target lacks index "by_day": no such type',
            at_target(INDEX.sql),
        ),
        table={"definitions": [INDEX]},
        stored=StoredFacts(
            definitions={
                TABLE: [LackingDefinition(INDEX.label, INDEX.sql, INDEX.reason, True, INDEX.online)]
            }
        ),
    ),
    "a table in error": in_error(StreamerError("it failed"), command("resume")),
    "a table in error with SQL": in_error(
        TargetSchemaError("no column", hint=Remedy.of("run at the target: ", at_target(ADD))),
        at_target(ADD),
    ),
    'a table named "resync"': in_error(
        TargetSchemaError('"resync" has "resync_check"', hint=Remedy.of("run: ", at_target(DROP))),
        at_target(DROP),
        name="public.resync",
    ),
    "a source that is unreachable": Fact(
        ProblemKind.SOURCE, Severity.ERROR, reach_hint(URL).steps, "no answer",
        source={"state": "unreachable", "error": report(DOWN)},
        health={"state": "waiting", "error": report(DOWN)},
        blocks=True,
    ),
    "a process that stopped": Fact(
        ProblemKind.STOPPED, Severity.ERROR, (run("run"),), "no process reads its slot",
        source={"state": "stopped"}, health={"state": "stopped"}, blocks=True,
    ),
}  # fmt: skip


def test_a_problem_that_ends_without_a_command_says_when_streamer_continues() -> None:
    ends = {name for name, fact in FACTS.items() if CONTINUES in fact.status().problems[0].sentence}
    assert ends == {
        "a copy that waits for a lock",
        "time partitions that the role may not change",
        "a table in error",
        "a table in error with SQL",
        'a table named "resync"',
        "a source that is unreachable",
    }
    # streamer never retries after a defect, and a resync needs its command.
    for error in (
        ProtocolError("torn"),
        SlotMissingError("gone", hint=Remedy.of("run: ", run("resync"))),
    ):
        health = {"state": "error", "error": report(error)}
        fact = Fact(ProblemKind.SOURCE, Severity.ERROR, (), "", source=health, health=health)
        (problem,) = fact.status().problems
        assert CONTINUES not in problem.sentence


def test_a_late_heartbeat_during_a_copy_names_the_wait_of_the_copy() -> None:
    """A copy holds back the heartbeat. Neither target nor operator causes the delay."""
    fact = replace(FACTS["a copy that waits for its turn"], heartbeat_seconds=21.0)
    late, copying = fact.problems_of_process(well())
    assert (late.kind, late.severity) == (ProblemKind.HEARTBEAT, Severity.INFO)
    assert f"the copy of {TABLE} waits for its turn: 2 copies" in late.sentence
    assert "no action is needed" in late.sentence
    assert copying.kind is ProblemKind.COPYING


def test_tables_that_queue_for_a_connection_are_one_problem_that_ends_by_itself() -> None:
    status = FACTS["a copy that waits for a lock"].status()
    (table,) = status.tables
    names = [f"public.t{number}" for number in range(508)]
    status.tables = [
        replace(table, source=name, wait=DRAINER_QUEUE, waiting_for=str(DRAINER_QUEUE))
        for name in names
    ]
    status.heartbeat_seconds = 900.0
    (problem,) = status.problems
    assert (problem.kind, problem.severity, problem.state) == ("wait", Severity.INFO, "waiting")
    assert problem.subject.table is None
    assert problem.sentence == (
        "508 tables wait for one of the connections for held tables, which are all in use; "
        "no action is needed: streamer continues by itself"
    )


def test_a_late_heartbeat_without_a_known_reason_blames_no_server() -> None:
    (late,) = FACTS["a heartbeat that is overdue"].status().problems
    assert late.sentence == (
        "no commit has become visible at the target for 15 min; streamer knows no reason: "
        "look at the load of the source, of the target and of this machine"
    )


@pytest.mark.parametrize("state", ["paused", "error"])
def test_a_stopped_table_that_also_waits_does_not_continue_after_the_wait(state: str) -> None:
    """A session that ends does not resume a paused table."""
    fact = FACTS["a copy that waits for a lock"]
    stopped = replace(fact, table=fact.table | {"state": state})
    problems = stopped.status().problems
    assert [problem.kind.value for problem in problems] == [
        "paused" if state == "paused" else "table",
        "wait",
    ]
    assert CONTINUES not in problems[-1].sentence


def test_the_heartbeats_of_a_source_that_does_not_stream_are_no_problem() -> None:
    """The missing stream is the problem, and a second problem would blame the target."""
    fact = replace(FACTS["a source that is unreachable"], heartbeat_seconds=900.0)
    assert [each.kind for each in fact.problems_of_process(well())] == [ProblemKind.SOURCE]


def test_a_table_that_holds_changes_is_the_problem_and_the_late_heartbeat_is_not() -> None:
    """Commits of the remaining tables become visible, and the table's problem names the cause."""
    for name in ("a copy that waits for a lock", "a paused table"):
        fact = replace(FACTS[name], heartbeat_seconds=900.0)
        assert [each.kind for each in fact.problems_of_process(well())] == [fact.kind]


def test_a_diagnosis_has_an_error_once_in_the_words_of_the_status() -> None:
    fact = FACTS["a source that is unreachable"]
    (problem,) = fact.status().problems
    told = from_problem(problem)
    place = told.place
    same = findings.from_error(place, SourceConnectionError("connection refused"))
    others = [
        findings.error(place, "wal_level is replica"),
        replace(same, place=Place("shop:us")),
        replace(same, code=SourceUnreadyError.code),
    ]
    assert merged([problem], [same, *others]) == [told, *others]


def test_a_diagnosis_names_a_table_once_with_the_statements_of_the_check() -> None:
    fact = FACTS["a table in error with SQL"]
    (problem,) = fact.status().problems
    place = from_problem(problem).place
    same = findings.error(place, "lacks a column", findings.at_target(ADD))
    other = findings.error(place, "lacks a column", findings.at_target(ADD, "another"))
    assert merged([problem], [same, other]) == [from_problem(problem), other]

    # A check judges the schema as a whole, and finds the cause in another place.
    schema = findings.error(Place(None, 'schema "x"'), "may not use it", findings.at_target(ADD))
    assert merged([problem], [schema]) == [from_problem(problem)]
    at_source_of_another = replace(other, place=Place("web"), fix=findings.at_source(ADD))
    assert at_source_of_another in merged([problem], [at_source_of_another])

    # The statements of a replica identity come from the guard, and a check finds the same.
    (insert_only,) = FACTS["a table that gets inserts only"].status().problems
    full = findings.Fix.of(FULL)
    without_key = findings.warning(from_problem(insert_only).place, "has no primary key", full)
    assert merged([insert_only], [without_key]) == [from_problem(insert_only)]


def status_report(fact: Fact, target: TargetHealth | None = None) -> StatusReport:
    return StatusReport(target or well(), [fact.status()])


@pytest.mark.parametrize("name", FACTS)
async def test_a_fact_is_the_same_problem_in_every_view(name: str) -> None:
    fact = FACTS[name]
    # WHEN the databases and a process show the fact
    (problem,) = fact.status().problems
    (own,) = fact.problems_of_process(well())

    # THEN both name the problem of the table of facts
    assert (problem.kind, problem.severity) == (fact.kind, fact.severity)
    assert fact.words in problem.text
    assert (problem.remedy.steps if problem.remedy else ()) == fact.remedy
    assert replace(own, state=problem.state) == problem
    assert problem.blocks is fact.blocks
    is_shown = fact.severity is not Severity.INFO

    # AND every view renders the same problem: status and summary,
    shown = status_report(fact)
    summary = cast("Any", summarize(shown))
    listed = [(each["problem"], each["remedy"]) for each in summary["problems"]]
    remedy = None if problem.remedy is None else str(problem.remedy)
    assert listed == ([(problem.text, remedy)] if is_shown else [])
    assert summary["fine"] == int(not is_shown)
    assert len(only_problems(shown).sources) == int(is_shown)
    lines = "\n".join(line.plain for line in render_lines(shown))
    assert (problem.sentence in lines) is is_shown

    # AND the page and the fleet overview, with the remedy as lines to paste,
    row = shown.sources[0].to_json()
    items = problems_for_operator([row])
    assert [item["what"] for item in items] == ([problem.sentence] if is_shown else [])
    if is_shown:
        to_paste = [part["lines"] for part in items[0]["remedy"] if part["lines"]]
        assert [text.replace(";\n", "; ").rstrip(";") for text in to_paste] == [
            str(step) for step in fact.remedy
        ]
        assert "; ".join(filter(None, (items[0]["headline"], items[0]["details"]))) == problem.text
        assert items[0]["kind"] == ("bad" if fact.severity is Severity.ERROR else "warning")
    (line,) = fleet_overview.fleet_overview_of([row]).lines
    assert line.row["problem_count"] == int(is_shown)

    # AND doctor,
    finding = from_problem(problem)
    assert (finding.severity, finding.problem) == (problem.severity, problem.text)
    assert finding.runbook == (problem.runbook if is_shown else None)
    steps = " ".join(finding.lines())
    assert all(str(sql) in steps for step in fact.remedy for sql in getattr(step, "statements", ()))

    # AND readiness, the metrics and the log of the process,
    reason = reason_of(own)
    assert (reason["severity"], reason["hint"]) == (problem.severity, remedy or "")
    assert (reason["error"], reason["runbook"]) == (problem.sentence, problem.runbook)
    assert fact.kind is not ProblemKind.WAIT or reason["state"] == problem.state == "waiting"
    assert sum(count_problems([own]).values()) == int(is_shown)
    with capture_logs() as logs:
        ProblemLog(list).log_changes([own])
    written = [(each["log_level"], each["problem"], each.get("hint")) for each in logs]
    assert written == ([(problem.severity.value, problem.text, remedy)] if is_shown else [])

    # AND wait, which names the problems that delay the wait.
    with patch.object(wait_command, "read_report", AsyncMock(return_value=shown)):
        address = TargetAddress.parse(source_mapping().url)
        told = await wait_command.name_problems(address, Mapping((), "public"))
    assert told == ([f"{problem.subject}: {problem.sentence}"] if fact.blocks else [])


def test_a_target_that_is_away_is_the_first_problem_of_every_view() -> None:
    target = TargetHealth("dw")
    away = TargetConnectionError("target: no answer")
    target.record_error(away, TargetAddress.parse(replace(source_mapping(), url=_url()).url))
    fact = FACTS["a paused table"]
    shown = status_report(fact, target)
    first, *_ = shown.problems
    own, *_ = fact.problems_of_process(target)
    assert own == first
    assert first.kind is ProblemKind.TARGET
    assert first.remedy is not None
    assert first.remedy.steps == reach_hint(URL).steps
    assert first.sentence in "\n".join(line.plain for line in render_lines(shown))
    assert problems_for_operator([], target.to_json())[0]["what"] == first.sentence
    assert shown.failure == first.sentence
    assert reason_of(own)["error"] == first.sentence


def test_a_target_whose_commits_wait_for_a_standby_is_not_fine() -> None:
    standby = TableWait("commits wait for a standby", Remedy.of("run: ", at_target("select 1")))
    target = TargetHealth("dw")
    target.confirm(SessionWaits("the standby", standby))
    fact = FACTS["changes that are not visible for long"]
    shown = status_report(
        replace(fact, source=fact.source | {"workers_wait_for": "the standby"}), target
    )
    (first,) = shown.problems
    first_of_process, late = fact.problems_of_process(target)
    assert (first.kind, first.severity) == (ProblemKind.TARGET_WAIT, Severity.ERROR)
    assert first_of_process == first
    assert first.blocks
    assert late.text.endswith("the workers wait for the standby")
    assert [late.text] == [problem.text for problem in shown.sources[0].problems]
    (item,) = problems_for_operator([], target.to_json())
    assert item["what"] == first.sentence
    assert item["remedy"][:2] == [
        {"text": "run: ", "lines": "", "at": "dw"},
        {"text": "", "lines": "select 1;", "at": None},
    ]
    summary = next(line.plain for line in render_lines(shown)[1:])
    assert summary.endswith("2 need attention: target wait, shop:eu")


def _url() -> Any:
    return type(source_mapping().url)(URL)


def test_the_page_offers_no_copy_because_of_a_name() -> None:
    row = FACTS['a table named "resync"'].status().to_json()
    (item,) = problems_for_operator([row])
    assert [button["do"] for button in item["buttons"]] == ["resume", "resync"]
    assert item["command"] is None  # the table continues after the SQL


def test_a_table_whose_changes_are_lost_gets_a_copy_and_no_resume() -> None:
    again = command("resync")
    error = StreamerError("changes may be missing", hint=Remedy.of("run: ", again))
    for fact in (
        in_error(error, again),
        replace(in_error(StreamerError("gone")), table={"state": "error", "needs_resync": True}),
    ):
        (item,) = problems_for_operator([fact.status().to_json()])
        assert [button["do"] for button in item["buttons"]] == ["resync"]
        assert item["command"] == str(again)


def buttons_of(fact: Fact) -> list[tuple[str, str, dict[str, str]]]:
    """Return the buttons of a fact: address, label and fields, without the place."""
    (item,) = problems_for_operator([fact.status().to_json()])
    return [
        (button["to"], button["label"], button["fields"] | {"database": "", "sid": ""})
        for button in item["buttons"]
    ]


PLACE = {"database": "", "sid": "", "name": TABLE}
SOURCE = {"database": "", "sid": "", "pick": "shop:eu"}


@pytest.mark.parametrize(
    ("fact", "buttons"),
    [
        ("a paused table", [("/table/act", "Resume", PLACE)]),
        ("changes in quarantine", [("/table/quarantine", "Retry all", PLACE | {"which": "all"})]),
        ("rows that differ", [("/table/act", "Repair", PLACE)]),
    ],
)
def test_a_button_sends_the_command_of_the_remedy(
    fact: str, buttons: list[tuple[str, str, dict[str, str]]]
) -> None:
    assert buttons_of(FACTS[fact]) == buttons


def test_options_of_a_command_decide_about_its_button() -> None:
    """A command that accepts a loss has no button."""
    for step, buttons in (
        (command("resync", "--mode", "diff"), [("/table/act", "Resync", PLACE | {"mode": "diff"})]),
        (command("resync", "--skip-changes"), []),
        (
            command("resync", table="*.*"),
            [("/sources/act", "Resync all tables", SOURCE | {"state": "", "mode": "reload"})],
        ),
        (command("resync", "--skip-changes", table="*.*"), []),
    ):
        lost = StreamerError("changes are lost", hint=Remedy.of("run: ", step))
        assert buttons_of(in_error(lost, step)) == buttons, step


def test_a_session_that_holds_a_lock_has_a_button_with_its_pid() -> None:
    wait = Blockers("pid 7 (psql)", (BlockingSession(7, "3/9"),)).wait_for(TABLE)
    assert TableWait.from_json(wait.to_json()) == wait
    fact = replace(FACTS["a paused table"], table={"wait": wait})
    assert buttons_of(fact) == [("/session/end", "End session 7", PLACE | {"pid": "7"})]


def test_a_session_that_the_role_may_not_end_has_sql_for_an_administrator_and_no_button() -> None:
    sessions = (BlockingSession(7, "3/9"), BlockingSession(8, "4/1", may_end=False))
    wait = Blockers("pid 7 (psql), pid 8 (psql)", sessions).wait_for(TABLE)
    assert str(wait).endswith(
        "have an administrator run at the target: "
        "select pg_terminate_backend(7); select pg_terminate_backend(8); or wait until it ends"
    )
    fact = replace(FACTS["a paused table"], table={"wait": wait})
    assert buttons_of(fact) == [("/session/end", "End session 7", PLACE | {"pid": "7"})]


def told(problems: list[Problem]) -> list[str]:
    """Return the lines of a diagnosis of *problems*."""
    found, facts = [from_problem(problem) for problem in problems], cast("Any", None)
    return list(sentences(Diagnosis(found, facts, facts)))


def test_a_diagnosis_of_a_table_that_waits_has_sql_to_paste_and_does_not_claim_to_be_clean() -> (
    None
):
    wait = Blockers("pid 7 (psql)", (BlockingSession(7, "3/9"),)).wait_for(TABLE)
    lines = told(replace(FACTS["a paused table"], table={"wait": wait}).status().problems)
    assert lines[2:4] == ["    run at the target:", "      select pg_terminate_backend(7);"]
    assert lines[4].startswith("    or wait until it ends")
    assert lines[-1] == "No errors found, only warnings."


def test_a_diagnosis_says_target_once() -> None:
    target = TargetHealth("dw")
    target.record_error(TargetConnectionError("target: no answer"), TargetAddress.parse(_url()))
    (problem,) = of_target(target.facts)
    assert "  The target: no answer." in told([problem])


def test_a_diagnosis_names_the_page_of_a_process_although_the_target_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"127.0.0.1:8000": True, "127.0.0.1:1": False, "": None}
    monkeypatch.setattr(health_check, "ask_health", lambda at: HealthAnswer(at, answers[at]))
    found = [health_check.find_page([], listen) for listen in answers]
    assert found == ["127.0.0.1:8000", None, None]
    assert health_check.find_page(["host:9000"], "127.0.0.1:8000") == "host:9000"


def test_a_table_in_error_that_sql_ends_says_that_the_buttons_are_not_needed() -> None:
    fact = FACTS["a table in error with SQL"]
    (problem,) = fact.status().problems
    assert problem.sentence.endswith(f"{ADD}; {CONTINUES} and needs no resume or resync")
    assert [label for _, label, _ in buttons_of(fact)] == ["Resume", "Resync"]


def test_a_problem_is_logged_once_and_its_end_too() -> None:
    fact = FACTS["changes in quarantine"]
    log = ProblemLog(list)
    with capture_logs() as logs:
        log.log_changes(fact.problems_of_process(well()))
        more = replace(fact, health={"quarantined": {TABLE: 6}})
        log.log_changes(more.problems_of_process(well()))
        log.log_changes([])
    assert [line["event"] for line in logs] == ["problem", "problem gone"]


def test_every_kind_of_problem_is_a_fact_of_this_table() -> None:
    """Kinds without a row have separate tests."""
    others = {
        *(
            ProblemKind.TARGET,
            ProblemKind.TARGET_WAIT,
            ProblemKind.MAPPING,
            ProblemKind.NOT_STARTED,
            ProblemKind.STARTING,
        ),
        *(ProblemKind.PROCESS, ProblemKind.WAL_GUARD, ProblemKind.JOURNAL, ProblemKind.DELAYED),
        ProblemKind.PENDING_DEFINITION,
    }
    assert {fact.kind for fact in FACTS.values()} | others == set(ProblemKind)


def test_a_remedy_survives_the_bookkeeping_and_the_api() -> None:
    remedy = Remedy.of("run: ", command("resync"), ", or run at the target: ", at_target("a", "b"))
    error = StreamerError("it failed", hint=remedy)
    stored = ErrorReport.stored(str(error), error.code, report(error).stored_remedy)
    assert stored == report(error)
    fact = in_error(error, *remedy.steps)
    (problem,) = fact.status().problems
    assert (problem.text, problem.remedy) == ("it failed", remedy)
