"""A real browser, and a running process behind the pages.

A headless Chromium serves all tests here. `SCREENSHOTS=DIRECTORY` has the tests leave pictures
there: light, dark and on a phone.
"""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.chromium import launch
from tests.support.postgres import Database
from tests.support.process import Process
from tests.support.waiting import eventually

WAIT_MS = 30_000

expect.set_options(timeout=WAIT_MS)


# Of the package, not of the session: while Playwright's synchronous side works, no test can have an
# event loop in this thread.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = launch(playwright.chromium)
        yield started
        started.close()


class Watched:
    """Records violations by a page: of the policy, in the script, by requests to a foreign site."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.faults: list[str] = []

    def watch(self, page: Page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", self._on_error)
        page.on("request", self._on_request)
        page.on("response", self._on_response)

    def _on_error(self, error: Any) -> None:
        self.faults.append(f"script: {error}")

    def _on_console(self, message: Any) -> None:
        is_answer = message.text.startswith("Failed to load resource")
        if message.type == "error" and not is_answer:
            self.faults.append(f"console: {message.text}")

    def _on_response(self, response: Any) -> None:
        if response.status >= 500:
            self.faults.append(f"{response.status}: {response.url}")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.base, "data:", "blob:")):
            self.faults.append(f"request: {request.url}")


class Site:
    """A running process, and its pages."""

    def __init__(self, process: Process, base: str, browser: Browser) -> None:
        self.process = process
        self.base = base
        self._browser = browser
        self._watched = Watched(base)
        self._contexts: list[Any] = []

    def page(self, **options: Any) -> Page:
        """Open a page as a new user."""
        options = {"viewport": {"width": 1200, "height": 900}} | options
        context = self._browser.new_context(base_url=self.base, **options)
        context.set_default_timeout(WAIT_MS)
        self._contexts.append(context)
        page = context.new_page()
        self._watched.watch(page)
        return page

    def map_tables(self, source: Database, *tables: str) -> None:
        """Stream *tables* of *source*, for a test whose subject is not how a user adds them."""
        urls = [{"url": source.url}]
        group = {"database": "shop", "urls": urls, "tables": {table: {} for table in tables}}
        with httpx.Client(base_url=self.base, timeout=60) as client:
            # JSON is YAML.
            for path, body in (
                ("import", {"yaml": json.dumps({"sources": [group]})}),
                ("apply", {}),
            ):
                client.post(f"/api/{path}", json=body).raise_for_status()

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        assert self._watched.faults == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


class Sites:
    """Starts processes on configurations of a test's own."""

    def __init__(self, directory: Path, target: Database, browser: Browser) -> None:
        self.directory = directory
        self._target = target
        self._browser = browser
        self._started: list[Site] = []

    def start(self, settings: str = "", *, environment: dict[str, str] | None = None) -> Site:
        """Run with *settings* added to the settings of every test."""
        port = free_port()
        config = self.directory / "config.yaml"
        config.write_text(
            f"""
target: {{url: "{self._target.url}"}}
http: {{listen: "127.0.0.1:{port}"}}
spool: {{directory: {self.directory / "spool"}}}
{"" if "sources:" in settings else f"mapping_database: {self.directory / 'mapping.sqlite'}"}
{settings}
"""
        )
        process = Process(config, spark=False, environment=environment)
        site = Site(process, f"http://127.0.0.1:{port}", self._browser)
        self._started.append(site)
        eventually(lambda: _answers(site.base), what=process.output, seconds=60)
        return site

    def close(self) -> None:
        try:
            for site in self._started:
                site.close()
        finally:
            for site in self._started:
                if site.process.process.poll() is None:
                    site.process.kill()


def _answers(base: str) -> bool:
    try:
        return httpx.get(f"{base}/healthz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def sites(tmp_path: Path, target: Database, browser: Browser) -> Iterator[Sites]:
    made = Sites(tmp_path, target, browser)
    yield made
    made.close()


WIDTHS = (1280, 390, 320)
"""The widths that every page fits: a desktop, a phone and a small phone."""


_WIDE = """[...document.querySelectorAll("body *")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML.slice(0, 120))"""


def look(page: Page, name: str) -> None:
    """Check that a page fits all widths, and save pictures of the page if SCREENSHOTS names a
    directory.
    """
    size = page.viewport_size
    assert size is not None
    if directory := os.environ.get("SCREENSHOTS"):
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": 1280, "height": 900})
            page.screenshot(path=Path(directory) / f"{name}-{scheme}.png", full_page=True)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        wide = page.evaluate(_WIDE) if overflow > 0 else []
        assert overflow <= 0, f"{name}: {overflow} pixels too wide for {width}: {wide}"
    if directory:
        page.set_viewport_size({"width": 390, "height": 900})
        page.screenshot(path=Path(directory) / f"{name}-phone.png", full_page=True)
    page.set_viewport_size(size)


_WATCH_SHIFTS = """() => {
    window.shifts = [];
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) {
            // A number at the right edge of its column grows to the left.
            const moved = entry.sources.map(({node}) => node)
                .filter((node) => !(node?.nodeType === 3 && node.parentElement?.closest(".number")))
                .map((node) => (node?.outerHTML ?? node?.nodeValue ?? "").slice(0, 160));
            if (moved.length) window.shifts.push([entry.value, ...moved]);
        }
    }).observe({type: "layout-shift"});
}"""


def watch_shifts(page: Page) -> None:
    """Record the shifts of the layout of a page from now on."""
    page.evaluate(_WATCH_SHIFTS)


def shifts_of(page: Page) -> list[Any]:
    """Return the recorded shifts, each with the elements that moved."""
    # The browser reports a shift after the frame with the shift.
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    shifts: list[Any] = page.evaluate("window.shifts")
    return shifts
