"""Every statement of the bookkeeping, once, on the tables of the migrations."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import pytest

from streamer.bookkeeping import (
    bookkeeping_schema,
    copied_parts,
    copies,
    cutovers,
    ddl_records,
    followed_sequences,
    held_changes,
    planned_definitions,
    positions,
    purges,
    quarantined_changes,
    registered_relations,
    relation_columns,
    relation_definitions,
    relation_records,
    relation_states,
    requests,
    scripts,
    sources,
    stored_conflicts,
    stored_problems,
    taken_requests,
    unmapped_relations,
    verifications,
)
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.control.chunked_copy import ChunkedCopy
from streamer.control.mass_delete import MassDelete
from streamer.control.resync_options import Mode, Resync
from streamer.control.table_state import CopyScope, Need, State
from streamer.copy.parts.ctid_ranges import CopyPart
from streamer.errors.error_classes import TargetFencedError
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.errors.remedies import Remedy, at_source, run
from streamer.mapping.relation_names import RelationName, parse_relation
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.schema.planned_definition import ObjectKind, Planned
from streamer.schema.source_definition import SourceDefinition
from streamer.source.tables.rewritten_tables import Storage
from streamer.target.connection import TargetAddress
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import Lsn
from tests.support.postgres import Database

ERROR = ErrorReport("it failed", "value", Remedy.of("run: ", run("resume", "public.t")))
DEFINITION = SourceDefinition.of({"columns": [{"number": 1, "name": "größe", "type": "text"}]})
NAME = RelationName("public", "t")
NOW = datetime(2026, 1, 2, tzinfo=UTC)
SOURCE = SourceMapping("shop", "eu", Secret(""), ())
CHUNKS = ChunkedCopy(("id",), ("int8",), ("7",), "d", 1, 1000, 5000, 16384)


@pytest.fixture
async def books(target: Database) -> AsyncIterator[Bookkeeping]:
    bookkeeping = Bookkeeping(TargetAddress.parse(Secret(target.url)))
    await bookkeeping_schema.migrate(bookkeeping)
    yield bookkeeping
    await bookkeeping.close()


async def add_relation(books: Bookkeeping) -> tuple[int, int]:
    """Store a source and a relation in sync; return their ids."""
    source_id, _ = await sources.register_source(books, SOURCE)
    await relation_records.RELATIONS.insert(
        books,
        [
            {
                "source_id": source_id,
                "source": NAME,
                "target": NAME,
                "type": "clone",
                "state": "ready",
                "snapshot_lsn": Lsn(16),
                "end_lsn": Lsn(16),
                "definition": DEFINITION,
                "columns": {"größe": 1},
            }
        ],
    )
    (record,) = await relation_records.read_relation_records(books)
    return source_id, record.relation_id


async def test_values_come_back_as_they_were_stored(books: Bookkeeping) -> None:
    source_id, relation_id = await add_relation(books)
    fence = FencingToken(source_id, "token", 1, "session")
    await sources.set_source(
        books, source_id, holder="h:1", lock_token="token", implementation="pure"
    )
    assert await sources.read_valid_tokens(books, [fence]) == {"token"}
    assert await sources.holds_lock(books, fence)
    await sources.set_source_state(books, source_id, "error", ERROR, waiting_for="a slot")
    await sources.set_source(books, source_id, system_identifier="7000", timeline=1)
    await sources.follow_timeline(books, fence, 1, 2, "1 0/10")
    await sources.set_source(books, source_id, backlog={"throttled": True}, copy_rounds=2)
    await sources.set_heartbeat_overdue(books, source_id, 3.5)
    await positions.reset_acknowledged(books, source_id, Lsn(32))
    source = await sources.read_source_record(books, source_id)
    assert (source.error, source.timeline, source.timeline_history) == (ERROR, 2, "1 0/10")
    assert (source.backlog, source.acknowledged_lsn) == ({"throttled": True}, Lsn(32))
    assert source.heartbeat_overdue_seconds is not None
    assert source.holder is None
    await sources.report_source_failure(books, source_id, "waiting", ERROR, "h:2")
    assert (await sources.read_source_record(books, source_id)).state == "waiting"
    assert await sources.read_source_labels(books) == {source_id: "shop:eu"}
    assert await sources.read_writers(books, [(NAME, None)], any_sid=True) == [[]]

    wait = TableWait("a lock", ERROR.remedy)
    mass_delete = MassDelete(7, Lsn(48), NOW.isoformat(), 5, 0)
    await relation_states.set_waiting(books, [relation_id], wait)
    await relation_states.pause_before_mass_delete(books, relation_id, mass_delete, ERROR)
    await relation_states.set_lags(books, {relation_id: 2.0})
    await positions.set_visible(books, {relation_id: Lsn(64)})
    await relation_columns.set_transports(books, {relation_id: ("text", "a reason")})
    full = Remedy.of("run: ", at_source("alter table t replica identity full"))
    await relation_columns.set_published(books, {relation_id: ("mark", "none", 9, full)})
    await relation_columns.set_leaves(books, relation_id, {3: "1 2"})
    storage = {9: Storage(0, 7, "digest")}
    changes = {relation_id: relation_columns.StorageChange(storage, None)}
    assert await relation_columns.set_storage(books, changes) == {relation_id}
    assert await relation_columns.set_storage(books, changes) == set()
    assert await relation_columns.read_storage(books, [relation_id]) == {relation_id: storage}
    assert await relation_columns.read_stored_leaves(books, [relation_id]) == {
        relation_id: {3: "1 2"}
    }
    assert await relation_columns.read_source_columns(books) == {relation_id: {"größe": 1}}
    (record,) = await relation_records.read_relation_records(books, source_id)
    assert (record.state, record.wait, record.error, record.mass_delete) == (
        "paused",
        wait,
        ERROR,
        mass_delete,
    )
    assert (record.visible_lsn, record.snapshot_lsn, record.end_lsn) == (Lsn(64), Lsn(16), Lsn(16))
    assert (record.resync, record.quarantined, record.source_oid) == (Resync(), 0, 9)
    assert record.lag_seconds is not None
    assert (record.transport, record.identity) == ("text", "none")
    assert await relation_definitions.read_definition(books, relation_id) == DEFINITION
    (shown,) = (await stored_problems.read_stored_facts(books)).values()
    assert shown.insert_only == {"public.t": full}
    assert await relation_records.read_labels(books, [relation_id]) == {
        relation_id: ("shop:eu", "public.t")
    }
    assert await relation_records.read_unready_tables(books) == {
        "shop:eu": {"public.t": ("paused", ERROR)}
    }
    assert await relation_records.read_targets(books, "shop") == {"public.t"}


async def test_states_of_a_relation(books: Bookkeeping) -> None:
    source_id, relation_id = await add_relation(books)

    async def now() -> relation_records.RelationRecord:
        (record,) = await relation_records.read_relation_records(books, source_id)
        return record

    await relation_states.set_streaming_states(books, {relation_id: (State.ERROR, ERROR)})
    assert (await now()).state == "error"
    await relation_states.set_streaming_states(books, {relation_id: (State.READY, None)})
    assert await relation_states.report_gap(books, relation_id, ERROR)
    assert not await relation_states.report_gap(books, relation_id, ERROR)
    columns = Resync(Mode.DIFF, columns=("v",))
    await relation_states.demand_again(books, relation_id, Need.PART, columns)
    assert ((await now()).state, (await now()).resync.columns) == ("copying", ("v",))
    first = (await now()).attempt
    await requests.make_request(books, relation_id, "resync", Resync(Mode.DIFF).to_json())
    assert len(await taken_requests.take_requests(books, source_id, SOURCE)) == 1
    fail = partial(relation_states.fail_copy, books, relation_id, ERROR)
    assert not await fail(Need.PART, first)
    newer = await now()
    assert (newer.state, newer.resync, newer.error) == ("copying", Resync(Mode.DIFF), None)
    assert await fail(Need.PART, newer.attempt)
    assert ((await now()).state, (await now()).resync) == ("ready", Resync())
    attempt = (await now()).attempt
    assert not await fail(Need.ROWS, attempt - 1)
    assert (await now()).state == "ready"
    await relation_states.demand_copy(books, relation_id, Resync())
    assert not await fail(Need.CHUNKS, None), "a newer request has removed the chunks"
    assert (await now()).state == "init"
    assert await fail(Need.ROWS, attempt + 1)
    assert (await now()).state == "error"
    await relation_states.require_resync_of_source(books, source_id, ERROR)
    await relation_states.require_resync(books, relation_id, ERROR)
    assert ((await now()).needs_resync, (await now()).snapshot_lsn) == (True, None)
    await relation_states.demand_copy(books, relation_id, Resync(Mode.DIFF))
    assert ((await now()).state, (await now()).needs_resync) == ("init", False)
    await relation_states.demand_copy_at_point(books, relation_id, ["v"])
    assert not await relation_states.is_copy_due(books, relation_id)
    await relation_states.forget_target(books, relation_id)
    await relation_states.store_names(
        books,
        {
            relation_id: RelationMapping(
                RelationName("s", "a"), NAME, TableRule(parse_relation("s.a", "s"))
            )
        },
    )
    assert (await now()).source == "s.a"
    await relation_states.set_copy_error(books, [relation_id], ERROR)
    await copies.fill_directly(books, [relation_id])
    await copies.set_row_estimates(books, {relation_id: 5})
    assert ((await now()).owns_rows, (await now()).rows_total) == (True, 5)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_relation_that_returns_is_as_it_was_unless_its_source_moved_on(
    books: Bookkeeping, is_lost: bool, moves: bool
) -> None:
    source_id, relation_id = await add_relation(books)
    if is_lost:
        await copies.fill_directly(books, [relation_id])
        await relation_states.require_resync(books, relation_id, ERROR)
    (before,) = await relation_records.read_relation_records(books)
    await registered_relations.forget_relation(books, relation_id)
    assert await relation_records.read_relation_records(books) == []
    if moves:
        await positions.reset_acknowledged(books, source_id, Lsn(8))
    returned = await unmapped_relations.restore_records(
        books,
        source_id,
        {"public.t": ("public.t", None), "public.u": ("public.u", None)},
        may_resume=True,
    )
    assert returned == {"public.t"}
    (after,) = await relation_records.read_relation_records(books)
    same = replace(after, relation_id=relation_id, changed_at=before.changed_at)
    if moves and not is_lost:
        assert (after.state, after.snapshot_lsn, after.has_resync) == ("init", None, True)
        same = replace(same, state=before.state, snapshot_lsn=Lsn(16), has_resync=False)
    assert same == before


async def test_a_table_that_returns_after_a_drop_needs_no_request(books: Bookkeeping) -> None:
    source_id, relation_id = await add_relation(books)
    await copies.fill_directly(books, [relation_id])
    await relation_states.require_resync(books, relation_id, ERROR)
    async with books.transaction() as target:
        await registered_relations.remove_dropped(target, relation_id)
    names = {"public.t": ("public.t", None)}
    await unmapped_relations.restore_records(books, source_id, names, may_resume=True)
    (after,) = await relation_records.read_relation_records(books)
    assert (after.state, after.error, after.needs_resync) == ("init", None, False)
    assert after.owns_rows


async def test_copies_begin_and_hand_over(books: Bookkeeping) -> None:
    source_id, relation_id = await add_relation(books)
    part = CopyPart(relation_id, 1, 0, "a part", "", "", "", "", 100, "", "", (), (), "")
    change = (
        "insert",
        '{"id": "7"}',
        None,
        '{"id": "7"}',
        '{"columns": []}',
        "0/20",
        NOW,
        7,
        "no",
        "1",
    )
    place = ddl_records.DdlPlace(relation_id, Lsn(32), 0)
    async with books.transaction() as target:
        await quarantined_changes.add_quarantined(target, relation_id, [change])
        await quarantined_changes.mark_quarantined(target, relation_id, Lsn(33), NOW, 8, "emptied")
        await quarantined_changes.end_quarantined(target, relation_id, NOW)
        await ddl_records.put_ddl(
            target, place, query="q", changes=["c"], statements=["s"], reason="r", state="waiting"
        )
        assert await copies.read_filling(target, [relation_id]) == set()
        begun = (await copies.begin_copies(target, [relation_id], Need.ROWS))[relation_id]
        await copied_parts.add_parts(target, [part])
        assert await copies.read_progress(target)
        assert await copied_parts.read_ended_parts(target, [relation_id]) == []
        assert await copied_parts.withdraw_parts(target, relation_id)
        assert await copied_parts.read_copy_speed(target) is None
        await copied_parts.remove_parts(target, [relation_id])
        finished = copies.FinishedCopy(
            relation_id,
            CopyScope(Need.ROWS),
            Lsn(64),
            begun.attempt,
            5,
            50,
            True,
            {"v": 1},
            DEFINITION,
            {9: Storage(0, 7, None)},
        )
        assert not await copies.is_switched(target, finished)
        await copies.switch_to_stream(target, [finished])
        assert await copies.is_switched(target, finished)
        assert not begun.was_in_sync
        assert await copies.read_leftover_stages(target, source_id) == []
    (record,) = await relation_records.read_relation_records(books)
    assert (record.state, record.rows_copied, record.quarantined) == ("catching_up", 5, 0)
    assert await ddl_records.read_ddl(books, with_done=True) == []

    storage = {9: Storage(0, 8, None)}
    columns, different = Resync(Mode.DIFF, columns=("v",)), Resync(Mode.DIFF)
    async with books.transaction() as target:
        await quarantined_changes.add_quarantined(target, relation_id, [change])
    for resync, before, lsn, left in ((columns, 64, 80, 1), (different, 80, 96, 0)):
        await relation_states.demand_again(books, relation_id, Need.PART, resync)
        async with books.transaction() as target:
            begun = (await copies.begin_copies(target, [relation_id], Need.PART))[relation_id]
            assert begun.was_in_sync
            finished = replace(
                finished,
                scope=CopyScope(Need.PART, resync),
                attempt=begun.attempt,
                lsn=Lsn(lsn),
                end_lsn=Lsn(before),
                columns={"v": 2},
                storage=storage,
            )
            with pytest.raises(TargetFencedError):
                await copies.switch_to_stream(target, [replace(finished, end_lsn=Lsn(before - 1))])
            await copies.switch_to_stream(target, [finished])
            assert await quarantined_changes.count_quarantined(target, relation_id) == left
    assert await relation_columns.read_storage(books, [relation_id]) == {relation_id: storage}

    await relation_states.demand_copy(books, relation_id, Resync())
    await relation_records.RELATIONS.set(books, relation_id, {"was_in_sync": False})
    async with books.transaction() as target:
        begun = (await copies.begin_copies(target, [relation_id], Need.ROWS))[relation_id]
        scope = CopyScope(Need.ROWS, chunks=CHUNKS)
        chunk = replace(finished, scope=scope, attempt=begun.attempt, lsn=Lsn(112))
        await copies.switch_to_stream(target, [chunk])
        assert await copies.is_switched(target, chunk)
        with pytest.raises(TargetFencedError):
            await copies.switch_to_stream(target, [chunk])
        begun = (await copies.begin_copies(target, [relation_id], Need.CHUNKS))[relation_id]
        assert (begun.chunks, begun.chunk_attempt) == (CHUNKS, begun.attempt - 1)
        assert not begun.was_in_sync
        await quarantined_changes.add_quarantined(target, relation_id, [change])
        last = replace(finished, scope=CopyScope(Need.CHUNKS), attempt=begun.attempt, lsn=Lsn(128))
        await copies.switch_to_stream(target, [last])
        assert await quarantined_changes.count_quarantined(target, relation_id) == 1
    (record,) = await relation_records.read_relation_records(books, source_id)
    assert (record.chunks, record.rows_copied, record.rows_total) == (None, 10, 10)


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_late_store_leaves_a_pause_and_a_newer_request(
    books: Bookkeeping, is_paused: bool
) -> None:
    """The statement decides the state from the row at the time of the write."""
    source_id, relation_id = await add_relation(books)
    if is_paused:
        await requests.make_request(books, relation_id, "pause")
    else:
        await requests.make_request(books, relation_id, "resync", {"skip_changes": True})
    await taken_requests.take_requests(books, source_id, SOURCE)
    (before,) = await relation_records.read_relation_records(books, source_id)
    for state, error in ((State.ERROR, ERROR), (State.READY, None)):
        await relation_states.set_streaming_states(books, {relation_id: (state, error)})
    assert not await relation_states.report_gap(books, relation_id, ERROR)
    former = before.attempt - 1
    assert not await relation_states.fail_copy(books, relation_id, ERROR, Need.ROWS, former)
    (after,) = await relation_records.read_relation_records(books, source_id)
    assert (after.state, after.error) == ("paused" if is_paused else "init", None)
    assert after == before
    await relation_states.require_resync(books, relation_id, ERROR)
    (lost,) = await relation_records.read_relation_records(books, source_id)
    assert (lost.state, lost.error) == ("paused" if is_paused else "error", ERROR)


async def test_a_mass_delete_pauses_a_table_whose_copy_has_some_chunks(
    books: Bookkeeping,
) -> None:
    """The stream changes rows of copied chunks, so a copy of the further chunks does not help."""
    source_id, relation_id = await add_relation(books)
    await relation_states.demand_copy(books, relation_id, Resync())
    mass_delete = MassDelete(7, Lsn(48), NOW.isoformat(), 5, 0)
    await relation_states.pause_before_mass_delete(books, relation_id, mass_delete, ERROR)
    (record,) = await relation_records.read_relation_records(books, source_id)
    assert (record.state, record.mass_delete) == ("init", None), "the copy brings all rows"
    async with books.transaction() as target:
        begun = (await copies.begin_copies(target, [relation_id], Need.ROWS))[relation_id]
        scope = CopyScope(Need.ROWS, chunks=CHUNKS)
        chunk = copies.FinishedCopy(
            relation_id, scope, Lsn(32), begun.attempt, 1, 2, True, {"v": 1}, DEFINITION
        )
        await copies.switch_to_stream(target, [chunk])
    await relation_states.pause_before_mass_delete(books, relation_id, mass_delete, ERROR)
    (record,) = await relation_records.read_relation_records(books, source_id)
    assert (record.state, record.mass_delete, record.error) == ("paused", mass_delete, ERROR)


async def test_rows_of_the_small_tables(books: Bookkeeping) -> None:
    source_id, relation_id = await add_relation(books)
    fence = FencingToken(source_id, "token", 1, "session")
    await sources.set_source(books, source_id, holder="h:1", lock_token="token")
    await requests.make_request(books, relation_id, "quarantine_drop", {"ids": [1]})
    (request,) = await requests.read_quarantine_requests(books, source_id)
    assert (request.options, request.action) == ({"ids": [1]}, "quarantine_drop")
    assert await requests.lock_request(books, request.request_id)
    await requests.end_request(books, request.request_id, ERROR)
    (request,) = await requests.read_requests(books)
    assert (request.state, request.error) == ("failed", ERROR)
    assert not await requests.lock_request(books, request.request_id)
    of_column = Resync(Mode.DIFF, columns=("v",))
    asked = await requests.make_request(books, relation_id, "resync", of_column.to_json())
    await requests.make_request(books, relation_id, "pause")
    assert await requests.has_requests(books)
    async with books.transaction() as target:
        await relation_columns.request_unfilled(target, relation_id, ["v"])
        await requests.request_resume(target, relation_id)
        await relation_definitions.rename_unfilled(target, relation_id, {"v": "größe"})
        assert await relation_columns.read_unfilled(target, relation_id) == ["größe"]
    (request,) = await requests.read_requests(books, [asked])
    assert request.resync.columns == ("größe",)
    taken = await taken_requests.take_requests(books, source_id, SOURCE)
    assert [each.action for each in taken] == ["resync", "pause"]
    assert not await requests.has_requests(books), "no other source has to look for requests"

    await cutovers.store_step(books, source_id, "check", {"a": 1})
    await cutovers.store_marker(books, source_id, Lsn(16))
    await cutovers.finish_cutover(books, source_id)
    cutover = cutovers.CutoverRecord(source_id, "check", {"a": 1}, Lsn(16), True)
    assert await cutovers.read_cutover(books, source_id) == cutover

    side = scripts.ScriptSide.BOTH
    await scripts.add_script(books, source_id, "s", "select 1", side)
    await scripts.set_script_xid(books, source_id, "s", 7, ("7000", 1))
    assert await scripts.replace_script(books, source_id, "s", "select 2")
    await scripts.set_script_error(books, source_id, "s", "no")
    await scripts.set_scripts_missed(books, source_id, ["s"], "gone")
    assert await scripts.end_script(books, source_id, "s", scripts.ScriptState.SKIPPED)
    assert not await scripts.finish_script(books, fence, "s", Lsn(16))
    await scripts.add_script(books, source_id, "done", "select 1", side)
    assert await scripts.finish_script(books, fence, "done", Lsn(16))
    (done,) = await scripts.read_scripts(books, source_id, "done")
    assert (done.state, done.lsn) == (scripts.ScriptState.DONE, Lsn(16))

    result = verifications.VerificationRecord(relation_id, NOW, NOW, Lsn(16), 0, 0)
    await verifications.store_verifications(books, [result, replace(result, relation_id=0)])
    assert await verifications.read_verifications(books) == {relation_id: result}
    held = held_changes.HeldRecord(relation_id, 5, 50, Lsn(16))
    await held_changes.set_held(books, source_id, [held])
    assert await held_changes.read_held(books) == {relation_id: held}
    await held_changes.set_held(books, source_id, [])
    assert await held_changes.read_held(books) == {}
    follower = followed_sequences.SequenceRecord("s", "t", 1, 2, "no", ERROR.remedy, source_id)
    await followed_sequences.store_sequences(books, source_id, [follower])
    assert await followed_sequences.read_sequences(books) == {source_id: [follower]}

    planned = Planned(ObjectKind.INDEX, "i", ("create",), ("create online",), source_sql="create")
    async with books.transaction() as target:
        await planned_definitions.store_definitions(target, relation_id, [planned])
        (plan,) = await planned_definitions.read_plans(target, relation_id)
        assert (plan.kind, plan.online, plan.target) == (ObjectKind.INDEX, ("create online",), NAME)
        assert await planned_definitions.read_pending(target, relation_id) == [plan]
        assert not await planned_definitions.is_remade(target, plan)
        await planned_definitions.read_reference(target, plan)
        await planned_definitions.set_failed(target, plan, "not yet")
        assert await planned_definitions.is_pending(target, plan)
        ended = [(plan.kind, plan.name)]
        await planned_definitions.withdraw_plans(target, relation_id, ended)
        (unwanted,) = await planned_definitions.read_unwanted(target)
        await planned_definitions.put_plans(target, relation_id, [planned])
        assert await planned_definitions.read_unwanted(target) == [
            replace(unwanted, attempts=0, reason=None)
        ]
        await planned_definitions.forget_unwanted(target, plan.id)
        assert await planned_definitions.read_pending(target, relation_id) == [plan]
        await planned_definitions.set_made(target, plan)
        assert await planned_definitions.read_definitions(target) == {}
        await planned_definitions.withdraw_plans(target, relation_id, ended)
        await planned_definitions.put_plans(target, relation_id, [planned])
        (plan,) = await planned_definitions.read_plans(target, relation_id)
        await planned_definitions.give_up(target, plan, "no", ["left"])
        assert await planned_definitions.read_unwanted(target) == []
        conflict = ("insert_exists", "stopped", "insert", '{"id": "1"}', "0/10", NOW, 7, None)
        await stored_conflicts.add_conflicts(target, relation_id, [conflict, conflict], 10)
        (noted,) = await stored_conflicts.read_newest_conflicts(target, [relation_id], 10)
        assert (noted.lsn, noted.key) == ("0/10", '{"id": "1"}')
    (facts,) = (await stored_problems.read_stored_facts(books)).values()
    assert facts.definitions["public.t"][0].statements == ("left",)

    async with books.transaction() as target:
        await purges.begin_purge(target, "shop", "eu", ["public.t"])
        await purges.store_columns(target, source_id)
        (purge,) = await purges.read_purges(target)
        await purges.move_purge(target, purge, 5, 1, 2)
        await purges.finish_purge(target, purge)
        await registered_relations.remove_relation(target, relation_id)
        returned = await unmapped_relations.restore_records(
            target, source_id, {"public.t": ("public.t", None)}, may_resume=True
        )
        assert returned == {"public.t"}
        await registered_relations.remove_relations(target, source_id)
    await sources.forget_source(books, source_id)
    assert await sources.read_source_records(books) == []
    (purge,) = await purges.read_purges(books)
    assert purge.is_finished
