"""Operators' acts are in the audit with actor and time, and refused logins in the log."""

import structlog

from streamer.admin.access import FAILURES_MAX
from streamer.commands.quarantine import Choice, ask
from streamer.commands.requests import command_actor, request
from streamer.mapping.rules import Secret
from streamer.progress.store import Store
from streamer.target.connection import TargetAddress
from tests.support.admin import OpenAdmin
from tests.support.postgres import Database


async def test_acts_of_page_api_and_command_line_are_in_one_audit(
    open_admin: OpenAdmin, target: Database
) -> None:
    address = TargetAddress.parse(Secret(target.url))
    store = Store(address)
    await store.migrate()
    await store.close()
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
        await ask(address, "retry", Choice("t"))

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
    assert ("a request with a wrong token was refused", "127.0.0.1", None) in events
    (throttled,) = [e for e in logs if e["event"].startswith("too many")]
    assert throttled["throttled"] == "address 127.0.0.1"
    assert "wrong-password" not in str(logs)
    assert "wrong-token" not in str(logs)
