"""Killed in every state of a table sync, and at every step from one to the next, it begins again."""

import asyncio
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.support.postgres import Database
from tests.support.process import Process
from tests.support.sync_case import ONLY_AT_FIRST, ONLY_LATER, STEPS, Case
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("without_spark")


@pytest.mark.parametrize(("name", "sid"), list(zip(STEPS, cycle([None, "eu"]), strict=False)))
async def test_killed_at(
    name: str, sid: str | None, tmp_path: Path, source: Database, target: Database
) -> None:
    case = Case(tmp_path, source, target, sid)
    if name == "sync.part_copied":
        await die_copying(case, name)
        return
    if name not in ONLY_LATER:
        await asyncio.to_thread(case.die, f"{name}=kill")
        case.write(5)
    await case.recover()
    if name not in ONLY_AT_FIRST:
        case.ask_for_resync()
        await asyncio.to_thread(
            case.die, f"{name}=kill@2" if name == "sync.drained" else f"{name}=kill"
        )
        case.write(5)
        await case.recover()


async def die_copying(case: Case, name: str) -> None:
    """It is the process that copies which dies, each time after a part or two; ours goes on."""
    armed = {"STREAMER_FAILPOINTS": f"{name}=kill@2"}
    with Process(case.config, environment=armed, spark=False) as process:
        eventually(lambda: "the Spark job is started again" in process.output)
        case.write(20)
        process.kill()
    await case.recover()


@pytest.mark.parametrize("name", ["sync.slot_created", "requests.taken"])
async def test_killed_while_one_of_its_tables_is_synced_again(
    name: str, tmp_path: Path, source: Database, target: Database
) -> None:
    case = Case(tmp_path, source, target, None)
    await case.recover()

    def ask_late() -> None:
        with Process(
            case.config, environment={"STREAMER_FAILPOINTS": f"{name}=kill"}, spark=False
        ) as process:
            streaming = "select 1 from streamer.source where state = 'streaming'"
            eventually(lambda: target.execute(streaming))
            case.write(5)
            target.execute(
                "insert into streamer.request (relation_id, action)"
                " select id, 'resync' from streamer.relation where source = 'public.keyless';"
                " notify streamer"
            )
            assert process.wait(60) == -9

    await asyncio.to_thread(ask_late)
    case.write(5)
    await case.recover()


DIFFERENCE = {"mode": "diff"}
CONDITION = {"scope": {"where": ["id > 0 and id < 100000"], "keys": []}}


@pytest.mark.parametrize(
    ("name", "options", "sid"),
    [
        ("requests.taken", CONDITION, None),
        ("sync.prepared", CONDITION, None),
        ("sync.job_started", DIFFERENCE, "eu"),
        ("sync.compared", DIFFERENCE, "eu"),
        ("sync.at_point", CONDITION, "eu"),
        ("sync.exchanged", DIFFERENCE, None),
        ("sync.catching_up", CONDITION, "eu"),
    ],
)
async def test_killed_while_rows_that_differ_are_brought(
    name: str,
    options: dict[str, Any],
    sid: str | None,
    tmp_path: Path,
    source: Database,
    target: Database,
) -> None:
    """No change of any row is lost, whether the copy has it or not."""
    case = Case(tmp_path, source, target, sid)
    await case.recover()
    case.spoil()
    if name != "requests.taken":  # a start takes requests elsewhere
        case.ask_to_point(options)
        await asyncio.to_thread(case.die, f"{name}=kill")
    else:
        await asyncio.to_thread(ask_while_it_streams, case, name, options)
    case.write(5)
    await case.recover()


@pytest.mark.parametrize("options", [CONDITION, DIFFERENCE], ids=["condition", "difference"])
async def test_the_process_that_copies_rows_that_differ_is_killed(
    options: dict[str, Any], tmp_path: Path, source: Database, target: Database
) -> None:
    case = Case(tmp_path, source, target, "eu")
    await case.recover()
    case.spoil()
    case.ask_to_point(options)
    await die_copying(case, "sync.part_copied")


def ask_while_it_streams(case: Case, name: str, options: dict[str, Any]) -> None:
    armed = {"STREAMER_FAILPOINTS": f"{name}=kill"}
    with Process(case.config, environment=armed, spark=False) as process:
        streaming = "select 1 from streamer.source where state = 'streaming'"
        eventually(lambda: case.target.execute(streaming))
        case.write(5)
        case.ask_to_point(options)
        case.target.execute("notify streamer")
        assert process.wait(60) == -9


async def test_killed_inside_a_transaction_too_large_for_memory(
    tmp_path: Path, source: Database, target: Database
) -> None:
    case = Case(tmp_path, source, target, None)
    await case.recover()
    source.execute(
        "begin; insert into keyless select g, repeat('x', 1000) from generate_series(1, 40000) g;"
        " update keyed set v = 'large'; commit"
    )
    await asyncio.to_thread(case.die, "drain.piece_written=kill@3")
    await case.recover()
