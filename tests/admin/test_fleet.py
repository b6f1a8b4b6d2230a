"""The page and the API of a large fleet: small answers, trouble first, bulk acts."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamer.admin.live.fleet_overview import LineFilter, choose, fleet_overview_of, groups
from streamer.admin.live.status_view import source_view
from streamer.admin.page.number_text import unbroken
from streamer.admin.page.overview_page import SOURCES_PER_PAGE
from streamer.admin.page.render_templates import environment
from streamer.admin.service import act_on_many_sources
from streamer.commands.table_requests import SourceKey, SourceOutcome
from streamer.commands.table_requests import choose as choose_tables
from streamer.errors.error_classes import RUNBOOKS, InvalidError
from streamer.errors.remedies import EVERY_TABLE, run
from tests.support.admin import CREDENTIALS, VIEWER_TOKEN, Admin, OpenAdmin
from tests.support.fleet import a_source, a_table, large_fleet, show_fleet

HOSTILE = "<script>alert(1)</script>\"'&{{7007*9001}}"


def labels_of(page: str) -> list[str]:
    return re.findall(r'<tr role="row" id="line/([^"]+)">', page)


async def test_two_hundred_sources_with_20000_tables_are_one_small_page(
    open_admin: OpenAdmin, tmp_path: Path
) -> None:
    async with open_admin("", is_alone=False) as admin, admin.client(None) as client:
        show_fleet(admin.service, large_fleet(), tmp_path)
        page = (await client.get("/")).text
        labels = labels_of(page)
        assert len(labels) == SOURCES_PER_PAGE
        assert labels[:5] == ["shop:t017", "shop:t033", "stock:t066", "stock:t050", "web:t051"]
        assert len(page) < 100_000
        for words in ("in trouble 2", "with warnings 1", "copying 2", "fine 195", "column note is missing",
                      "waits for its turn: number 2 of 3", "25 % copied", "199 of 200 sources stream"):  # fmt: skip
            assert words in page, words
        assert page.count(f'href="{RUNBOOKS}/') >= 3
        # A lost slot: no table is ready, no WAL waits, and the command is complete.
        lost = page.partition('id="line/shop:t017"')[2].partition("</tr>")[0]
        assert "100 without a stream" in lost
        assert ">0 of 100 ready<" in lost
        assert "<strong>slot streamer_shop is gone</strong>" in lost
        again = run("resync", EVERY_TABLE, database="shop", sid="t017")
        assert f"<pre data-copy><code>{unbroken(again.line)}</code></pre>" in lost
        assert '<span class="option">--database shop</span>' in lost
        assert "4.0" not in lost
        # The script of an open page gets no events of single tables.
        assert "data-brief" in page

        second = labels_of((await client.get("/?page=4")).text)
        assert len(second) == SOURCES_PER_PAGE
        assert not set(second) & set(labels)
        for query, expected in (
            ("q=t033", ["shop:t033"]),
            ("q=BROKEN", ["shop:t033"]),
            ("health=busy", ["stock:t050", "web:t051"]),
            ("database=billing&sort=name&page=1", None),
            ("health=nonsense&sort=nonsense", labels),
            ("sort=lag", None),
        ):
            found = labels_of((await client.get(f"/?{query}")).text)
            assert found == (expected or found), query
            assert found, query
        assert labels_of((await client.get("/?sort=lag")).text)[0] == "web:t199"
        grouped = (await client.get("/?group=database")).text
        assert labels_of(grouped)[0] == "shop:t017"
        assert 'id="group/shop"' in grouped
        assert "50 sources</span>" in grouped.replace("\u202f", "") or "50 sources," in grouped

        answer = await client.get("/api/sources?per_page=50")
        assert len(answer.content) < 40_000
        listed = answer.json()
        assert listed["total"] == 200
        assert listed["healths"] == {"bad": 2, "warning": 1, "busy": 2, "good": 195}
        assert [row["label"] for row in listed["items"]] == labels
        assert listed["items"][1]["problems"][0]["runbook"].startswith(RUNBOOKS)
        assert (await client.get("/api/sources?health=bad&q=t017")).json()["total"] == 1
        # The page of a source shows a part of the tables.
        assert len((await client.get("/source?database=shop&sid=t017")).text) < 150_000


def test_a_survey_of_20000_tables_costs_a_request_nothing_but_lines() -> None:
    fleet = large_fleet()
    seen = fleet_overview_of(fleet)
    for source in fleet:
        source["tables"] = None  # a choice that reads tables fails
    for sort in ("need", "name", "lag", "wal"):
        assert len(choose(seen, LineFilter(sort=sort))) == 200
    found = choose(seen, LineFilter(is_grouped=True))
    assert [line.database for line in found[::50]] == ["shop", "stock", "web", "billing"]
    assert groups(found)["shop"] == {"bad": 2, "good": 48}


def test_health_and_queue_show_trouble_and_copies() -> None:
    copying = {"state": "copying", "rows_copied": 5, "bytes_copied": 10, "bytes_total": 100,
               "rows_per_second": 1.0}  # fmt: skip
    seen = fleet_overview_of(
        [
            a_source("a", None, a_table("t")),
            a_source("b", None, a_table("t", **copying), a_table("u", state="error", error="no")),
            a_source("c", None, waiting_for="its turn: number 1 of 1"),
            a_source("d", None, state="starting"),
            a_source("e", None, a_table("t", **copying)),
            a_source("f", None, a_table("t", state="paused")),
        ]
    )
    healths = [line.health for line in seen.lines]
    assert healths == ["good", "bad", "busy", "quiet", "busy", "warning"]
    assert [row["label"] for row in seen.queue] == ["b", "e", "c"]
    assert seen.queue[1]["seconds_left"] == 45.0
    assert not seen.is_shared
    shared = fleet_overview_of([a_source("a", None, process="x"), a_source("b", None, process="y")])
    assert shared.is_shared
    assert [line.label for line in choose(shared, LineFilter("y"))] == ["b"]


def test_a_copy_in_chunks_shows_the_chunk_that_comes() -> None:
    copying = {"state": "copying", "rows_copied": 5, "bytes_copied": 10, "bytes_total": 100,
               "chunks_copied": 2, "chunks_total": 11}  # fmt: skip
    viewed = source_view(
        a_source("a", None, a_table("t", **copying), a_table("u", state="copying"))
    )
    progress = getattr(environment().get_template("macros.html").module, "progress")  # noqa: B009
    shown = [str(progress(table | {"activity": None})) for table in viewed["tables"]]
    assert ", chunk 3 of about 11" in shown[0]
    assert "chunk" not in shown[1]


class Requested:
    """Records requests about many sources; the request of t017 fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, list[str], dict[str, Any]]] = []
        monkeypatch.setattr(act_on_many_sources, "request_each", self._request)

    async def _request(
        self, address: Any, action: str, sources: list[SourceKey], **options: Any
    ) -> list[SourceOutcome]:
        self.calls.append((action, [key.label for key in sources], options))
        return [
            SourceOutcome(key.database, key.sid, 0, f"no table to {action}", "see the status")
            if key.sid == "t017"
            else SourceOutcome(key.database, key.sid, 100)
            for key in sources
        ]


