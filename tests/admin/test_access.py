"""The role that each route of the API needs, also for future routes."""

from typing import Any

import httpx
import pytest

from streamer.admin.service.access import FAILURES_MAX
from streamer.errors.error_classes import SettingsError
from tests.support.admin import TOKEN, VIEWER_TOKEN, Admin, OpenAdmin, quick_hash

USERS = f"""
admin:
  users:
  - {{name: alice, password_hash: "{quick_hash("alice's password")}", role: admin}}
  - {{name: victor, password_hash: "{quick_hash("victor's password")}"}}
"""
OPEN = {("post", "/api/login")}


async def routes(admin: Admin) -> list[tuple[str, str]]:
    """Return every method and path of the OpenAPI document, numbers filled in."""
    async with admin.client(None) as client:
        paths = (await client.get("/api/openapi.json")).json()["paths"]
    found = [(method, path) for path, methods in paths.items() for method in methods]
    assert ("delete", "/api/tables/{number}") in found
    return [(m, p.replace("{number}", "1")) for m, p in found if (m, p) not in OPEN]


async def answer(client: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    body: Any = {} if method in ("post", "put", "patch") else None
    return await client.request(method, path, json=body)


async def assert_refused(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await answer(client, method, path)
    assert response.status_code == status, (method, path, response.text)
    assert set(response.json()["error"]) == {"code", "message", "hint", "runbook"}


async def test_without_or_with_a_wrong_token_nothing_is_answered(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin:
        for method, path in await routes(admin):
            async with admin.client(None) as client:
                await assert_refused(client, method, path, 401)
            async with admin.client("wrong") as client:
                response = await answer(client, method, path)
                assert response.status_code in (401, 429), (method, path)


async def test_a_viewer_changes_nothing(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin:
        before = await admin.service.store.content()
        for method, path in await routes(admin):
            if method == "get" or path == "/api/logout":
                continue
            async with admin.client(VIEWER_TOKEN) as client:
                await assert_refused(client, method, path, 403)
        async with admin.client(VIEWER_TOKEN) as client:
            assert (await client.get("/api/databases")).status_code == 200
        assert await admin.service.store.content() == before
        assert admin.engine.applied == []


ACTS = ("/resync", "/pause", "/resume", "/retry", "/drop", "/purge", "/restart")
"""The ends of paths that act on tables, and edit no mapping."""


async def test_static_mode_refuses_edits_of_the_mapping(open_admin: OpenAdmin) -> None:
    sources = """
sources:
- {database: shop, urls: [{url: "postgresql://u:hidden@h/shop", sid: eu}], tables: {"log.*": {type: append}}}
"""
    async with open_admin(sources=sources) as admin, admin.client() as client:
        for method, path in await routes(admin):
            if method == "get" or path in ("/api/logout", "/api/discover"):
                continue
            if path.endswith(ACTS):
                refused = await answer(client, method, path)
                assert refused.json()["error"]["code"] != "read_only", (path, refused.text)
            else:
                await assert_refused(client, method, path, 409)
        refused = await client.post("/api/databases", json={})
        assert "edit the file and send SIGHUP" in refused.json()["error"]["hint"]
        missing = await client.get("/api/sources/history?database=none")
        assert "apply" not in missing.text
        (url,) = (await client.get("/api/urls")).json()["items"]
        assert url["url"] == "postgresql://u:***@h/shop"
        (table,) = (await client.get("/api/tables")).json()["items"]
        assert (table["schema"], table["name"], table["type"]) == ("log", "*", "append")


async def test_static_mode_shows_variables_as_they_are_written(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "unseen")
    urls = {
        "eu": "postgresql://u:${SHOP_PASSWORD}@h/shop",
        "us": "${ABSENT_URL}",
        "br": "postgresql://u:${ABSENT}@h/shop",
        "lit": "postgresql://u:p$${x}@h/shop",
    }
    listed = ", ".join(f'{{url: "{url}", sid: {sid}}}' for sid, url in urls.items())
    rule = """{filter: "v <> '$${x}'"}"""
    sources = f"\nsources:\n- {{database: shop, urls: [{listed}], tables: {{t: {rule}}}}}\n"
    async with open_admin(sources=sources) as admin, admin.client() as client:
        rows = (await client.get("/api/urls")).json()["items"]
        shown = {row["sid"]: row["url"] for row in rows}
        assert shown == urls | {"lit": "postgresql://u:***@h/shop"}
        exported = (await client.get("/api/export")).text
        page = (await client.get("/mapping")).text
    for url in [url for sid, url in urls.items() if sid != "lit"]:
        assert f"url: {url}\n" in exported
    assert "v <> '$${x}'" in exported
    assert "$${ABSENT" not in exported + page
    assert "unseen" not in exported + page


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": ""},
        {"Host": "["},
    ],
    ids=lambda headers: headers["Host"],
)
async def test_without_credentials_no_other_name_is_answered(
    open_admin: OpenAdmin, headers: dict[str, str]
) -> None:
    async with open_admin("") as admin:
        for method, path in [*await routes(admin), ("post", "/api/login")]:
            async with admin.client(None, headers=headers) as client:
                await assert_refused(client, method, path, 403)
        async with admin.client(None, headers=headers) as client:
            for path in ("/metrics", "/readyz", "/", "/login", "/help"):
                assert (await client.get(path)).status_code == 403, path
            assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
async def test_without_credentials_no_other_site_changes_anything(
    open_admin: OpenAdmin, headers: dict[str, str]
) -> None:
    async with open_admin("") as admin:
        async with admin.client(None, headers=headers) as client:
            await assert_refused(client, "post", "/api/databases", 403)
        async with admin.client(None, headers={"Origin": "http://127.0.0.1:8000"}) as client:
            assert (await client.post("/api/databases", json={"name": "x"})).status_code == 201


async def test_a_body_that_is_not_json_is_not_read_as_json(open_admin: OpenAdmin) -> None:
    """A form of a foreign site could send this type without a preflight request."""
    async with open_admin("") as admin, admin.client(None) as client:
        response = await client.post(
            "/api/databases", content='{"name": "x"}', headers={"Content-Type": "text/plain"}
        )
        assert response.status_code == 422


async def test_a_session_changes_only_with_its_csrf_token(open_admin: OpenAdmin) -> None:
    async with open_admin(USERS) as admin, admin.client(None) as client:
        login = {"name": "alice", "password": "alice's password"}
        answered = await client.post("/api/login", json=login)
        assert answered.status_code == 200
        cookie = next(
            c for c in answered.headers.get_list("set-cookie") if c.startswith("streamer_session")
        )
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Secure" not in cookie
        assert (await client.get("/api/session")).json()["name"] == "alice"

        body = {"name": "shop"}
        assert (await client.post("/api/databases", json=body)).status_code == 403
        wrong = {"X-CSRF-Token": "wrong"}
        assert (await client.post("/api/databases", json=body, headers=wrong)).status_code == 403
        right = {"X-CSRF-Token": answered.json()["csrf"]}
        elsewhere = right | {"Origin": "http://evil.example"}
        assert (
            await client.post("/api/databases", json=body, headers=elsewhere)
        ).status_code == 403
        assert (await client.post("/api/databases", json=body, headers=right)).status_code == 201

        assert (await client.post("/api/logout", headers=right)).status_code == 204
        client.cookies.set("streamer_session", cookie.split("=", 1)[1].split(";")[0])
        assert (await client.get("/api/session")).status_code == 401


async def test_a_cookie_is_secure_behind_tls(open_admin: OpenAdmin) -> None:
    async with (
        open_admin(USERS) as admin,
        admin.client(None, base_url="https://streamer.example") as client,
    ):
        login = {"name": "victor", "password": "victor's password"}
        answered = await client.post("/api/login", json=login)
        assert all("Secure" in cookie for cookie in answered.headers.get_list("set-cookie"))
        assert answered.json()["role"] == "viewer"
        right = {"X-CSRF-Token": answered.json()["csrf"]}
        await assert_refused(client, "post", "/api/apply", 403)
        response = await client.post("/api/apply", json={}, headers=right)
        assert response.json()["error"]["code"] == "forbidden"


async def test_guessing_is_throttled(open_admin: OpenAdmin) -> None:
    async with open_admin(USERS) as admin, admin.client(None) as client:
        for _ in range(FAILURES_MAX):
            guess = {"name": "alice", "password": "guess"}
            assert (await client.post("/api/login", json=guess)).status_code == 401
        login = {"name": "alice", "password": "alice's password"}
        answered = await client.post("/api/login", json=login)
        assert answered.status_code == 429
        assert int(answered.headers["retry-after"]) > 0


async def test_a_right_token_is_taken_whoever_guesses_beside_it(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin:
        statuses = []
        async with admin.client("guess") as client:
            for _ in range(FAILURES_MAX + 1):
                statuses += [(await client.get("/api/databases")).status_code]
        assert statuses == [401] * FAILURES_MAX + [429]
        async with admin.client(TOKEN) as client:
            assert (await client.get("/api/databases")).status_code == 200


async def test_an_invalid_password_hash_is_refused_at_the_start(open_admin: OpenAdmin) -> None:
    with pytest.raises(SettingsError, match="hash-password") as error:
        async with open_admin("admin: {users: [{name: a, password_hash: hunter2}]}"):
            pass
    assert "hunter2" not in str(error.value)


async def test_answers_have_security_headers_for_browsers(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        for path in ("/api/databases", "/healthz", "/api/nothing"):
            headers = (await client.get(path, headers={"Origin": "http://evil.example"})).headers
            assert (
                headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
            )
            assert headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers
