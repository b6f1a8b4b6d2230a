"""The page of a large fleet in a browser: 200 sources with 20,000 tables, without servers."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import WIDTHS, Watched, free_port, look
from tests.support.forks import ForkedProcess
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE_BYTES_MAX = 100_000
HISTORY_BYTES_MAX = 60_000


@pytest.fixture
def base(tmp_path: Path) -> Iterator[str]:
    """Serve a large fleet; return the address."""
    port = free_port()
    log = tmp_path / "fleet.log"
    server = ForkedProcess(
        "tests.support.fleet",
        [str(port)],
        environment=dict(os.environ),
        stdout=Path(os.devnull),
        stderr=log,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: _answers(address), 60, what=str(log))
        yield address
    finally:
        server.kill()
        server.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def rows(page: Page) -> list[str]:
    return page.locator("#wall-rows tr[id^=line] > td > a:first-child").all_inner_texts()


def test_an_operator_finds_the_source_in_trouble_among_200_and_acts_on_many(
    base: str, browser: Browser
) -> None:
    watched = Watched(base)
    context = browser.new_context(base_url=base, viewport={"width": 1200, "height": 900})
    page = context.new_page()
    watched.watch(page)
    sizes: dict[str, int] = {}
    page.on("response", lambda r: sizes.update({r.url: len(r.body())}) if "text/" in
            r.headers.get("content-type", "") and "event-stream" not in r.headers["content-type"]
            else None)  # fmt: skip
    page.goto("/")
    expect(page.get_by_role("heading", level=1)).to_contain_text("199 of 200 sources stream")
    expect(page.locator("#connection")).to_have_text("live")
    assert rows(page)[:2] == ["shop:t017", "shop:t033"]
    look(page, "wall")

    # A tab and a key lead to the first problem.
    problem = page.get_by_role("row").filter(has=page.get_by_role("link", name="shop:t033"))
    expect(problem).to_contain_text("column note is missing")
    expect(problem.get_by_role("link", name="Runbook")).to_have_attribute(
        "href", re.compile("/help/runbooks/")
    )
    page.get_by_role("link", name="in trouble 2").press("Enter")
    expect(page.locator("#wall-rows tr[id^=line]")).to_have_count(2)
    page.goto("/")
    page.get_by_label("Source or table").fill("t19")
    page.get_by_label("Source or table").press("Enter")
    expect(page.locator("#wall-rows tr[id^=line]")).to_have_count(10)
    page.goto("/")
    page.get_by_label("By database").check()
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("rowheader", name="shop 50 sources, 2 in trouble")).to_be_visible()
    look(page, "wall-by-database")

    # A refresh keeps ticks, focus and the tools of the script.
    page.goto("/?health=bad")
    page.get_by_role("checkbox", name="Choose shop:t033").check()
    page.evaluate("refresh()")
    expect(page.get_by_role("checkbox", name="Choose shop:t033")).to_be_checked()
    expect(page.get_by_role("button", name="Select all shown")).to_be_visible()
    page.get_by_role("checkbox", name="Choose shop:t033").uncheck()
    page.get_by_role("button", name="Select all shown").press("Enter")
    page.get_by_role("button", name=re.compile("^Pause")).click()
    expect(page.get_by_role("heading", name="Pause tables of 2 sources?")).to_be_visible()
    expect(page.get_by_role("radio", name="all: 200 tables")).to_be_checked()
    look(page, "bulk")
    page.get_by_role("button", name=re.compile("^Pause")).click()
    expect(page.get_by_role("alert")).to_contain_text("1 source of 2")
    expect(page.get_by_role("row", name="shop:t017")).to_contain_text("no table to pause")
    look(page, "bulk-done")

    # The page draws the history of a source under its policy, in both colour schemes.
    page.goto("/source?database=shop&sid=t017")
    lag = page.get_by_role("img", name=re.compile("^Lag, the last 3. min: now .* at most"))
    expect(lag.locator("canvas")).to_be_visible()
    page.get_by_role("button", name="6 h").press("Enter")
    expect(page.get_by_role("button", name="6 h")).to_have_attribute("aria-pressed", "true")
    page.evaluate("refresh()")
    expect(page.locator(".chart canvas")).to_have_count(3)
    look(page, "history")

    # The charts stand side by side, in a column on a phone, and share the cursor.
    for width, is_one_row in ((1280, True), (390, False)):
        page.set_viewport_size({"width": width, "height": 900})
        boxes = [chart.bounding_box() for chart in page.locator(".plot").all()]
        assert {box["height"] for box in boxes if box} == {120}
        assert (len({box["y"] for box in boxes if box}) == 1) == is_one_row, boxes
    page.set_viewport_size({"width": 1280, "height": 900})
    page.locator(".plot").first.hover()
    expect(page.locator(".legend")).to_have_text(re.compile(r"^\d\d:\d\d UTC$"))
    for value, form in zip(page.locator(".then").all(), (r"s$", r"/s$", r"B$"), strict=True):
        expect(value).to_have_text(re.compile(form))
    page.locator("h1").hover()
    expect(page.locator(".legend")).to_have_text("restart error copy")
    look(page, "history")

    pages = [size for url, size in sizes.items() if "/static/" not in url and "/help" not in url]
    assert max(pages) < PAGE_BYTES_MAX
    history = httpx.get(f"{base}/api/sources/history?database=shop&sid=t017")
    assert len(history.content) < HISTORY_BYTES_MAX
    context.close()
    assert watched.faults == []


PATHS = ("/", "/source?database=shop&sid=t033", "/events", "/events?kind=mapping", "/quarantine", "/conflicts",
         "/tenants", "/mapping", "/history", "/help", "/nothing")  # fmt: skip


def test_keys_lead_to_places_and_every_page_has_its_navigation_in_one_row(
    base: str, browser: Browser
) -> None:
    watched = Watched(base)
    context = browser.new_context(base_url=base, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    watched.watch(page)
    for path in PATHS:
        page.goto(path)
        look(page, "at" + re.sub(r"\W+", "-", path))
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            links = page.locator(".top nav a").all()
            assert len({link.evaluate("e => e.offsetTop") for link in links}) <= 1, (path, width)
        page.set_viewport_size({"width": 1280, "height": 900})

    # Keys work at once after a click, and keys in a field are text.
    page.goto("/source?database=shop&sid=t033")
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keys")
    expect(keys).to_contain_text("go to the events")
    look(page, "keys")
    page.keyboard.press("Escape")
    expect(keys).to_be_hidden()
    page.get_by_role("button", name="keys").click()
    keys.get_by_role("button", name="Close").click()
    expect(keys).to_be_hidden()
    page.keyboard.press("/")
    expect(page.get_by_label("Name or sid", exact=True)).to_be_focused()
    page.keyboard.type("ge?/")
    expect(page.get_by_label("Name or sid", exact=True)).to_have_value("ge?/")
    page.locator("h1").click()
    page.keyboard.press("g")
    page.keyboard.press("e")
    expect(page).to_have_url(f"{base}/events")
    page.keyboard.press("/")
    expect(page.get_by_label("Kind")).to_be_focused()
    page.get_by_label("Kind").select_option("errors")
    page.get_by_role("button", name="Show").click()
    expect(page).to_have_url(f"{base}/events?kind=errors&source=")
    page.keyboard.press("e")  # without g
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page).to_have_url(f"{base}/")
    page.goto("/quarantine")
    page.keyboard.press("/")
    expect(page.get_by_label("Source or table")).to_be_focused()
    context.close()
    assert watched.faults == []