async def token_of(client: httpx.AsyncClient, path: str) -> str:
    found = re.search(r'name="csrf" value="([^"]+)"', (await client.get(path)).text)
    assert found is not None
    return found[1]


async def test_an_act_on_many_sources_is_confirmed_with_counts_and_lists_failures(
    open_admin: OpenAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Requested(monkeypatch)
    async with open_admin("", is_alone=False) as admin, admin.client(None) as client:
        show_fleet(admin.service, large_fleet(), tmp_path)
        page = (await client.get("/sources/act?action=pause&pick=shop:t017&pick=web:t003")).text
        assert "Pause tables of 2 sources?" in page
        assert "<strong>200 tables</strong>" in page
        page = (await client.get("/sources/act?action=resync&which=all&health=bad")).text
        assert "Resync tables of 2 sources?" in page
        assert page.index("those that are in error: <strong>1 table<") < page.index(
            "all: <strong>200 tables<"
        )
        assert asked.calls == [], "a look asks for nothing"
        for refused in ("action=drop&which=all", "action=pause", "action=pause&pick=nobody"):
            assert (await client.get(f"/sources/act?{refused}")).status_code == 422

        given: dict[str, Any] = {"action": "pause", "pick": ["shop:t017", "web:t003"], "state": ""}
        assert (await client.post("/sources/act", data=given)).status_code == 403
        assert asked.calls == []
        csrf = await token_of(client, "/sources/act?action=pause&which=all")
        answer = await client.post("/sources/act", data=given | {"csrf": csrf})
        assert answer.status_code == 303
        assert asked.calls[0][:2] == ("pause", ["shop:t017", "web:t003"])
        done = (await client.get(answer.headers["location"])).text
        assert "Requested pause of 100 tables in 1 source</h1>" in done
        assert "1 source of 2 did not accept the request" in done
        assert done.index("no table to pause") < done.index("web:t003"), "failures come first"
        assert (await client.get("/sources/done?result=other")).status_code == 404

        resync = given | {"action": "resync", "state": "error", "mode": "diff", "csrf": csrf}
        assert (await client.post("/sources/act", data=resync)).status_code == 303
        options = asked.calls[1][2]
        assert (options["state"], options["options"]) == ("error", {"mode": "diff"})
        # A history whose changes are lost is copied only with consent, which the page can give.
        assert 'name="skip_changes"' in page
        consent = resync | {"skip_changes": "on"}
        assert (await client.post("/sources/act", data=consent)).status_code == 303
        assert asked.calls[2][2]["options"] == {"mode": "diff", "skip_changes": True}
        assert (await client.post("/sources/act", data=resync | {"mode": "x"})).status_code == 422


async def test_the_api_acts_on_many_sources_with_the_guards_of_every_change(
    open_admin: OpenAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Requested(monkeypatch)
    body = {
        "sources": [{"database": "shop", "sid": "t017"}, {"database": "web", "sid": "t003"}],
        "tables": ["public.*"],
        "state": "error",
    }
    async with open_admin(CREDENTIALS, is_alone=False) as admin:
        show_fleet(admin.service, large_fleet(), tmp_path)
        async with admin.client(VIEWER_TOKEN) as viewer, admin.client(None) as nobody:
            for action in act_on_many_sources.ACTIONS:
                assert (await viewer.post(f"/api/sources/{action}", json=body)).status_code == 403
                assert (await nobody.post(f"/api/sources/{action}", json=body)).status_code == 401
            assert (await viewer.get("/api/sources")).status_code == 200
            for path in ("/api/sources/history?database=shop", "/api/fleet/history"):
                assert (await nobody.get(path)).status_code == 401
        assert asked.calls == []
        async with admin.client() as client:
            answer = await client.post("/api/sources/resume", json=body)
            assert answer.status_code == 202
            found = answer.json()
            assert (found["tables"], found["failed"]) == (100, 1)
            assert found["sources"][0]["error"] == "no table to resume"
            assert asked.calls[0][2]["tables"] == ["public.*"]
            wrong: dict[str, Any]
            for wrong in ({"sources": []}, body | {"state": "x"}, body | {"mode": "diff"}):
                answer = await client.post("/api/sources/pause", json=wrong)
                assert answer.status_code == 422, wrong
            answer = await client.post("/api/sources/resync", json=body | {"mode": "diff"})
            assert answer.status_code == 202
            await _look_at_history(admin, client)


async def _look_at_history(admin: Admin, client: httpx.AsyncClient) -> None:
    series = admin.events.history._series
    for number in range(3):
        series.add(1_800_000_000 + 10 * number, {"shop:t017": (0.12345, 2.0, 7.0)})
    path = "/api/sources/history?database=shop&sid=t017"
    assert (await client.get(path)).json() == {
        "source": "shop:t017",
        "times": [1_800_000_000, 1_800_000_010, 1_800_000_020],
        "lag_seconds": [0.123] * 3,
        "changes_per_second": [2.0] * 3,
        "retained_wal_bytes": [7.0] * 3,
        "marks": [],
    }
    assert (await client.get("/api/fleet/history")).json() == {
        "times": [1_800_000_000, 1_800_000_010, 1_800_000_020],
        "lag_seconds": [0.123] * 3,
        "changes_per_second": [2.0] * 3,
        "retained_wal_bytes": [7.0] * 3,
        **{f"p{percent}_seconds": [None] * 3 for percent in (50, 95, 99)},
        "marks": [],
    }
    of_table = path.replace("history", "history/table") + "&table=t"
    answer = (await client.get(of_table)).json()
    assert (answer["table"], answer["held_bytes"]) == ("public.t", [])
    failed = {"source": "shop:t017", "table": None, "state": "error", "error": "no route"}
    for source in ("shop:t017", "shop:t033"):
        admin.events.publish("state", failed | {"source": source})
    for address, text in (
        (path, "shop:t017: no route"),
        (of_table, "shop:t017: no route"),
        ("/api/fleet/history", "shop:t033: no route, and 1 more"),
    ):
        (mark,) = (await client.get(address)).json()["marks"]
        assert (mark["kind"], mark["text"]) == ("error", text)
    newer = await client.get(f"{path}&since=1800000010")
    assert newer.json()["times"] == [1_800_000_020]
    assert (await client.get("/api/sources/history?database=nothing")).status_code == 404


async def test_faulty_patterns_ask_no_source(open_admin: OpenAdmin) -> None:
    async with open_admin("") as admin:
        with pytest.raises(InvalidError):
            await act_on_many_sources.act_on_sources(
                admin.service, "pause", [SourceKey("shop", None)], "x", tables=['"']
            )


def test_a_bulk_resume_leaves_out_tables_that_wait_before_a_mass_delete() -> None:
    key = SourceKey("shop", "eu")
    relations: list[Any] = [
        Relation(1, "public.a", "ready"),
        Relation(2, "public.b", "error"),
        Relation(3, "public.c", "paused", waiting_mass_delete=object()),
        Relation(4, "public.d", "paused"),
    ]
    assert choose_tables(key, "resume", relations, None) == ([2, 4], ["public.c"])
    assert choose_tables(key, "resume", relations, "error") == ([2], [])
    assert choose_tables(key, "pause", relations, None) == ([1, 2], [])
    assert choose_tables(key, "resync", relations, None) == ([1, 2, 3, 4], [])
    only = choose_tables(key, "resume", relations[2:3], None)
    assert isinstance(only, SourceOutcome)
    assert "mass delete" in (only.error or "")
    assert "--sid eu" in (only.hint or "")
    nothing = choose_tables(key, "resume", relations[:1], None)
    assert isinstance(nothing, SourceOutcome)
    assert nothing.error == "no table to resume"


class Relation:
    """A relation in the form that a choice reads."""

    def __init__(
        self, relation_id: int, source: str, state: str, waiting_mass_delete: object = None
    ) -> None:
        self.relation_id = relation_id
        self.source = source
        self.state = state
        self.waiting_mass_delete = waiting_mass_delete


async def test_hostile_names_are_text_on_the_wall_and_in_bulk_acts(
    open_admin: OpenAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_admin("", is_alone=False) as admin, admin.client(None) as client:
        fleet = [
            a_source("shop", "eu", a_table(HOSTILE, state="error", error=HOSTILE)),
            a_source("shop", "us", state="error", error=HOSTILE, waiting_for=HOSTILE),
        ]
        show_fleet(admin.service, fleet, tmp_path)
        for source, row in zip(admin.service.mapping.sources, fleet, strict=True):
            row["sid"] = f"{HOSTILE}{row['sid']}"
            object.__setattr__(source, "sid", row["sid"])

        async def fails(*arguments: Any, **options: Any) -> list[SourceOutcome]:
            return [SourceOutcome("shop", HOSTILE, 0, HOSTILE, HOSTILE)]

        monkeypatch.setattr(act_on_many_sources, "request_each", fails)
        acts = "/sources/act?action=resync&which=all"
        picks = re.findall(r'name="pick" value="', (await client.get("/?view=wall")).text)
        assert len(picks) == 2
        form = {
            "csrf": await token_of(client, acts),
            "action": "pause",
            "state": "",
            "pick": [source.label for source in admin.service.mapping.sources],
        }
        asked = await client.post("/sources/act", data=form)
        for path in ("/?view=wall", f"/?view=wall&q={HOSTILE}&group=database&database={HOSTILE}",
                     "/?view=wall&group=database", acts, asked.headers["location"]):  # fmt: skip
            page = await client.get(path)
            assert page.status_code == 200, (path, page.text)
            assert "<script>alert" not in page.text
            assert "63070007" not in page.text
            assert "&lt;script&gt;alert(1)" in page.text, path
