"""Operators' acts are in the audit with actor and time, and refused logins in the log."""

import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog

from streamer.admin.mapping.admin_store import Query, open_store
from streamer.admin.mapping.keyring import Keyring
from streamer.admin.service.access import FAILURES_MAX
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import migrate
from streamer.bookkeeping.requests import KEPT_DAYS, begin_act, read_audited
from streamer.commands.quarantined_rows import Choice, request_action
from streamer.commands.table_requests import command_actor, request
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.admin import OpenAdmin
from tests.support.postgres import Database
from tests.support.process import command


async def test_acts_of_page_api_and_command_line_are_in_one_audit(
    open_admin: OpenAdmin, target: Database
) -> None:
    address = TargetAddress.parse(Secret(target.url))
    bookkeeping = Bookkeeping(address)
    await migrate(bookkeeping)
    await bookkeeping.close()
    target.execute(
        "insert into streamer.source (database, sid, slot, publication)"
        " values ('shop', 'eu', 's', 'p');"
        "insert into streamer.relation (source_id, source, target, type, state, attempt)"
        " values (1, 'public.t', 'public.t', 'clone', 'ready', 1)"
    )
    async with open_admin(target=target.url, is_alone=False) as admin, admin.client() as client:
        await client.post("/api/databases", json={"name": "shop"})
        await client.post("/api/tables", json={"database_id": 1, "name": "t"})
        assert (await client.post("/api/tables/1/pause")).status_code == 202
        form = {"database": "shop", "sid": "eu", "name": "public.t", "action": "resume"}
        assert (await client.post("/table/act", data=form)).status_code == 303
        await request(address, "resync", "t", database=None, sid=None)
        target.execute(
            "insert into streamer.quarantine"
            " (relation_id, operation, definition, lsn, commit_time, xid, error)"
            " values (1, 'insert', '{}', '0/1', now(), 1, 'refused')"
        )
        await request_action(address, "retry", Choice("t"))

        answer = (await client.get("/api/audit")).json()
        acts = [entry for entry in answer["items"] if entry["label"] == "shop:eu public.t"]
        assert [(entry["actor"], entry["action"]) for entry in acts] == [
            (command_actor(), "quarantine retry"),
            (command_actor(), "resync"),
            ("token", "resume"),
            ("token", "pause"),
        ]
        assert answer["items"] == sorted(answer["items"], key=lambda e: e["at"], reverse=True)
        second = (await client.get("/api/audit?page=2&per_page=2")).json()
        assert second["items"] == answer["items"][2:4]
        assert "quarantine retry" in (await client.get("/history")).text


async def test_refused_tokens_and_logins_are_logged_with_address_and_user(
    open_admin: OpenAdmin,
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with open_admin() as admin, admin.client(token=None) as client:
            for _ in range(FAILURES_MAX - 1):
                body = {"name": "eve", "password": "wrong-password"}
                assert (await client.post("/api/login", json=body)).status_code == 401
            wrong = {"Authorization": "Bearer wrong-token"}
            assert (await client.get("/api/status", headers=wrong)).status_code == 401
            assert (await client.get("/api/status", headers=wrong)).status_code == 429
    events = [(e["event"], e.get("address"), e.get("user")) for e in logs]
    assert events.count(("a login failed", "127.0.0.1", "eve")) == FAILURES_MAX - 1
    assert ("refused a request with a wrong token", "127.0.0.1", None) in events
    (throttled,) = [e for e in logs if e["event"].startswith("too many")]
    assert throttled["throttled"] == "address 127.0.0.1"
    assert "wrong-password" not in str(logs)
    assert "wrong-token" not in str(logs)


@pytest.mark.parametrize("at", ["a write", "a start"])
async def test_both_audits_drop_rows_by_age(target: Database, tmp_path: Path, at: str) -> None:
    too_old = datetime.now(UTC) - timedelta(days=KEPT_DAYS, minutes=1)
    young = too_old + timedelta(hours=1)
    path, keyring = tmp_path / "mapping.sqlite", Keyring.temporary()
    bookkeeping = Bookkeeping(TargetAddress.parse(Secret(target.url)))
    admin = await open_store(path, keyring)
    await migrate(bookkeeping)
    target.execute(
        "insert into streamer.request (requested_at, actor, action, label, state) values"
        f" ('{too_old}', 'eve', 'resync', 'old', 'done'),"
        f" ('{young}', 'eve', 'resync', 'young', 'failed')"
    )
    with sqlite3.connect(path) as connection:
        connection.executemany(
            "insert into audit (at, actor, action, object, label)"
            " values (?, 'eve', 'create', 'table', ?)",
            [(too_old.isoformat(), "old"), (young.isoformat(), "young")],
        )
    if at == "a write":
        await begin_act(bookkeeping, "eve", "build index", "new")
        await admin.write_teardown("eve", ["new"])
    else:
        await admin.close()
        await migrate(bookkeeping)
        admin = await open_store(path, keyring)
        await admin.prune_audit()  # as the server does when it starts
    async with bookkeeping.connection() as connection_to_target:
        acts, _ = await read_audited(connection_to_target, 10)
    entries, _ = await admin.audit(Query())
    await bookkeeping.close()
    await admin.close()
    kept = ["new", "young"] if at == "a write" else ["young"]
    assert [act.label for act in acts] == kept
    assert [entry["label"] for entry in entries] == kept


def test_a_teardown_is_in_the_audit_that_outlives_it(
    source: Database, target: Database, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f'target: {{url: "{target.url}"}}\nmapping_database: {tmp_path / "mapping.sqlite"}\n'
    )
    for arguments in (
        ("sources", "add", "shop", source.url),
        ("tables", "add", "shop", "t"),
        ("apply", "--force"),
        ("teardown", "--yes"),
    ):
        done = command(config, *arguments)
        assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "mapping.sqlite") as connection:
        newest = connection.execute(
            "select actor, action, object, label from audit order by id desc limit 1"
        ).fetchone()
    assert newest == (command_actor(), "teardown", "source", "shop")
