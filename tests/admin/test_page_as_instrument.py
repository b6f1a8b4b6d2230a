"""The page has the same grid and form for all numbers, times and causes."""

import html
import re
from datetime import UTC, datetime, timedelta

import pytest

from streamer.admin.live import status_reader
from streamer.admin.page.number_text import NO_VALUE, state_kind, state_word, unbroken
from streamer.errors.error_classes import TargetConnectionError, UnreadyError
from streamer.errors.error_reports import TableWait
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.admin.test_page import ONE_SOURCE, USERS, a_table, log_in, row_of, show
from tests.support.admin import TARGET, Admin, OpenAdmin


def figures_of(page: str) -> list[str]:
    """Return the titles of the figures of a source."""
    figures = re.search(r'id="source/.*?<dl class="figures">.*?</dl>', page, re.DOTALL)
    assert figures is not None
    return re.findall(r"<dt>(.*?)</dt>", figures[0])


async def test_every_card_has_the_same_figures_and_a_dash_for_a_missing_value(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = ["Lag", "Changes", "WAL retained", "Commit to visible"]
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        show(admin, monkeypatch, a_table("t"), lag_seconds=0.25, heartbeat_seconds=0.012)
        page = (await client.get("/")).text
        assert figures_of(page) == same
        # Two latencies have the same unit.
        assert "250\xa0ms</span>" in page
        assert "12\xa0ms</dd>" in page
        # A table without a change has a dash, and says why to a pointer.
        assert f">{NO_VALUE}</span>" in row_of(page, "public.t")
        assert page.count("since this process started") == 1

        show(admin, monkeypatch, lag_seconds=None, lag_bytes=None, role="standby", process="a:1")
        page = (await client.get("/")).text
        assert figures_of(page) == [*same, "Server", "Process"]
        lag = re.search(r"<dt>Lag</dt><dd>.*?</dd>", page)
        assert lag is not None
        assert lag[0].count(NO_VALUE) == 1


async def test_times_are_ages_with_the_exact_time_in_the_title(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        show(admin, monkeypatch, a_table("t"))
        at = datetime.now(UTC) - timedelta(minutes=5)
        admin.engine.metrics.changes_of_tables["shop", "public.t"] = (3, at)
        title = f'title="{at:%Y-%m-%d %H:%M:%S} UTC">5\xa0min ago</time>'
        for path in ("/", "/source?database=shop", "/table?database=shop&name=public.t"):
            assert title in (await client.get(path)).text, path


async def test_code_in_a_message_is_set_as_code(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        broken = a_table("t", state="error", error="set `on_error` <b>")
        show(admin, monkeypatch, broken, a_table("u", state="paused"))
        monkeypatch.setattr(status_reader.StatusReader, "_is_current", lambda *_: True)
        page = (await client.get("/")).text
        assert "set <code>on_error</code> &lt;b&gt;</strong>" in page
        assert f"<code>{unbroken('streamer resume public.u --database shop')}</code>" in page


async def test_events_are_filtered_by_kind_and_source_and_have_durations(
    open_admin: OpenAdmin,
) -> None:
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        table = {"source": "shop", "table": "public.t"}
        admin.events.publish("state", table | {"state": "error", "error": "no column"})
        admin.events.publish("state", table | {"state": "ready", "error": None})
        former = {"source": "<former>", "table": None, "state": "removed", "error": None}
        admin.events.publish("state", former)
        admin.events.publish("target", {"state": "unreachable", "error": "no route"})
        for query, count in (
            ("", 4), ("kind=errors", 2), ("kind=table", 2), ("kind=source", 1), ("source=shop", 2),
            ("kind=errors&source=shop", 1), ("kind=mapping", 0), ("kind=nonsense", 4),
            ("source=%3Cformer%3E", 1),
        ):  # fmt: skip
            page = (await client.get(f"/events?{query}")).text
            assert page.count('<tr role="row"><td') == count, query
            assert ("Show all events" in page) == (count == 0), query
            assert "<option>&lt;former&gt;" in page or "<option selected>&lt;former&gt;" in page
        page = (await client.get("/events?source=shop")).text
        assert page.count("so far") == 1
        for number in range(250):
            admin.events.publish("state", table | {"state": f"s{number}", "error": "x"})
        page = (await client.get("/events?kind=errors&page=2")).text
        for number in (1, 3):
            assert f'href="/events?kind=errors&amp;page={number}"' in page


async def test_the_head_names_the_user_and_a_read_only_role(
    open_admin: OpenAdmin,
) -> None:
    tag = re.compile(r'<span class="tag" title="[^"]+">read-only</span>')
    async with open_admin(USERS) as admin:
        for name, is_read_only in (("alice", False), ("victor", True)):
            async with admin.client(None) as client:
                await log_in(client, name)
                page = (await client.get("/events")).text
                assert f">{name} <" in page
                assert "Log out</button>" in page
                assert bool(tag.search(page)) == is_read_only


async def test_a_mapping_in_a_file_is_named_in_full_only_where_an_operator_would_edit(
    open_admin: OpenAdmin,
) -> None:
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        for path in ("/", "/mapping", "/events"):
            page = (await client.get(path)).text
            assert ">read-only</span>" not in page
            assert ("Edit the file and send SIGHUP" in page) == (path == "/mapping")


async def test_an_unknown_page_leads_to_the_pages_that_exist(open_admin: OpenAdmin) -> None:
    async with open_admin("") as admin, admin.client(None) as client:
        for path in ("/nothing", "/help/nothing"):
            answer = await client.get(path, headers={"Accept": "text/html"})
            assert answer.status_code == 404
            for to in ("/", "/events", "/mapping", "/help"):
                assert f'href="{to}">' in answer.text
                assert (await client.get(to)).status_code == 200
        for path, words in (
            ("/history", "No changes yet"),
            ("/mapping", "Add a source, or import"),
        ):
            assert words in (await client.get(path)).text, path


def lose_target(admin: Admin) -> None:
    error = TargetConnectionError("target: no <answer>")
    admin.engine.target.record_error(error, TargetAddress.parse(Secret(TARGET)))


@pytest.mark.parametrize("view", ["cards", "wall"])
@pytest.mark.parametrize("is_known", [True, False], ids=["last status", "no status"])
async def test_a_target_that_is_away_is_one_problem(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch, view: str, is_known: bool
) -> None:
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        waits = {"state": "waiting", "error": "target: no <answer>", "error_code": "target_down"}
        show(admin, monkeypatch, a_table("t"), **waits)
        if is_known:
            monkeypatch.setattr(status_reader.StatusReader, "_is_current", lambda *_: True)
        else:

            async def status() -> None:
                raise UnreadyError("target: no <answer>")

            monkeypatch.setattr(admin.service, "status", status)
        lose_target(admin)
        page = (await client.get("/", params={"view": view})).text
        assert "The target is unreachable: sources wait until it accepts changes" in page
        assert page.count("no &lt;answer&gt;") == 1
        assert '<span class="state quiet">waits for the target</span>' in page
        assert page.count('<li class="bad">') == 1
        assert 'class="state bad"' not in page
        assert "problem bad" not in page
        source = (await client.get("/source?database=shop")).text
        assert '<span class="state quiet">waits for the target</span>' in source


async def test_a_target_that_refuses_new_sessions_has_a_steady_page(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process reads no status for a while after a failure, and still names the failure."""
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:

        async def status() -> object:
            return {"sources": [], "target": {"state": "refused", "error": "too many connections"}}

        monkeypatch.setattr(admin.service, "status", status)
        for _ in range(3):
            page = (await client.get("/")).text
            assert "too many connections: the page may show old or incomplete data" in page
            assert "The tables appear when the target answers." in page
            assert "No table is mapped yet" not in page


async def test_badge_filter_and_counts_show_the_state_of_the_heading(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = TableWait("its turn", is_automatic=True)
    tables = (
        a_table("free"),
        a_table("turn", waiting_for=turn.text, wait=turn.to_json()),
        a_table("locked", waiting_for="a lock"),
        a_table("held", state="paused"),
        a_table("retried", state="init", error="no space", waiting_for="a lock"),
    )
    streams = {
        "ready": ["free", "turn"], "waiting": ["locked"], "paused": ["held"], "init": ["retried"],
    }  # fmt: skip
    stands = {"without a stream": ["free", "locked", "turn"], "paused": ["held"]}
    assert state_kind("waiting") == "warning"
    async with open_admin("", sources=ONE_SOURCE) as admin, admin.client(None) as client:
        for state, names in (("streaming", streams), ("unreachable", stands)):
            # WHEN a table waits for a lock, and a table for its turn
            show(admin, monkeypatch, *tables, state=state)
            # THEN heading, links with counts, lists and badges have the same words
            for path in ("/", "/source?database=shop", "/?view=wall"):
                page = (await client.get(path)).text
                for word, expected in names.items():
                    count = len(expected)
                    noun = "table" if count == 1 else "tables"
                    heading = f"{count} {noun} {state_word(word)}"
                    assert heading in page or path.startswith("/source"), (path, word)
                    if "wall" in path and word == "ready":
                        assert "2 of 5 ready" in page
                        continue
                    listed = (await client.get(link_of(page, state_word(word), count))).text
                    rows = re.findall(r'<tr role="row" id="table/shop/public\.(\w+)"', listed)
                    assert sorted(rows) == expected, (path, word)
                    assert all(badge(word) in row_of(listed, f"public.{name}") for name in expected)
            for word, expected in names.items():
                for name in expected:
                    address = f"/table?database=shop&name=public.{name}"
                    page = (await client.get(address, headers={"X-Refresh": "1"})).text
                    assert f"</h1> {badge(word)}" in page


def badge(state: str) -> str:
    """Return the mark-up of a state that the page is certain of."""
    return f'<span class="state {state_kind(state)}">{state_word(state)}</span>'


def link_of(page: str, word: str, count: int) -> str:
    """Return the address of the link that chooses tables by state and shows their number."""
    link = re.search(rf'<a [^>]*?href="([^"]+)"[^>]*>(?:{word} {count}|{count} {word})</a>', page)
    assert link is not None, (word, count)
    return html.unescape(link[1])
