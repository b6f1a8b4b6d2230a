"""The page over HTTP: roles, contents, escaping. tests/browser has a browser."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from streamer.admin.live import status_reader
from streamer.admin.live.events import PAST_MAX
from streamer.admin.live.table_activity import ChangeActivity
from streamer.admin.page import add_source_page
from streamer.admin.service.access import FAILURES_MAX, SAFE_METHODS
from streamer.commands.quarantined_rows import Choice
from streamer.errors.error_classes import InvalidError, TableGoneError
from streamer.errors.remedies import Remedy, run
from tests.support.admin import TARGET, TOKEN, VIEWER_TOKEN, Admin, OpenAdmin, quick_hash

USERS = f"""
admin:
  users:
  - {{name: alice, password_hash: "{quick_hash("alice's password")}", role: admin}}
  - {{name: victor, password_hash: "{quick_hash("victor's password")}"}}
"""
HOSTILE = "<script>alert(1)</script>\"'&{{7007*9001}}"
"""Text that must reach a page as text."""


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Return every method and path of *app* with numbers filled in, so that a test forgets none."""
    found: list[tuple[str, str]] = []
    for route in app.routes:
        assert isinstance(route, Route), route
        path = route.path.replace("{number}", "1").replace("{name}", "page.css")
        found += [(method, path) for method in route.methods or () if method != "HEAD"]
    assert {("POST", "/apply"), ("POST", "/api/apply"), ("GET", "/plan")} <= set(found)
    return found


OPEN = {
    "/login", "/api/login", "/api/openapi.json", "/static/page.css", "/metrics", "/healthz", "/readyz",
}  # fmt: skip
"""Pages for every visitor."""
OWN = {"/logout", "/api/logout"}
"""A viewer's changes."""


async def state(admin: Admin) -> tuple[Any, Any]:
    return await admin.service.store.content(), list(admin.engine.applied)


async def log_in(client: httpx.AsyncClient, name: str) -> str:
    """Begin a session; return the token that forms of it carry."""
    answer = await client.post("/login", data={"name": name, "password": f"{name}'s password"})
    assert answer.status_code == 303, answer.text
    return client.cookies["streamer_csrf"]


async def test_every_change_is_refused_without_and_with_wrong_credentials(
    open_admin: OpenAdmin,
) -> None:
    async with open_admin(USERS) as admin:
        before = await state(admin)
        for method, path in routes(admin.app):
            if path in OPEN:
                continue
            async with admin.client(None) as client:
                answer = await client.request(method, path, data={"csrf": ""})
                if method in SAFE_METHODS and not path.startswith("/api"):
                    assert answer.status_code == 303, (method, path)
                    assert answer.headers["location"].startswith("/login")
                else:
                    assert answer.status_code == 401, (method, path, answer.text)
            async with admin.client(None, cookies={"streamer_session": "wrong"}) as client:
                answer = await client.request(method, path, data={"csrf": "wrong"})
                assert answer.status_code in (303, 401), (method, path)
                assert answer.headers.get("location", "/login").startswith("/login")
            async with admin.client("wrong") as client:
                answer = await client.request(method, path)
                assert answer.status_code in (401, 429), (method, path)
        assert await state(admin) == before


@pytest.mark.parametrize("who", ["session", "token"])
async def test_a_viewer_changes_nothing(open_admin: OpenAdmin, who: str) -> None:
    settings = USERS + f"  viewer_token: {VIEWER_TOKEN}\n"
    async with open_admin(settings) as admin:
        before = await state(admin)
        async with admin.client(VIEWER_TOKEN if who == "token" else None) as client:
            csrf = "" if who == "token" else await log_in(client, "victor")
            for method, path in routes(admin.app):
                if method in SAFE_METHODS or path in OPEN | OWN:
                    continue
                answer = await client.request(
                    method, path, data={"csrf": csrf}, headers={"X-CSRF-Token": csrf}
                )
                assert answer.status_code == 403, (method, path, answer.text)
            page = await client.get("/mapping")
            assert page.status_code == 200
            assert "<form" not in page.text.replace('<form method="post" action="/logout">', "")
        assert await state(admin) == before


@pytest.mark.parametrize("csrf", [None, "wrong"])
async def test_a_form_carries_the_token_of_its_session(
    open_admin: OpenAdmin, csrf: str | None
) -> None:
    for settings in (USERS, ""):
        async with open_admin(settings) as admin, admin.client(None) as client:
            if settings:
                await log_in(client, "alice")
            before = await state(admin)
            for method, path in routes(admin.app):
                if method in SAFE_METHODS or path in OPEN or path.startswith("/api"):
                    continue
                answer = await client.post(path, data={} if csrf is None else {"csrf": csrf})
                assert answer.status_code == 403, (path, answer.text)
                assert "another session" in answer.text
            assert await state(admin) == before


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
    ids=str,
)
async def test_another_site_sends_no_form(open_admin: OpenAdmin, headers: dict[str, str]) -> None:
    async with open_admin(USERS) as admin, admin.client(None) as client:
        csrf = await log_in(client, "alice")
        answer = await client.post("/discard", data={"csrf": csrf}, headers=headers)
        assert answer.status_code == 403
        login = {"name": "alice", "password": "alice's password"}
        answer = await client.post("/login", data=login, headers=headers)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


async def test_without_credentials_no_other_name_is_answered(open_admin: OpenAdmin) -> None:
    async with open_admin("") as admin:
        for method, path in routes(admin.app):
            if path in OPEN - {"/login", "/api/login"} or path == "/api/openapi.json":
                continue
            async with admin.client(None, headers={"Host": "evil.example"}) as client:
                answer = await client.request(method, path)
                assert answer.status_code == 403, (method, path)


ACTS = ("/act", "/quarantine", "/session/end", "/purge", "/restart")


async def test_static_mode_shows_the_mapping_and_refuses_edits(open_admin: OpenAdmin) -> None:
    sources = """
sources:
- {database: shop, urls: [{url: "postgresql://u:unseen-one@127.0.0.1:1/shop", sid: eu}], tables: {orders: {type: append}}}
"""
    async with open_admin("", sources=sources) as admin, admin.client(None) as client:
        page = await client.get("/mapping")
        assert "u:***@127.0.0.1:1/shop" in page.text
        assert "public.orders" in page.text
        assert "in the configuration file" in page.text
        assert "<form" not in page.text
        for path in ("/", "/mapping", "/databases/1", "/urls/1", "/tables/1", "/export"):
            text = (await client.get(path)).text
            assert "unseen-one" not in text
            assert not re.search(r"<button(?! class=\"plain\")", text), path
        csrf = csrf_of((await client.get("/databases/1")).text)
        for method, path in routes(admin.app):
            if method in SAFE_METHODS or path in OPEN | OWN or path.startswith("/api"):
                continue
            answer = await client.post(path, data={"csrf": csrf})
            is_refused = "the mapping is in the configuration file" in answer.text
            assert is_refused != path.endswith(ACTS), (path, answer.text)
            assert answer.status_code == 409 or path.endswith(ACTS)


def csrf_of(text: str) -> str:
    """Return the token that the forms of a page carry."""
    found = re.search(r'name="csrf" value="([^"]+)"', text)
    assert found is not None
    return found[1]


async def test_pages_have_security_headers_and_no_inline_script(
    open_admin: OpenAdmin,
) -> None:
    async with open_admin(USERS) as admin, admin.client(None) as client:
        await log_in(client, "alice")
        for path in ("/", "/mapping", "/plan", "/history", "/sources/new", "/export", "/nothing"):
            answer = await client.get(path, headers={"Accept": "text/html"})
            assert answer.headers["content-type"].startswith("text/html"), path
            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy
            assert {"default-src 'none'", "script-src 'self'", "form-action 'self'"} <= set(
                policy.split("; ")
            )
            assert answer.headers["cache-control"] == "no-store"
            assert not re.search(
                r"<style|\sstyle=|\son\w+=|<script(?! src=\"/static/)", answer.text
            )
            assert "http://" not in answer.text
        style = re.search(r'href="(/static/page\.css\?v=\w+)"', answer.text)
        assert style is not None
        answer = await client.get(style[1])
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/static/nothing.css")).status_code == 404
        # Programs are answered as before.
        assert (await client.get("/nothing")).json()["error"]["code"] == "not_found"


async def test_hostile_names_are_text(open_admin: OpenAdmin) -> None:
    async with open_admin("") as admin, admin.client(None) as client:
        service = admin.service
        group = await service.create("database", {"name": HOSTILE}, HOSTILE)
        await service.create(
            "url", {"database_id": group["id"], "url": "host=127.0.0.1 port=1", "sid": HOSTILE}, "x"
        )
        await service.create(
            "table",
            {
                "database_id": group["id"],
                "schema": f'"{HOSTILE.replace(chr(34), chr(34) * 2)}"',
                "name": '"</textarea><img src=x onerror=alert(1)>"',
                "exclude": ["</textarea><b>"],
                "target": "fine",
            },
            "x",
        )
        seen = 0
        for path in ("/", "/mapping", "/plan", "/history", "/databases/1", "/urls/1", "/tables/1",
                     "/databases/1/tables/new", "/export", f"/source?database={HOSTILE}",
                     f"/table?database=x&name={HOSTILE}", f"/nothing/{HOSTILE}",
                     f"/login?next={HOSTILE}"):  # fmt: skip
            answer = await client.get(path, headers={"Accept": "text/html"})
            assert answer.status_code < 500, (path, answer.text)
            for raw in ("<script>alert", "<img", "</textarea><b>"):
                assert raw not in answer.text, path
            assert "63070007" not in answer.text
            seen += "&lt;script&gt;alert(1)" in answer.text
        assert seen >= 6


async def test_no_page_holds_a_secret(open_admin: OpenAdmin) -> None:
    secret = "hunter2-in-the-url"
    async with open_admin(f"admin: {{token: {TOKEN}}}") as admin, admin.client() as client:
        database = await admin.service.create("database", {"name": "shop"}, "x")
        url = f"postgresql://u:{secret}@127.0.0.1:1/shop"
        values = {"database_id": database["id"], "url": url, "sid": "eu"}
        await admin.service.create("url", values, "x")
        pages = [await client.get(path) for path in ("/", "/mapping", "/databases/1", "/urls/1",
                 "/plan", "/history", "/export", "/databases/1/tables/new")]  # fmt: skip
        pages.append(await client.post("/urls/1/test", follow_redirects=True))
        typed = {"database": "other", "url": f"postgresql://u:{secret}@127.0.0.1:1/x", "sid": ""}
        pages.append(await client.post("/sources/new", data=typed | {"password": secret}))
        pages.append(
            await client.post("/sources/new", data=typed | {"url": "nonsense", "password": secret})
        )
        pages.append(
            await client.post(
                "/urls/1", data={"url": f"host=a password={secret} bad", "password": ""}
            )
        )
        pages.append(
            await client.post("/urls/1", data={"url": "postgresql://u:***@elsewhere/shop"})
        )
        for page in pages:
            assert page.status_code < 500, page.text
            for hidden in (secret, TOKEN, "target-password"):
                assert hidden not in page.text, page.request.url
        assert "target-password" in TARGET


async def test_a_server_that_takes_long_keeps_nobody_waiting(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_reader, "WAIT_SECONDS", 0.05)
    sources = "sources: [{database: shop, urls: [{url: host=h}], tables: {t: }}]"
    async with open_admin("", sources=sources) as admin, admin.client(None) as client:
        answered = asyncio.Event()
        asked = 0
        tables = [
            {"source": f"public.t{n:03}", "target": "public.<b>", "type": "clone", "state": "ready", "error": None,
             "quarantined": 0, "rows_copied": 1, "rows_total": None, "end_lsn": "0/1"}
            for n in range(450)
        ]  # fmt: skip

        async def status() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            await answered.wait()
            source: dict[str, Any] = {"database": "shop", "sid": None, "state": "streaming", "slot": "s", "error": None,
                      "lag_bytes": 0, "lag_seconds": 0.0, "retained_wal_bytes": 7,
                      "confirmed_flush_lsn": None, "tables": tables, "heartbeat_seconds": 0.012,
                      "backlog": {"state": "throttled", "limit_bytes": 2048, "spooled_bytes": 1024}}  # fmt: skip
            return {"sources": [source], "target": {"state": "reachable"}}

        monkeypatch.setattr(admin.service, "status", status)
        pages = await asyncio.gather(*(client.get("/") for _ in range(5)))
        for page in pages:
            assert "a server is slow to answer" in page.text
            assert "not started" in page.text
        answered.set()
        pages = await asyncio.gather(*(client.get("/") for _ in range(5)))
        for page in pages:
            assert "1 source streams" in page.text
            assert "takes long" not in page.text
            for shown in (
                "of 2.0\xa0kB",
                "1.0\xa0kB in the journal",
                "copies read more slowly",
                "12\xa0ms",
            ):
                assert shown in page.text
        assert asked == 1

        # A page shows some of any number of tables, and finds the rest.
        assert "All 450 tables" in pages[0].text.replace("\u202f", "")
        last = (await client.get("/source?database=shop&page=3")).text
        assert "public.t449" in last
        assert "public.t399" not in last
        found = (await client.get("/source?database=shop&q=T12")).text
        assert found.count('<tr role="row" id="table/') == 10
        assert "10 tables of 450" in found
        assert (await client.get("/source?database=shop&q=%3Cb%3E")).text.count("<b>") == 0


async def test_the_wizard_writes_nothing_before_its_last_step(open_admin: OpenAdmin) -> None:
    async with open_admin(USERS) as admin, admin.client(None) as client:
        csrf = await log_in(client, "alice")
        before = await state(admin)
        secret = "hunter2-of-the-wizard"
        typed = {"csrf": csrf, "database": "shop", "url": "postgresql://u@127.0.0.1:1/shop",
                 "sid": "eu", "password": secret}  # fmt: skip
        refused = await client.post("/sources/new", data=typed)
        assert "Continue without a test" in refused.text
        kept = await client.post("/sources/new", data=typed | {"do": "keep"})
        step = kept.headers["location"]
        assert step.startswith("/sources/new/tables?connection=")
        page = (await client.get(step)).text
        assert "Tables of shop" in page
        assert secret not in page
        for form, fault in (({}, "choose at least one table"), ({"name": "a.b.c.d"}, "name")):
            answer = await client.post(step, data={"csrf": csrf} | form)
            assert answer.status_code == 422
            assert fault in answer.text
        assert await state(admin) == before

        # A refused table leaves neither the url nor the group behind.
        pair = {
            f"{key}-{n}": value for n in (0, 1) for key, value in (("schema", "s"), ("name", "t"))
        }
        answer = await client.post(step, data={"csrf": csrf, "pick": ["0", "1"]} | pair)
        assert answer.status_code == 409, answer.text
        assert await state(admin) == before

        done = await client.post(step, data={"csrf": csrf, "pick": "0"} | pair)
        assert done.headers["location"].startswith("/plan?note=")
        content = await admin.service.store.content()
        assert [row["name"] for row in content["tables"]] == ["t"]
        revealed = await admin.service.store.reveal(content)
        assert [secret in url for url in revealed.values()] == [True]
        # The step runs once, and an unknown name leads back to the first step.
        again = await client.post(step, data={"csrf": csrf, "pick": "0"} | pair)
        assert again.headers["location"].startswith("/sources/new?note=")
        taken = await client.post("/sources/new", data=typed | {"do": "keep"})
        assert taken.status_code == 409


def test_a_connection_without_tables_is_forgotten_and_is_of_one_user() -> None:
    now = 0.0
    connections = add_source_page.Connections(lambda: now)
    name = connections.add("alice", "shop", "host=h", None)
    assert connections.find(name, "alice") is not None
    assert connections.find(name, "victor") is None
    for _ in range(add_source_page.CONNECTIONS_MAX):
        last = connections.add("alice", "shop", "host=h", None)
    assert connections.find(name, "alice") is None
    now = add_source_page.CONNECTION_SECONDS + 1
    assert connections.find(last, "alice") is None


def a_table(name: str, **values: Any) -> dict[str, Any]:
    """Return a table in the form of the status."""
    return {"source": f"public.{name}", "target": f"public.{name}", "type": "clone",
            "state": "ready", "error": None, "quarantined": 0, "rows_copied": 1,
            "rows_total": None, "end_lsn": "0/1", **values}  # fmt: skip


def show(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, *tables: dict[str, Any], **values: Any
) -> None:
    """Let the status be that of a source "shop" with *tables*."""
    source: dict[str, Any] = {"database": "shop", "sid": None, "state": "streaming", "slot": "s",
        "error": None, "lag_bytes": 0, "lag_seconds": 0.0, "retained_wal_bytes": 7,
        "confirmed_flush_lsn": None, "tables": list(tables), "heartbeat_seconds": None,
        "backlog": None, **values}  # fmt: skip

    async def status() -> dict[str, Any]:
        return {"sources": [source], "target": {"state": "reachable"}}

    monkeypatch.setattr(admin.service, "status", status)
    monkeypatch.setattr(status_reader, "KEEP_SECONDS", -1.0)


ONE_SOURCE = "sources: [{database: shop, urls: [{url: host=h}], tables: {t: }}]"


async def test_a_table_whose_copy_has_not_begun_is_queued_and_says_for_what(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = {"state": "copying", "rows_copied": 0}
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        show(
            admin,
            monkeypatch,
            a_table("moves", **copying | {"rows_copied": 5, "rows_per_second": 2.0}),
            a_table("small", **copying, bytes_total=10),
            a_table("large", **copying, bytes_total=1000),
            a_table("locked", state="init", waiting_for="pid 7 of <alice>"),
        )
        page = (await client.get("/")).text
        assert "1 table copying, 3 tables queued for a copy" in page
        rows = {
            name: row_of(page, f"public.{name}") for name in ("moves", "small", "large", "locked")
        }
        assert "copying" in rows["moves"]
        for name, words in (
            ("large", "number 1 of 3 in the queue"),
            ("small", "number 2 of 3 in the queue"),
            ("locked", "waits for pid 7 of &lt;alice&gt;"),
        ):
            assert words in rows[name]
            assert "queued" in rows[name]
            assert "copying" not in rows[name]


async def test_a_problem_has_its_command_its_buttons_and_its_runbook(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = (
        a_table("it's", state="error", error="no column <b>"),
        a_table(
            "lost",
            state="error",
            error="it is gone",
            error_code=TableGoneError.code,
            remedy=Remedy.of("run: ", run("resync", "public.lost", database="shop")).to_json(),
        ),
        a_table("held", state="paused"),
        a_table("refused", quarantined=2),
        a_table("fine"),
    )
    async with open_admin("") as admin, admin.client(None) as client:
        show(admin, monkeypatch, *tables)
        monkeypatch.setattr(status_reader.StatusReader, "_is_current", lambda *_: True)
        page = (await client.get("/")).text
        problems = {
            name: re.search(
                rf"<li class=\"\w+\">\s*<p class=\"what\"><a [^>]*>shop public\.{name}</a>.*?</li>",
                page,
                re.DOTALL,
            )
            for name in ("it&#39;s", "lost", "held", "refused")
        }
        for name, command, buttons, runbook in (
            (
                "it&#39;s",
                "resume &#39;public.it&#39;&#34;&#39;&#34;&#39;s&#39;",
                ["resume", "resync"],
                "runbooks/table-in-error",
            ),
            ("lost", "resync public.lost", ["resync"], "runbooks/table-gone"),
            ("held", "resume public.held", ["resume"], "runbooks/source-disk-fills"),
            (
                "refused",
                "quarantine retry public.refused",
                ["retry"],
                "runbooks/rows-in-quarantine",
            ),
        ):
            found = problems[name]
            assert found is not None, name
            shown = f'streamer {command} <span class="option">--database shop</span>'
            assert f"<pre data-copy><code>{shown}</code></pre>" in found[0], found[0]
            assert re.findall(r'name="action" value="(\w+)"', found[0]) == buttons
            assert f'href="/help/{runbook}"' in found[0]
            assert (await client.get(f"/help/{runbook}")).status_code == 200
            assert 'name="csrf"' in found[0]
        assert (await client.get("/help/runbooks/absent")).status_code == 404
        assert 'href="/help/runbooks/table-in-error"' in (await client.get("/help")).text

        # A state is chosen out of all states, here and on the page of the source.
        assert "error 2" in page
        for path in ("/?state=paused", "/source?database=shop&state=paused"):
            page = (await client.get(path)).text
            assert re.findall(r'<tr role="row" id="table/shop/([^"]+)"', page) == ["public.held"]
        assert "public.fine" in (await client.get("/?state=nonsense")).text


async def test_recent_events_are_kept_and_shown_the_newest_first(open_admin: OpenAdmin) -> None:
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        assert "No events since this process started" in (await client.get("/events")).text
        table = {"source": "shop", "table": "public.<b>"}
        admin.events.publish("state", table | {"state": "error", "error": "refused by <i>"})
        admin.events.publish("lag", {"source": "shop", "lag_bytes": 1, "lag_seconds": 1.0})
        admin.events.publish("target", {"state": "unreachable", "error": "no route"})
        page = (await client.get("/events")).text
        assert page.index("no route") < page.index("refused by &lt;i&gt;")
        assert page.count('<tr role="row"><td') == 2
        assert "/table?database=shop&amp;name=public.%3Cb%3E" in page
        for _ in range(PAST_MAX + 5):
            admin.events.publish("state", table | {"state": "ready", "error": None})
        assert len(admin.events.past()) == PAST_MAX
        page = (await client.get("/events?page=10")).text
        assert (page.count('<tr role="row"><td'), "Older" in page) == (100, False)


async def test_the_quarantine_of_all_tables_is_one_page_with_retry_and_drop(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"id": number, "database": "shop", "sid": sid, "table": f"public.{name}",
         "operation": "insert", "key": {"id": number}, "old": None, "new": None, "lsn": "0/1",
         "commit_time": "2026-01-01T00:00:00+00:00", "xid": 1, "error": "<i>no</i>", "code": None,
         "quarantined_at": "", "retried_at": None}
        for number, sid, name in ((7, "eu", "a"), (9, "us", "b"))
    ]  # fmt: skip
    asked: list[tuple[str, Choice]] = []

    async def quarantine(choice: Choice, limit: int) -> dict[str, Any]:
        assert choice in (Choice(), Choice("public.a", "shop", None))
        return {"items": rows[:limit], "total": 2}

    async def ask(action: str, choice: Choice, actor: str) -> list[dict[str, Any]]:
        asked.append((action, choice))
        return [{"table": "t", "changes": len(choice.ids) or 1}]

    async with open_admin("") as admin, admin.client(None) as client:
        monkeypatch.setattr(admin.service, "quarantine", quarantine)
        monkeypatch.setattr(admin.service, "request_quarantine_action", ask)
        show(
            admin,
            monkeypatch,
            a_table("a", quarantined=1),
            a_table("b", quarantined=1),
            a_table("c"),
        )
        monkeypatch.setattr(status_reader.StatusReader, "_is_current", lambda *_: True)
        page = (await client.get("/quarantine")).text
        assert "shop:eu" in page
        assert "/table?database=shop&amp;sid=us&amp;name=public.b#quarantine" in page
        assert "<i>no" not in page
        form = {"csrf": csrf_of(page)}
        for sent, wanted in (
            ({"action": "retry"}, []),
            ({"action": "drop", "id": ["7", "9"]}, [("drop", Choice(ids=(7, 9)))]),
            ({"action": "retry", "which": "all"},
             [("retry", Choice(f"public.{name}", "shop", None)) for name in "ab"]),
            ({"action": "retry", "which": "all", "id": ["7"]},
             [("retry", Choice(f"public.{name}", "shop", None)) for name in "ab"]),
            ({"action": "retry", "which": '["shop", "public.b"]', "id": ["7"]},
             [("retry", Choice("public.b", "shop", None))]),
            ({"action": "retry", "which": '["shop"]'},
             [("retry", Choice(f"public.{name}", "shop", None)) for name in "ab"]),
            ({"action": "drop", "which": '["shop", "public.c"]'}, []),
        ):  # fmt: skip
            asked.clear()
            answer = await client.post("/quarantine", data=form | sent)
            assert (answer.status_code, asked) == (303, wanted), sent
        assert all(f">all of {name}</option>" in page for name in ("shop", "shop public.b"))
        assert "of shop public.c" not in page
        # "All" on the page of a table includes the changes that are not ticked.
        place = {"database": "shop", "name": "public.a", "action": "retry"}
        asked.clear()
        sent = form | place | {"which": "all", "id": ["7"]}
        answer = await client.post("/table/quarantine", data=sent)
        assert asked == [("retry", Choice("public.a", "shop", None))]
        assert "1 change is being retried" in (await client.get(answer.headers["location"])).text


async def test_a_quarantine_that_cannot_be_read_is_not_called_empty(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def quarantine(choice: Choice, limit: int) -> dict[str, Any]:
        raise InvalidError("the target is away")

    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        monkeypatch.setattr(admin.service, "quarantine", quarantine)
        show(admin, monkeypatch, a_table("a"))
        for path in ("/quarantine", "/table?database=shop&name=public.a"):
            page = (await client.get(path)).text
            assert '<p class="note bad" role="alert">the target is away</p>' in page
            assert "No changes are in quarantine" not in page


async def test_a_table_that_is_copied_shows_its_last_change_and_its_rate(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        show(admin, monkeypatch, a_table("busy"), a_table("still", rows_copied=77))
        at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        admin.engine.metrics.changes_of_tables["shop", "public.busy"] = (3, at)
        for path in ("/", "/source?database=shop"):
            page = (await client.get(path)).text
            assert "2026-01-02 03:04:05" in row_of(page, "public.busy")
            assert "no change since this process started" in row_of(page, "public.still")
            assert "rows copied" not in page


def test_the_rate_of_a_table_is_that_of_the_last_half_minute_at_least() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    activity, key = ChangeActivity(), ("shop", "public.t")

    def rate(changes: int, seconds: float) -> float:
        now = begin + timedelta(seconds=seconds)
        activity.remember({key: (changes, now)}, now)
        found = activity.find({key: (changes, now)}, *key, now)
        assert found is not None
        return found.changes_per_second

    assert activity.find({}, *key, begin) is None
    assert [rate(0, 0), rate(300, 30), rate(300, 60), rate(300, 90)] == [0, 10, 0, 0]


async def test_all_copies_together_have_their_progress_and_the_time_left(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = a_table("moves", state="copying", rows_copied=100, rows_per_second=10.0,
                    bytes_copied=1000, bytes_total=2000)  # fmt: skip
    queued = a_table("queued", state="copying", rows_copied=0, bytes_copied=0, bytes_total=2000)
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        for path in ("/", "/source?database=shop"):
            show(admin, monkeypatch, moves, queued, a_table("done"))
            page = (await client.get(path)).text
            # 3000 bytes are left at 100 a second.
            for words in ("2 tables, 1 queued", "25 %", "<strong>30\xa0s</strong> left"):
                assert words in page, words
            show(admin, monkeypatch, moves, queued | {"state": "init"})
            assert "the remaining time is not known yet" in (await client.get(path)).text
            show(admin, monkeypatch, a_table("done"))
            assert "left" not in re.sub(
                r"<(header|footer).*?</\1>", "", (await client.get(path)).text
            )


async def test_the_page_of_a_source_shows_the_role_of_its_server(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        for role in ("primary", "standby", None):
            show(admin, monkeypatch, a_table("t"), role=role)
            page = (await client.get("/source?database=shop")).text
            assert ("<dt>Server</dt>" in page) == (role is not None)
            assert role is None or f"<dd>{role}</dd>" in page


async def test_source_table_and_fleet_have_charts_with_present_values(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        show(admin, monkeypatch, a_table("t"))
        source, table = "/source?database=shop", "/table?database=shop&name=public.t"
        for path, count in ((source, 3), (table, 3), ("/", 4), ("/?view=wall", 4)):
            page = (await client.get(path)).text
            assert page.count("no values yet") == page.count("<figure") == count, path
            # The script of an open page draws the charts.
            assert "<figure" not in (await client.get(path, headers={"X-Refresh": "1"})).text
        columns = {
            "times": [0, 30, 60, 90, 120],
            "lag_seconds": [1.0, 3.0, None, 2.0, 2.5],
            "changes_per_second": [0.0, 2.0, 2.0, 2.0, 2.0],
            "retained_wal_bytes": [1024.0 * number for number in range(5)],
        }
        monkeypatch.setattr(admin.events.history, "columns", lambda source: columns)
        page = (await client.get(source)).text
        assert "The last 2\xa0min" in page
        for title, present, most in (
            ("Lag", "2.5\xa0s", "3.0\xa0s"),
            ("Changes", "2.0/s", "2.0/s"),
            ("WAL retained", "4.0\xa0kB", "4.0\xa0kB"),
        ):
            figure = re.search(rf'data-title="{title}".*?</figure>', page, re.DOTALL)
            assert figure is not None
            assert f"{title}, the last 2\xa0min: at most {most}" in figure[0]
            assert f">{present}</span>" in figure[0]
        assert page.count("<polyline") == 4, "a gap parts the line of the lag"


def row_of(page: str, table: str) -> str:
    """Return the row of a table."""
    found = re.search(
        rf'<tr role="row" id="table/shop/{re.escape(table)}".*?</tr>', page, re.DOTALL
    )
    assert found is not None, table
    return found[0]


async def test_login_leads_back_to_us_and_nowhere_else(open_admin: OpenAdmin) -> None:
    async with open_admin(USERS) as admin:
        for given, wanted in (
            ("/plan?x=1", "/plan?x=1"),
            ("//evil.example/", "/"),
            ("https://evil.example/", "/"),
            ("/\\evil.example", "/"),
            ("javascript:alert(1)", "/"),
            ("/x\r\nSet-Cookie: a=b", "/"),
            ("", "/"),
        ):
            async with admin.client(None) as client:
                login = {"name": "alice", "password": "alice's password", "next": given}
                answer = await client.post("/login", data=login)
                assert (answer.status_code, answer.headers["location"]) == (303, wanted)
                cookies = answer.headers.get_list("set-cookie")
                assert any("HttpOnly" in c and "SameSite=strict" in c for c in cookies)


async def test_guessing_is_throttled_and_a_session_ends(open_admin: OpenAdmin) -> None:
    async with open_admin(USERS) as admin, admin.client(None) as client:
        csrf = await log_in(client, "victor")
        assert (await client.post("/logout", data={"csrf": csrf})).status_code == 303
        answer = await client.get("/mapping?x=1")
        assert answer.headers["location"] == "/login?next=%2Fmapping%3Fx%3D1"
        for _ in range(FAILURES_MAX):
            answer = await client.post("/login", data={"name": "victor", "password": "guess"})
            assert answer.status_code == 401
            assert "wrong" in answer.text
        answer = await client.post(
            "/login", data={"name": "victor", "password": "victor's password"}
        )
        assert answer.status_code == 429


async def test_forms_that_no_page_sends_are_refused_in_words(open_admin: OpenAdmin) -> None:
    """For any request: no 500, and no change."""
    async with open_admin(f"admin: {{token: {TOKEN}}}") as admin, admin.client() as client:
        await admin.service.create("database", {"name": "shop"}, "x")
        await admin.service.create("url", {"database_id": 1, "url": "host=127.0.0.1 port=1"}, "x")
        await admin.service.create("table", {"database_id": 1, "name": "t"}, "x")
        before = await state(admin)
        bodies: list[dict[str, Any]] = [
            {},
            {"name": "\0", "url": "\0", "sid": "\0", "type": "\0", "id": "\0", "action": "\0"},
            {"action": "resync", "mode": "x", "name": "t", "database": "shop"},
            {"action": "retry", "id": "9" * 40, "name": "t", "database": "shop"},
            {"columns": "a: [", "type": "clone", "name": "x" * 300, "url": "x" * 5000},
            {"set": "- 1", "type": "nonsense", "target_schema": "x" * 300, "on_error": "no"},
            {"pick": "0", "schema-0": '"', "name-0": '"', "type": "clone"},
            {"mark": "é", "force": "on"},
        ]
        for method, path in routes(admin.app):
            if method in SAFE_METHODS or path in OPEN | OWN or path.startswith("/api"):
                continue
            if path.endswith(("/remove", "/discard")):
                continue
            for body in bodies:
                answer = await client.post(path, data=body)
                is_refused = answer.status_code in (404, 409, 422, 503)
                assert is_refused or answer.status_code == 303, (path, body, answer.text)
            files = {"csrf": ("f", b"x"), "url": ("f", b"x"), "pick": ("f", b"x")}
            assert (await client.post(path, files=files)).status_code < 500, path
        for path in ("/databases/0", "/databases/99", "/tables/x", "/urls/99999999999999999999",
                     "/history?page=x", "/history?page=0", "/databases/1/tables/new?url_id=x",
                     "/table?name=%22", "/source?database=%00", "/?note=x"):  # fmt: skip
            assert (await client.get(path)).status_code < 500, path
        assert (await state(admin))[1] == before[1]
