"""Resyncs of tables that keep the past lose no version, and no row that comes and goes."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from streamer.bookkeeping.relation_states import demand_copy_at_point
from streamer.commands.table_requests import request
from streamer.config import static_mapping
from streamer.errors.error_classes import MappingError
from streamer.errors.remedies import Remedy
from streamer.postgres.secret import Secret
from streamer.runtime.guards import publications
from streamer.source.slot_and_publications import publication as source_publication
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, contents
from tests.support.remedies import Operator, remedy_of
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, write_config
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark")

KEYED = "create table t (id int primary key, v int); insert into t values (1, 0), (2, 0);"


@contextlib.contextmanager
def held_back(target: Database, table: str = "t") -> Iterator[None]:
    """Keep the target from taking changes of a table meanwhile."""
    with target.connect() as connection, connection.transaction():
        connection.execute(f"lock table {table} in share mode".encode())
        yield


def count_up(source: Database, first: int, last: int) -> None:
    """Give row 1 each value in turn, in separate transactions."""
    for value in range(first, last + 1):
        source.execute(f"update t set v = {value} where id = 1")


def versions(target: Database, key: int = 1) -> list[Any]:
    return [v for (v,) in target.execute(f"select v from t where id = {key} order by kvsz_id")]


@pytest.mark.parametrize("mode", ["reload", "diff"])
@streams("t: {type: history}", source=KEYED)
async def test_a_resync_keeps_the_versions_that_the_target_has_not_taken_yet(
    shared: Shared, mode: str
) -> None:
    await shared.caught_up()
    with held_back(shared.target):
        count_up(shared.source, 1, 9)
        await shared.ask("resync", mode=mode)
        count_up(shared.source, 10, 12)
    await shared.caught_up()
    assert versions(shared.target) == list(range(13))


@pytest.mark.parametrize("mode", ["reload", "diff"])
@streams("t: {type: history}", source=KEYED)
async def test_a_resync_keeps_the_versions_of_a_pause(shared: Shared, mode: str) -> None:
    await shared.caught_up()
    await shared.ask("pause")
    await shared.table_state("t", "paused")
    count_up(shared.source, 1, 9)
    await shared.ask("resync", mode=mode)
    await shared.caught_up()
    assert versions(shared.target) == list(range(10))


@pytest.mark.parametrize("mode", ["reload", "diff"])
@streams("t: {type: history}", source=KEYED)
async def test_a_resync_keeps_the_versions_that_an_error_held_back(
    shared: Shared, mode: str
) -> None:
    await shared.caught_up()
    shared.target.execute("alter table t add constraint few check (v < 5)")
    count_up(shared.source, 1, 9)
    await shared.table_state("t", "error")
    shared.target.execute("alter table t drop constraint few")
    await shared.ask("resync", mode=mode)
    await shared.caught_up()
    assert versions(shared.target) == list(range(10))


@streams("t: {type: append}", source=KEYED)
async def test_a_row_that_comes_and_goes_before_the_snapshot_arrives(shared: Shared) -> None:
    await shared.caught_up()
    await shared.ask("pause")
    shared.source.execute("insert into t values (3, 3)")
    shared.source.execute("delete from t where id = 3")
    await shared.ask("resync")
    await shared.caught_up()
    assert contents(shared.target, "t") == [("(1,0)",), ("(2,0)",), ("(3,3)",)]


@streams(
    "t: {metadata: {deleted_at: gone}, on_delete: mark}",
    source=KEYED,
)
async def test_a_marked_row_that_comes_and_goes_before_the_snapshot_arrives(
    shared: Shared,
) -> None:
    await shared.caught_up()
    await shared.ask("pause")
    shared.source.execute("insert into t values (3, 3)")
    shared.source.execute("delete from t where id = 3")
    await shared.ask("resync")
    await shared.caught_up()
    rows = shared.target.execute("select id, gone is not null from t order by 1")
    assert rows == [(1, False), (2, False), (3, True)]


async def test_a_stopped_process_resyncs_without_a_loss(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(KEYED)
    async with stream("t: {type: history}") as streamer:
        await streamer.caught_up()
        await streamer.stop()
        count_up(source, 1, 9)
        target.execute(
            "insert into streamer.request (relation_id, action, options)"
            " select id, 'resync', '{}' from streamer.relation"
        )
        streamer.start()
        await streamer.caught_up()
        assert versions(target) == list(range(10))


@pytest.mark.since(15)  # lists of columns
@streams(
    "t: {type: history, column_list: true, exclude: [secret], on_column_added: add}",
    source="create table t (id int primary key, v int, secret int);"
    "insert into t values (1, 0), (2, 0)",
)
async def test_a_column_that_joins_a_column_list_costs_no_version(shared: Shared) -> None:
    source, target = shared.source, shared.target

    async def is_copied() -> bool:
        return (await shared.table("t"))["state"] in ("init", "copying")

    await shared.caught_up()
    with held_back(target):
        count_up(source, 1, 9)
        source.execute("alter table t add column w int default 7")
        count_up(source, 10, 12)
        await shared.eventually(is_copied)
    count_up(source, 13, 15)

    async def is_filled() -> bool:
        return bool(target.value("select bool_and(w = 7) from t where kvsz_end > '9000-01-01'"))

    async def has_column() -> bool:
        return "w" in [
            name
            for (name,) in target.execute(
                "select attname from pg_attribute where attrelid = 't'::regclass"
            )
        ]

    await shared.eventually(has_column)
    await shared.eventually(is_filled)
    await shared.caught_up()
    assert versions(target) == list(range(16))


@pytest.mark.since(15)  # lists of columns
async def test_a_copy_is_requested_once_while_its_publication_waits_for_a_lock(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key, v int, secret int)")
    source.execute("insert into t values (1, 0)")
    looks: list[int] = []

    async def demand(*arguments: Any) -> None:
        await demand_copy_at_point(*arguments)
        looks.append(
            int(str(target.value("select count(*) from streamer.request where state = 'queued'")))
        )

    monkeypatch.setattr(publications, "demand_copy_at_point", demand)
    monkeypatch.setattr(source_publication, "LOCK_SECONDS", 1)
    rule = "t: {type: history, column_list: true, exclude: [secret], on_column_added: add}"
    async with stream(rule) as streamer:
        await streamer.caught_up()
        await streamer.stop()
        source.execute("alter table t add column w int default 7")
        with source.connect() as other, other.transaction():
            other.execute("lock table t in share update exclusive mode")
            streamer.start()
            await until(lambda: len(looks) >= 4)
        await until(lambda: target.execute("select to_jsonb(t) ->> 'w' from t") == [("7",)])
        assert max(looks) == 1


@pytest.mark.parametrize("way", ["remove the cause", "leave the changes out"])
@pytest.mark.follows("runtime.tables.table_events:TableEvents._cannot_reach")
@streams("t: {type: history}", source=KEYED)
async def test_a_copy_names_the_changes_that_the_target_refuses_and_leaves_them_out_with_consent(
    shared: Shared, way: str
) -> None:
    await shared.caught_up()
    shared.target.execute("alter table t add constraint few check (v not between 5 and 9)")
    count_up(shared.source, 1, 10)
    await shared.table_state("t", "error")
    await shared.ask("resync")
    remedy = await remedy_of(shared, shared.own("t"), "to copy the table without its 6 changes")
    await shared.table_state("t", "error")
    assert versions(shared.target) == list(range(5))
    if way == "remove the cause":
        shared.target.execute("alter table t drop constraint few")
        kept = list(range(11))
    else:
        steps = [step for step in remedy.steps if "--skip-changes" in str(step)]
        await Operator(shared.path, shared.source, shared.target).follow(Remedy.of(*steps))
        kept = [0, 1, 2, 3, 4, 10]
    await shared.caught_up()
    assert versions(shared.target) == kept


@pytest.mark.follows("bookkeeping.taken_requests:find_gap")
async def test_a_table_whose_changes_are_gone_asks_before_its_past_gets_a_gap(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(KEYED)
    async with stream("t: {type: history}") as streamer:
        await streamer.caught_up()
        publication = source.value(
            "select pubname from pg_publication_tables where tablename = 't'"
        )
        source.execute(f"alter publication {publication} drop table t")
        await streamer.table_state("public.t", "error")
        count_up(source, 1, 3)
        error = str((await streamer.table("public.t"))["error"])
        remedy = "streamer resync public.t --database shop --skip-changes"
        assert remedy in error
        address = TargetAddress.parse(Secret(target.url))

        with pytest.raises(MappingError, match="are permanently missing, from position") as refused:
            await request(address, "resync", "t", database="shop", sid=None)
        assert remedy in str(refused.value.hint)
        # A request from elsewhere has no effect either, nor has a request to resume.
        for action in ("resync", "resume"):
            await streamer.ask(action)
            assert (await streamer.table("public.t"))["state"] == "error"
        assert refused.value.remedy is not None
        await Operator(streamer.path, source, target).follow(refused.value.remedy)
        await streamer.caught_up()
        assert versions(target) == [0, 3]
        count_up(source, 4, 6)
        await streamer.caught_up()
        assert versions(target) == [0, 3, 4, 5, 6]


@pytest.mark.follows("bookkeeping.taken_requests:find_gap")
@streams("t: {type: history, on_error: quarantine}", source=KEYED)
async def test_changes_in_quarantine_are_dropped_with_consent_only(shared: Shared) -> None:
    await shared.caught_up()
    operator = Operator(shared.path, shared.source, shared.target)
    address = TargetAddress.parse(shared.settings.target.url)

    async def refused() -> Remedy:
        with pytest.raises(MappingError, match="are in quarantine") as caught:
            await request(address, "resync", shared.own("t"), database=None, sid=None)
        assert caught.value.remedy is not None
        return caught.value.remedy

    shared.target.execute("alter table t add constraint few check (v <> 2)")
    count_up(shared.source, 1, 3)

    async def is_quarantined() -> bool:
        return int((await shared.table("t"))["quarantined"]) > 0

    await shared.eventually(is_quarantined)
    shared.target.execute("alter table t drop constraint few")
    await shared.ask("resync")
    assert await is_quarantined()
    await operator.follow(await refused(), choose=0)
    await shared.caught_up()
    assert versions(shared.target) == [0, 1, 2, 3]
    await shared.ask("resync")
    await shared.caught_up()
    assert versions(shared.target) == [0, 1, 2, 3]

    shared.target.execute("alter table t add constraint few check (v <> 4)")
    count_up(shared.source, 4, 5)
    await shared.eventually(is_quarantined)
    shared.target.execute("alter table t drop constraint few")
    await operator.follow(await refused(), choose=1)
    await shared.caught_up()
    assert versions(shared.target) == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("by", ["start", "reload"])
async def test_another_filter_costs_no_version(
    source: Database, target: Database, stream: MakeStreamer, by: str
) -> None:
    source.execute(KEYED)
    async with stream('t: {type: history, filter: "v >= 0"}') as streamer:
        await streamer.caught_up()
        if by == "start":
            await streamer.stop()
        with held_back(target):
            count_up(source, 1, 9)
            write_config(streamer.path, source, target, 't: {type: history, filter: "v > -1"}')
            if by == "reload":
                applying = asyncio.create_task(streamer.apply())
            else:
                streamer.settings, streamer.mapping = static_mapping.load(streamer.path)
                streamer.start()
            count_up(source, 10, 12)
        if by == "reload":
            await applying
        await streamer.caught_up()
        assert versions(target) == list(range(13))


@pytest.mark.follows("copy.finish_copies:_with_resume")
@pytest.mark.parametrize("by", ["start", "resume"])
async def test_a_failed_copy_for_another_filter_is_made_by_the_next_try(
    source: Database, target: Database, stream: MakeStreamer, by: str
) -> None:
    source.execute(f"{KEYED} insert into t values (3, -5)")
    async with stream('t: {type: history, filter: "v >= 0"}') as streamer:
        await streamer.caught_up()
        await streamer.stop()
        target.execute("alter table t add constraint few check (v >= 0)")
        write_config(streamer.path, source, target, 't: {type: history, filter: "v > -9"}')
        streamer.settings, streamer.mapping = static_mapping.load(streamer.path)
        streamer.start()
        error = "select error from streamer.relation"
        await until(lambda: "existing rows are unchanged" in str(target.value(error)))
        assert (await streamer.table("public.t"))["state"] == "ready"
        target.execute("alter table t drop constraint few")
        if by == "resume":
            remedy = Remedy.from_json(target.value("select error_remedy from streamer.relation"))
            assert remedy is not None
            resume = next(n for n, step in enumerate(remedy.steps) if step in remedy.commands)
            await Operator(streamer.path, source, target).follow(remedy, choose=resume)
        else:
            await streamer.stop()
            streamer.start()
        await until(lambda: versions(target, 3) == [-5])
        await until(lambda: target.value(error) is None)
        assert target.value("select not copy_is_due from streamer.relation")


@streams(
    "t: {type: history}",
    source="create table t (id int, v int); alter table t replica identity nothing;"
    " insert into t values (1, 0)",
)
async def test_an_identity_that_comes_costs_no_inserted_version(shared: Shared) -> None:
    await shared.caught_up()
    with held_back(shared.target):
        shared.source.execute("insert into t values (2, 1); delete from t where id = 2")
        shared.source.execute("alter table t replica identity full")

        async def is_copied() -> bool:
            return bool((await shared.table("t"))["state"] != "ready")

        await shared.eventually(is_copied)
    await shared.caught_up()
    rows = shared.target.execute("select id, v, kvsz_deleted from t order by 1")
    assert rows == [(1, 0, False), (2, 1, True)]


async def test_the_remedy_for_a_lost_slot_copies_a_history_with_a_gap(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(KEYED)
    async with stream("t: {type: history}") as streamer:
        await streamer.caught_up()
        await streamer.stop()
        source.execute("select pg_drop_replication_slot('streamer_shop')")
        count_up(source, 1, 3)
        streamer.start()
        await streamer.source_state("error")
        remedy = "streamer resync '*.*' --database shop --skip-changes"
        assert remedy in str((await streamer.status())["error"])
        address = TargetAddress.parse(Secret(target.url))
        # Without consent, the source stays stopped, and says what to do again.
        await request(address, "resync", "*.*", database="shop", sid=None)
        await streamer.stop()
        streamer.start()
        await streamer.source_state("error")
        assert remedy in str((await streamer.status())["error"])
        options = {"skip_changes": True}
        await request(address, "resync", "*.*", database="shop", sid=None, options=options)
        await streamer.caught_up()
        assert versions(target) == [0, 3]
