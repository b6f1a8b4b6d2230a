"""Killed in every state of a table sync, and at every step between, the sync begins again."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streamer.util.failpoints import NAMES
from tests.support.postgres import Database
from tests.support.sync_case import IN_CHUNKS, ONLY_AT_FIRST, ONLY_LATER, STEPS, TO_POINT, Case

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")


FIRST = [name for name in STEPS if name not in ONLY_LATER]
LATER = [name for name in STEPS if name not in ONLY_AT_FIRST | {"sync.part_copied"}]


def test_every_failpoint_is_here() -> None:
    elsewhere = {"sync.slot_created"} | TO_POINT | IN_CHUNKS
    assert {name for name in NAMES if name.startswith("sync.")} == {*STEPS} | elsewhere


@pytest.mark.parametrize(("sid", "first"), [(None, 0), ("eu", 1)])
async def test_killed_at_each_step_a_copy_and_then_a_resync_begin_again(
    sid: str | None, first: int, tmp_path: Path, source: Database, target: Database
) -> None:
    """Each process goes on where the process before died, and dies two steps later."""
    case = Case(tmp_path, source, target, sid)
    for name in FIRST[first::2]:
        if name == "sync.part_copied":
            await asyncio.to_thread(die_copying, case, name)
        else:
            await asyncio.to_thread(case.die_writing, name)
    await case.recover()
    case.ask_for_resync()
    for name in LATER[first::2]:
        await asyncio.to_thread(case.die_writing, name + "@2" * (name == "sync.drained"))
    await case.recover()


def die_copying(case: Case, name: str) -> None:
    """The copying process dies, each time after a part or two; the engine's process goes on."""
    case.part_dies(f"{name}@2", lambda: case.write(20))


async def test_killed_while_one_of_its_tables_is_synced_again(
    tmp_path: Path, source: Database, target: Database
) -> None:
    case = Case(tmp_path, source, target, None)
    await case.recover()

    def ask_late() -> None:
        case.write(5)
        target.execute(
            "insert into streamer.request (relation_id, action)"
            " select id, 'resync' from streamer.relation where source = 'public.keyless';"
            " notify streamer"
        )

    for name in ("requests.taken", "sync.slot_created"):
        await asyncio.to_thread(case.die_of, name, ask_late)
        case.write(5)
        await case.recover()


DIFFERENCE = {"mode": "diff"}
CONDITION = {"scope": {"where": ["id > 0 and id < 100000"], "keys": []}}


@pytest.mark.parametrize(
    ("options", "names", "sid"),
    [
        (CONDITION, ("sync.prepared", "sync.at_point", "sync.catching_up"), None),
        (DIFFERENCE, ("sync.job_started", "sync.compared", "sync.exchanged"), "eu"),
    ],
    ids=["condition", "difference"],
)
async def test_killed_while_rows_that_differ_are_copied(
    options: dict[str, Any],
    names: tuple[str, ...],
    sid: str | None,
    tmp_path: Path,
    source: Database,
    target: Database,
) -> None:
    """No change of any row is lost, whether or not the copy has the row. The process that copies
    dies last.
    """
    case = Case(tmp_path, source, target, sid)
    await case.recover()
    case.spoil()
    if options == CONDITION:  # a start takes requests elsewhere
        await asyncio.to_thread(case.die_of, "requests.taken", partial(ask_late, case, options))
        case.write(5)
    else:
        case.ask_to_point(options)
    for name in names:
        await asyncio.to_thread(case.die_writing, name)
    await case.recover()
    case.spoil()
    case.ask_to_point(options)
    await asyncio.to_thread(die_copying, case, "sync.part_copied")
    await case.recover()


def ask_late(case: Case, options: dict[str, Any]) -> None:
    case.write(5)
    case.ask_to_point(options)
    case.target.execute("notify streamer")


async def test_killed_inside_a_transaction_too_large_for_memory(
    tmp_path: Path, source: Database, target: Database
) -> None:
    case = Case(tmp_path, source, target, None)
    await case.recover()
    source.execute(
        "begin; insert into keyless select g, repeat('x', 1000) from generate_series(1, 40000) g;"
        " update keyed set v = 'large'; commit"
    )
    await asyncio.to_thread(case.die_writing, "drain.piece_written@3")
    await case.recover()
