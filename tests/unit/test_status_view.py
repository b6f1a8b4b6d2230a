"""The output of `streamer status`: names stay whole, problems come first."""

import contextlib
import io
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console
from rich.text import Text

from streamer.admin.live.status_view import queue_of, source_view
from streamer.admin.live.status_view import summary as summary_of_page
from streamer.admin.page.render_templates import environment
from streamer.bookkeeping.replicas import Fleet, ReplicaRecord
from streamer.bookkeeping.sources import SourceRecord
from streamer.commands.check.findings import from_problem
from streamer.commands.status import (
    SourceStatus,
    StatusReport,
    TableStatus,
    _add_positions,
    _Bookkeeping,
    _read_statuses,
    _remedy_of_loss,
    runs_at_another_target,
)
from streamer.commands.status_output import Pager, as_json_object, print_status, render_lines
from streamer.commands.status_problems import only_problems
from streamer.copy.automatic_waits import STARTING_SPARK
from streamer.errors.error_classes import (
    SlotMissingError,
    SourceConnectionError,
    SourceError,
    SourceRejectedError,
)
from streamer.errors.error_reports import TableWait
from streamer.mapping.rule_options import OnMaxRetainedWal
from streamer.mapping.rules import Mapping, SourceMapping
from streamer.postgres.conninfo import TLS_HINT
from streamer.postgres.secret import Secret
from streamer.report.problems import Severity
from streamer.runtime.target_health import TargetHealth
from tests.unit.test_capacity_findings import SLOT
from tests.unit.test_request_outcomes import record


def test_a_lost_slot_whose_resync_is_requested_needs_only_a_start() -> None:
    mapped = SourceMapping("shop", None, Secret(""), ())
    synced = [record(relation_id=n, source=f"public.t{n}", type="clone") for n in (1, 2, 3)]
    loss = SlotMissingError("the slot is gone")
    some = _remedy_of_loss(loss, mapped, synced, {1: 3, 2: 4})
    assert some is not None
    assert some.has("resync")
    every = _remedy_of_loss(loss, mapped, synced, {1: 3, 2: 4, 3: 5})
    assert str(every) == "the resync is requested (requests 3 to 5); start: streamer run"


LONG = "warehouse." + "quarterly_" * 9 + "figures"


def table(name: str, state: str = "ready", error: str | None = None, held: int = 0) -> TableStatus:
    return TableStatus(name, name, "clone", state, "0/1A2B300", 10, 10, error, 0, held_changes=held)


def source(sid: str, state: str = "streaming", *tables: TableStatus) -> SourceStatus:
    return SourceStatus("shop", sid, state, f"streamer_shop_{sid}", tables=list(tables))


def replica(number: int) -> ReplicaRecord:
    now = datetime.now(UTC)
    nothing: frozenset[str] = frozenset()
    return ReplicaRecord(
        number=number,
        name=f"host:{number}",
        backend_pid=number,
        version="0.1.0",
        address=None,
        sources=nothing,
        max_sources=None,
        is_stopping=False,
        journals=nothing,
        out_of_reach=nothing,
        mapping=None,
        mapping_revision=None,
        mapping_since=None,
        beat=1,
        started_at=now - timedelta(minutes=1),
        seen_at=now,
        is_alive=True,
    )


def report(statuses: list[SourceStatus]) -> StatusReport:
    target = TargetHealth("dw")
    target.confirm()
    return StatusReport(target, statuses)


def shown(statuses: list[SourceStatus], width: int | None = None) -> list[str]:
    """Return the lines below that of the target."""
    lines = [line.plain for line in render_lines(report(statuses), width)]
    assert lines[0] == "target dw: reachable"
    return lines[1:]


def test_the_line_below_the_target_counts_sources_and_tables_by_state() -> None:
    lines = shown(
        [
            source("eu", "streaming", table("a"), table("b", "error", "no")),
            source("us", "error"),
        ]
    )
    counts = "2 sources: 1 error, 1 streaming; 2 tables: 1 error, 1 ready"
    assert lines[0] == f"{counts}; 2 need attention: shop:eu, shop:us"


def test_a_table_is_ready_only_while_its_source_streams() -> None:
    tables = [source("eu", "streaming", table("a")), source("us", "unreachable", table("a"))]
    assert "2 tables: 1 without a stream, 1 ready" in shown(tables)[0]
    assert summary_of_page([status.to_json() for status in tables]) == (
        "1 of 2 sources stream, 1 table ready, 1 table without a stream"
    )
    rows = [line.partition("  clone")[0].split() for line in shown(tables) if "clone" in line]
    assert rows == [["a", "without", "a", "stream", "a"], ["a", "ready", "a"]]


