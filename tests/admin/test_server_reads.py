"""However many requests come, few reads reach a server."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from streamer.admin.service import admin_service, server_reads
from streamer.admin.service.server_reads import AT_ONCE, ServerReads
from tests.support.admin import VIEWER_TOKEN, OpenAdmin
from tests.support.postgres import Database

READERS = (
    "read_report",
    "make_plan",
    "read_source",
    "read_audited",
    "read_table_pair",
    "read_rows",
)
PATHS = ("status", "plan", "discover?url_id=1", "audit", "quarantine", "conflicts", "tenants")


class Counted:
    """A function that counts its running calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.calls = self.running = self.most = 0

    async def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._function(*arguments, **options)
        finally:
            self.running -= 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counted]:
    monkeypatch.setattr(server_reads, "KEEP_SECONDS", 60.0)
    made = {name: Counted(getattr(admin_service, name)) for name in READERS}
    for name, function in made.items():
        monkeypatch.setattr(admin_service, name, function)
    return made


async def test_many_requests_of_a_reader_share_their_reads(
    open_admin: OpenAdmin,
    source: Database,
    target: Database,
    counted: dict[str, Counted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ServerReads.get, "__defaults__", (60.0,))  # a busy machine is slow
    source.execute("create table t (id int primary key)")
    async with open_admin(target=target.url) as admin, admin.client() as client:
        await client.post("/api/databases", json={"name": "shop"})
        await client.post("/api/urls", json={"database_id": 1, "url": source.url})
        await client.post("/api/tables", json={"database_id": 1, "name": "t"})
        async with admin.client(VIEWER_TOKEN) as viewer:
            for path in PATHS:
                asked = (viewer.get(f"/api/{path}") for _ in range(50))
                answers = await asyncio.gather(*asked)
                assert {answer.status_code for answer in answers} == {200}, path
        assert {name: one.calls for name, one in counted.items() if one.calls > 1} == {}
        # A change lets the next request read again; a refused change does not.
        async with admin.client(VIEWER_TOKEN) as viewer:
            assert (await viewer.delete("/api/tables/1")).status_code == 403
            await viewer.get("/api/status")
            assert counted["read_report"].calls == 1
            await client.delete("/api/tables/1")
            await viewer.get("/api/status")
            assert counted["read_report"].calls == 2


async def test_reads_of_one_server_wait_for_each_other_and_for_no_other() -> None:
    reads, gate = ServerReads(), asyncio.Event()
    waiting = Counted(gate.wait)
    first = [asyncio.create_task(reads.get(n, "slow", waiting)) for n in range(9)]
    gate_of_other = asyncio.Event()
    gate_of_other.set()
    other = Counted(gate_of_other.wait)
    assert await reads.get("other", "quick", other)
    assert waiting.most == AT_ONCE
    first[0].cancel()
    gate.set()
    await asyncio.wait(first)
    assert (waiting.most, waiting.calls) == (AT_ONCE, 9), "also the read without a request"


async def test_a_failure_is_shared_and_not_kept() -> None:
    reads = ServerReads()

    async def fail() -> None:
        raise ValueError("no")

    failing = Counted(fail)
    results = await asyncio.gather(
        *(reads.get("key", "server", failing) for _ in range(9)), return_exceptions=True
    )
    assert {str(result) for result in results} == {"no"}
    with pytest.raises(ValueError, match="no"):
        await reads.get("key", "server", failing)
    assert failing.calls == 2
