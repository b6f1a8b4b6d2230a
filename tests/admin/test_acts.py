"""The acts of the page on tables need no mapping database: the target stores the requests."""

import asyncio
import contextlib
from typing import Any

import httpx
import psycopg
import pytest

from streamer.admin.service import repair_tables
from streamer.errors.remedies import BlockingSession
from streamer.postgres.blocking_sessions import Blockers
from tests.admin.test_page import USERS, log_in
from tests.support.admin import Admin, OpenAdmin
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until

FORM = {"database": "shop", "name": "public.t"}


async def press(client: httpx.AsyncClient, to: str, **fields: str) -> httpx.Response:
    return await client.post(to, data=FORM | fields)


def sources(source: Database) -> str:
    return f'sources: [{{database: shop, urls: [{{url: "{source.url}"}}], tables: {{t: }}}}]'


@pytest.mark.usefixtures("without_spark")
async def test_a_file_as_mapping_refuses_no_act_on_a_table(
    open_admin: OpenAdmin, stream: MakeStreamer, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, v text)")
    async with (
        stream("t: {initial: none}") as streamer,
        open_admin(target=target.url, sources=sources(source), is_alone=False) as admin,
        admin.client() as client,
    ):
        await streamer.caught_up()
        for action, state in (("pause", "paused"), ("resume", "ready")):
            assert (await press(client, "/table/act", action=action)).status_code == 303
            await streamer.table_state("public.t", state)
        assert (await press(client, "/settings", on_error="stop")).status_code == 409

        # A repair compares, copies the rows that differ, and compares again.
        source.execute("insert into t values (1, 'one'), (2, 'two')")
        await streamer.caught_up()
        target.execute("update t set v = 'wrong' where id = 2")
        assert (await press(client, "/table/act", action="repair")).status_code == 303
        await streamer.eventually(lambda: is_repaired(admin))
        assert_same(source, target, "t")

        # A source restarts, from the page and from the API.
        restarted = {"database": "shop"}
        assert (await client.post("/source/restart", data=restarted)).status_code == 303
        answer = await client.post("/api/sources/restart", json=restarted)
        assert answer.status_code == 202
        unknown = await client.post("/api/sources/restart", json={"database": "shopp"})
        assert unknown.status_code == 404

        async def is_restarted() -> bool:
            sql = "select state from streamer.request where action = 'restart' order by id"
            return target.execute(sql) == [("done",)] * 2

        await streamer.eventually(is_restarted)
        assert "Restart this source" in (await client.get("/source", params=restarted)).text

        # A session that blocks no session of streamer stays, and the session with the lock ends.
        # So does a session that blocked the last attempt, while its transaction lasts.
        with (
            contextlib.closing(psycopg.connect(target.url)) as former,
            contextlib.closing(psycopg.connect(target.url)) as other,
            contextlib.closing(psycopg.connect(target.url)) as holder,
        ):
            former.execute("select 1")
            await streamer.eventually(lambda: ends_by_report(client, target, former))
            with pytest.raises(psycopg.OperationalError):
                former.execute("select 1")
            holder.execute("lock table t in access exclusive mode")
            source.execute("insert into t values (3, 'three')")
            await streamer.eventually(lambda: is_ended(client, holder.info.backend_pid))
            refused = await press(client, "/session/end", pid=str(other.info.backend_pid))
            assert refused.status_code == 409
            assert "blocks no session of streamer" in refused.text
            await streamer.caught_up()
            assert not await ends_by_report(client, target, other, "0/1")
            other.execute("select 1")
        assert_same(source, target, "t")


async def test_a_faulty_form_ends_no_session(open_admin: OpenAdmin, source: Database) -> None:
    async with open_admin(sources=sources(source)) as admin, admin.client() as client:
        assert (await press(client, "/session/end", pid="1", name="a.b.c")).status_code == 422
        assert (await press(client, "/session/end", pid="1")).status_code == 503  # no target


async def test_repairs_run_one_by_one_and_a_defect_is_a_failure(
    open_admin: OpenAdmin,
    stream: MakeStreamer,
    source: Database,
    target: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key); create table u (id int primary key)")
    ends = asyncio.Event()

    async def broken(*arguments: object, **options: object) -> None:
        await ends.wait()
        raise ValueError("secret of the driver")

    monkeypatch.setattr(repair_tables, "repair", broken)
    async with (
        stream("{t: {initial: none}, u: {initial: none}}") as streamer,
        open_admin(target=target.url, sources=sources(source), is_alone=False) as admin,
        admin.client() as client,
    ):
        await streamer.caught_up()
        refused = await press(client, "/table/act", action="repair", name="public.x")
        assert refused.status_code == 404
        for name in ("public.t", "public.u"):
            pressed = await press(client, "/table/act", action="repair", name=name)
            assert pressed.status_code == 303
        first, second = [("shop", None, name) for name in ("public.t", "public.u")]
        repairs = admin.service.repairs
        await until(lambda: repairs.state(first) == "running")
        assert repairs.state(second) == "waiting"
        page = await client.get("/table", params={"database": "shop", "name": "public.u"})
        assert "A repair waits for the repair of another table" in page.text
        ends.set()
        await until(lambda: repairs.state(first) is None and repairs.state(second) is None)
        for key in (first, second):
            assert repairs.failure(key) == f"internal error in the repair of {key[2]}: ValueError"


async def is_repaired(admin: Admin) -> bool:
    key = ("shop", None, "public.t")
    assert admin.service.repairs.failure(key) is None
    return admin.service.repairs.state(key) is None


async def is_ended(client: httpx.AsyncClient, pid: int) -> bool:
    """Press the button of a session, which has an effect once streamer waits for the session."""
    return (await client.post("/session/end", data={"pid": str(pid)})).status_code == 303


async def ends_by_report(
    client: httpx.AsyncClient,
    target: Database,
    session: psycopg.Connection[Any],
    transaction: str | None = None,
) -> bool:
    """Press the button of a session that blocked the last attempt, as the stored wait says.

    A report of streamer may remove the stored wait before the act reads the wait.
    """
    pid = session.info.backend_pid
    if transaction is None:
        sql = f"select virtualtransaction from pg_locks where pid = {pid}"
        transaction = str(target.value(sql))
    wait = Blockers(f"pid {pid}", (BlockingSession(pid, transaction),)).wait_for("public.t")
    stored = wait.stored.replace("'", "''")
    target.execute(f"update streamer.relation set waiting_for = 'a lock', wait = '{stored}'")
    return await is_ended(client, pid)


async def test_acts_need_the_role_admin_and_a_form_of_the_session(
    open_admin: OpenAdmin, source: Database
) -> None:
    acts = (
        ("/table/act", {"action": "pause"}),
        ("/table/act", {"action": "repair"}),
        ("/table/quarantine", {"action": "drop", "which": "all"}),
        ("/sources/act", {"action": "resync", "pick": "shop"}),
        ("/session/end", {"pid": "1"}),
    )
    async with open_admin(USERS, sources=sources(source)) as admin:
        for name in ("victor", "alice"):
            async with admin.client(None) as client:
                csrf = await log_in(client, name)
                form = FORM | {"csrf": csrf if name == "victor" else "wrong"}
                for path, fields in acts:
                    assert (await client.post(path, data=form | fields)).status_code == 403, path
                for path in ("/", "/table?database=shop&name=public.t", "/quarantine"):
                    page = (await client.get(path)).text
                    has_forms = 'action="/session' in page or 'action="/table' in page
                    assert not (has_forms and name == "victor"), path