def test_the_page_counts_rejected_changes_of_ready_tables() -> None:
    tables = [source("eu", "streaming", replace(table("a"), quarantined=12), table("b"))]
    rows = [status.to_json() for status in tables]
    assert summary_of_page(rows) == "1 source streams, 2 tables ready, 12 changes in quarantine"
    (shown_source,) = map(source_view, rows)
    state_of = getattr(environment().get_template("macros.html").module, "state_of")  # noqa: B009
    badges = [str(state_of(row)) for row in shown_source["tables"]]
    assert badges == [
        '<span class="state bad">ready, 12 in quarantine</span>',
        '<span class="state good">ready</span>',
    ]


def test_a_table_that_waits_for_a_lock_is_not_ready() -> None:
    waits = replace(table("a"), wait=TableWait("a lock"))
    turn = replace(table("b"), wait=TableWait("its turn", is_automatic=True))
    status = source("eu", "streaming", waits, turn)
    assert "2 tables: 1 ready, 1 waiting" in shown([status])[0]
    assert summary_of_page([status.to_json()]) == "1 source streams, 1 table ready, 1 table waiting"
    assert "  shop:eu a (waiting): waits for a lock" in "\n".join(shown([status]))
    rows = [
        (*line.plain.split()[:2], *{span.style for span in line.spans})
        for line in render_lines(report([status]))[-2:]
    ]
    assert rows == [("a", "waiting", "yellow"), ("b", "ready", "green")]


def test_a_table_that_waits_is_listed_before_ready_tables() -> None:
    waits = replace(table("z"), wait=TableWait("a lock"))
    lines = shown([source("eu", "streaming", table("a"), waits)])
    assert [line.split()[0] for line in lines[-2:]] == ["z", "a"]


def test_replicas_run_sources_also_while_the_mapping_is_not_known() -> None:
    fleet = Fleet([replica(1), replica(2)], {"shop:eu": "host:1", "shop:us": "host:1"})
    without = StatusReport(report([]).target, [], fleet=fleet)
    lines = [line.plain for line in render_lines(without)]
    assert "2 replicas: host:1 runs 2, host:2 runs 0" in lines
    counts = [each["sources"] for each in without.to_json()["replicas"]]
    assert counts == [2, 0]


async def test_the_hint_of_an_unreachable_source_is_that_of_its_error() -> None:
    mapped = SourceMapping("shop", None, Secret("postgresql://db:5432/shop"), ())

    async def hint_of(error: SourceError) -> str | None:
        @contextlib.asynccontextmanager
        async def refuse(_source: SourceMapping) -> AsyncIterator[Any]:
            raise error
            yield

        status = SourceStatus("shop", None, "unknown", "streamer_shop")
        await _add_positions(status, mapped, _Bookkeeping(), refuse)
        return None if status.remedy is None else str(status.remedy)

    assert await hint_of(SourceConnectionError("no certificate", hint=TLS_HINT)) == TLS_HINT
    assert (
        await hint_of(SourceRejectedError("no password", hint="write a password"))
        == "write a password"
    )
    assert "pg_isready -h db" in str(await hint_of(SourceConnectionError("refused")))


async def test_a_machine_that_cannot_reach_a_source_trusts_the_process_that_streams() -> None:
    mapped = SourceMapping("shop", None, Secret("postgresql://db:5432/shop"), ())

    @contextlib.asynccontextmanager
    async def refuse(_source: SourceMapping) -> AsyncIterator[Any]:
        raise SourceConnectionError("no route to host")
        yield

    status = SourceStatus("shop", None, "streaming", "streamer_shop", process="other:1")
    await _add_positions(status, mapped, _Bookkeeping(), refuse)
    assert (status.state, status.error) == ("streaming", None)
    (problem,) = status.problems
    assert problem.severity is Severity.WARNING
    assert problem.text == "this process is cut off from the source: no route to host"
    # Without a living process, the stored state comes from a dead process.
    status = SourceStatus("shop", None, "streaming", "streamer_shop")
    await _add_positions(status, mapped, _Bookkeeping(), refuse)
    assert (status.state, status.error) == ("unreachable", "no route to host")


