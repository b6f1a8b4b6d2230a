"""The API answers every request, and never with 500. FUZZ_EXAMPLES sets the number of requests."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from streamer.commands.demo.embedded_servers import free_port
from streamer.observability.http_server import listen, serving
from tests.support.admin import CREDENTIALS, TOKEN, admin
from tests.support.postgres import Database

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5"))
ENDLESS = {"/api/events"}
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def address(tmp_path: Path, target: Database) -> Iterator[str]:
    """The API on a real server, in a thread with a separate loop."""
    address = f"127.0.0.1:{free_port()}"
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with (
            admin(tmp_path, CREDENTIALS, target=target.url, is_alone=False) as opened,
            serving(listen(address), opened.app),
        ):
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert started.wait(30)
        yield f"http://{address}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_no_request_is_answered_with_500(address: str) -> None:
    # Each process of the suite imports each module of tests, and this library takes 0.4 s.
    import schemathesis
    from schemathesis.checks import not_a_server_error

    with httpx.Client(base_url=address, headers=HEADERS, timeout=60) as client:
        for path, body in (
            ("databases", {"name": "shop"}),
            ("urls", {"database_id": 1, "url": "postgresql://u:hidden@127.0.0.1:1/shop"}),
            ("tables", {"database_id": 1, "name": "t"}),
        ):
            assert client.post(f"/api/{path}", json=body).status_code == 201
    schema = schemathesis.openapi.from_url(f"{address}/api/openapi.json")
    tried = set()
    results: Iterable[Any] = schema.get_all_operations()
    for result in results:
        operation = result.ok()
        if operation.path in ENDLESS:
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def attempt(case: Any) -> None:
            response = case.call(headers=HEADERS, timeout=60)
            case.validate_response(response, checks=[not_a_server_error])
            assert "hidden" not in response.text

        attempt()
        tried.add(operation.label)
    assert len(tried) > 35


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"name": "\\ud800"}', b'{"name": NaN}', b'{"name": 1e999}', b"null", b'"x"', b'{"name": "a", "name": "\\u0000"}'],
    ids=range(10),
)  # fmt: skip
async def test_no_body_is_answered_with_500(tmp_path: Path, content: bytes) -> None:
    async with admin(tmp_path) as opened, opened.client() as client:
        for path in ("/api/databases", "/api/import", "/api/apply", "/api/login"):
            headers = {"Content-Type": "application/json"}
            response = await client.post(path, content=content, headers=headers)
            assert response.status_code < 500, (path, response.text)
            assert path == "/api/apply" or set(response.json()["error"]) == {
                "code",
                "message",
                "hint",
                "runbook",
            }


@pytest.mark.parametrize("path", ["/api/login", "/login", "/api/import"])
@pytest.mark.parametrize("token", [None, "a-wrong-token"])
@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_without_a_login_is_small(
    tmp_path: Path, path: str, token: str | None, is_announced: bool
) -> None:
    async def body() -> AsyncIterator[bytes]:
        while True:
            sent.append(1000)
            yield b"name=" + b"x" * 995

    sent: list[int] = []
    headers = {"Content-Length": "8000000"} if is_announced else {}
    headers["Content-Type"] = "application/x-www-form-urlencoded"
    if path.startswith("/api"):
        headers["Content-Type"] = "application/json"
    async with admin(tmp_path) as opened, opened.client(token) as client:
        response = await client.post(path, content=body(), headers=headers)
    assert response.status_code == (401 if path == "/api/import" else 413)
    assert sum(sent) <= 2000 if is_announced or path == "/api/import" else sum(sent) <= 18_000


async def test_more_than_there_is_room_for_is_refused(tmp_path: Path) -> None:
    async with admin(tmp_path) as opened, opened.client() as client:
        response = await client.post("/api/import", json={"yaml": "x" * 9_000_000})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "too_large"