async def test_a_source_that_no_replica_takes_waits_also_if_the_source_does_not_answer() -> None:
    mapped = SourceMapping("shop", None, Secret("postgresql://db:5432/shop"), ())
    taker = replace(replica(1), sources=frozenset({"shop"}), mapping="newest")

    @contextlib.asynccontextmanager
    async def refuse(_source: SourceMapping) -> AsyncIterator[Any]:
        raise SourceConnectionError("no route to host")
        yield

    async def told(*replicas: ReplicaRecord, holders: dict[str, str] | None = None) -> str | None:
        fleet = Fleet(list(replicas), holders or {}, "newest")
        (status,) = await _read_statuses(_Bookkeeping(fleet=fleet), Mapping((mapped,)), refuse)
        assert status.state == ("waiting" if status.error_code == "no_replica" else "unreachable")
        return status.error if status.error_code == "no_replica" else None

    assert "each may have reached its --max-sources" in str(await told(taker))
    older = replace(taker, mapping="older")
    differs = str(await told(older))
    assert "the mapping of host:1 differs" in differs
    # The text has the remedy, which the log and commands print.
    assert "give this replica the configuration of the remaining replicas" in differs
    assert "or raise --max-sources" in str(await told(taker))
    assert "each may have reached its --max-sources" in str(
        await told(older, replace(taker, number=2))
    )
    assert await told(taker, holders={"shop": "host:1"}) is None
    assert await told(replica(1), replace(taker, is_stopping=True)) is None


async def test_a_source_starts_when_its_process_has_just_begun() -> None:
    mapped = SourceMapping("shop", None, Secret("postgresql://db:5432/shop"), ())

    @contextlib.asynccontextmanager
    async def refuse(_source: SourceMapping) -> AsyncIterator[Any]:
        raise SourceConnectionError("no route to host")
        yield

    async def state(fleet: Fleet) -> str:
        (status,) = await _read_statuses(_Bookkeeping(fleet=fleet), Mapping((mapped,)), refuse)
        return status.state

    taker = replace(replica(1), sources=frozenset({"shop"}), mapping="newest")
    new = replace(taker, started_at=taker.seen_at - timedelta(seconds=3))
    assert await state(Fleet([new], mapping="newest")) == "starting"
    assert await state(Fleet([taker], mapping="newest")) == "waiting"
    assert await state(Fleet(is_beginning=True)) == "starting"
    assert await state(Fleet()) == "unreachable"


def test_problems_come_before_everything_that_is_well() -> None:
    broken = table("public.orders", "error", "the target lacks a column")
    lines = shown([source("eu", "streaming", table("a")), source("us", "streaming", broken)])
    attention = "1 of 2 sources is fine; 1 needs attention: shop:us"
    assert lines[0] == f"2 sources: 2 streaming; 2 tables: 1 error, 1 ready; {attention}"
    todo = (
        "remove the cause; streamer then continues by itself within 15 seconds, or at once with: "
        "streamer resume public.orders --database shop --sid us"
    )
    assert lines[2:4] == [
        "Problems:",
        f"  shop:us public.orders (error): the target lacks a column; {todo}",
    ]
    headings = [line for line in lines if line.startswith("shop:")]
    assert [heading.partition(",")[0] for heading in headings] == [
        "shop:us: streaming",
        "shop:eu: streaming",
    ]


def test_one_line_names_the_three_sources_of_sixty_that_are_not_fine() -> None:
    fleet = [source(f"t{n:02}", "streaming", table("a"), table("b")) for n in range(60)]
    assert shown(fleet)[0].endswith("120 ready; all sources are fine")
    fleet[7] = source("t07", "stopped", table("a"))
    fleet[20].tables[1] = table("b", "error", "the target lacks a column")
    fleet[41].error = "no answer"
    assert shown(fleet)[0].endswith(
        "57 of 60 sources are fine; 3 need attention: shop:t07, shop:t20, shop:t41"
    )


def test_only_problems_leaves_the_rest_out_and_still_counts_it() -> None:
    fleet = [source(f"t{n}", "streaming", table("a"), table("b")) for n in range(5)]
    fleet[3].tables[1] = table("b", "error", "the target lacks a column")
    left = only_problems(report(fleet))
    assert [(each.sid, [t.source for t in each.tables]) for each in left.sources] == [("t3", ["b"])]
    summary = as_json_object(left)["summary"]
    assert (summary["sources"], summary["fine"]) == (5, 4)
    (line,) = [
        line for line in (t.plain for t in render_lines(left)) if line.startswith("5 sources")
    ]
    assert line.startswith("5 sources: 5 streaming; 10 tables: 1 error, 9 ready; 4 of 5 sources")
    (problem,) = summary["problems"]
    names = ("database", "sid", "table", "problem", "severity")
    shown = [problem[name] for name in names]
    assert shown == ["shop", "t3", "b", "the target lacks a column", "error"]
    assert only_problems(left) == left


def test_tables_that_are_not_ready_stand_first_in_their_source() -> None:
    lines = shown(
        [source("eu", "streaming", table("a"), table("b", "copying"), table("c", "error", "x"))]
    )
    names = [
        line.split()[0]
        for line in lines[lines.index("shop:eu: streaming, lag ?, WAL retained ?") + 2 :]
    ]
    assert names == ["c", "b", "a"]


def test_a_source_that_nobody_runs_and_a_paused_table_say_the_command_that_helps() -> None:
    lines = shown([source("eu", "stopped", table("my table", "paused"))])
    assert "start: streamer run" in lines[3]
    assert lines[4].endswith("streamer resume 'my table' --database shop --sid eu")


def test_without_a_width_a_line_has_all_columns_and_whole_names() -> None:
    line = shown([source("eu", "streaming", table(LONG, held=3))])[-1]
    assert line.count(LONG) == 2  # as source and as target
    assert "0/1A2B300" in line
    assert "3 changes" in line


def test_columns_are_left_out_before_a_name_is_cut() -> None:
    lines = shown([source("eu", "streaming", table(LONG))], 130)
    assert lines[-2].split() == ["table", "state", "copied"]
    assert LONG in lines[-1]
    assert len(lines[-1]) <= 130


def test_a_name_wider_than_the_terminal_is_still_whole() -> None:
    assert LONG in shown([source("eu", "streaming", table(LONG))], 40)[-1]


def test_in_a_pipe_no_line_is_wrapped() -> None:
    out = io.StringIO()
    statuses = [source("eu", "streaming", table(LONG, "error", "long " * 60))]
    print_status(report(statuses), Console(file=out, width=80), is_wide=False)
    assert out.getvalue().splitlines()[1:] == shown(statuses)


def test_a_long_status_is_shown_in_pages_that_keys_turn() -> None:
    pager, lines, head = Pager(), [Text(str(n)) for n in range(25)], Text("now")

    def numbers() -> list[str]:
        return [line.plain for line in pager.page(head, lines, 12)][1:]

    assert numbers()[0] == "0"
    assert numbers()[-1] == "page 1 of 3; space: next, b: back, q: end"
    assert pager.press(" ")
    assert numbers()[0] == "10"
    for _ in range(5):
        pager.press("n")
    assert numbers()[0] == "20"  # not beyond the last page
    pager.press("b")
    assert numbers()[0] == "10"
    assert not pager.press("q")


def test_a_list_that_fits_is_shown_without_a_foot() -> None:
    assert [t.plain for t in Pager().page(Text("now"), [Text("a")], 10)] == ["now", "a"]


def test_doctor_names_the_command_for_a_table_in_error() -> None:
    status = source("eu", "streaming", table("public.t", "error", "a column is missing"))
    fixes = [str(from_problem(problem)) for problem in status.problems]
    assert any("streamer resume public.t --database shop --sid eu" in fix for fix in fixes), fixes


def test_a_copy_whose_spark_starts_says_so_in_place_of_no_rows() -> None:
    copied = table("t", "copying")
    copied.waiting_for, copied.wait = str(STARTING_SPARK), STARTING_SPARK
    (line,) = [line for line in shown([source("eu", "streaming", copied)]) if "clone" in line]
    assert "starting Spark" in line
    assert "rows" not in line
    row = {"source": "t", "state": "copying", "error": None, "rows_copied": 0, "bytes_copied": 0}
    assert queue_of([row | {"waiting_for": str(STARTING_SPARK)}]) == {"t": "starting Spark"}


def test_a_slot_that_is_read_without_a_lock_here_is_read_for_another_target() -> None:
    mapped = SourceMapping("shop", None, Secret(""), ())
    read = replace(SLOT, active_pid=7)
    facts: dict[str, Any] = dict.fromkeys(field.name for field in fields(SourceRecord))
    record = SourceRecord(**facts | {"state": "streaming"})
    assert runs_at_another_target(mapped, record, read)
    assert not runs_at_another_target(mapped, record, SLOT), "no process runs"
    assert not runs_at_another_target(mapped, replace(record, holder="host:1"), read)
    assert not runs_at_another_target(mapped, replace(record, state="waiting"), read)
    spools = replace(mapped, on_max_retained_wal=OnMaxRetainedWal.SPOOL)
    assert runs_at_another_target(spools, record, read), "without a limit there is no journal"
    assert not runs_at_another_target(replace(spools, max_retained_wal_bytes=1), record, read)
    assert not runs_at_another_target(spools, record, replace(read, safe_wal_bytes=1))
