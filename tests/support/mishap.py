"""An operator's views of a mishap: the status, readiness and the page, and commands to copy."""

import html
import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from streamer.commands.demo.embedded_servers import free_port
from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up, command, report
from tests.support.streamer import write_config
from tests.support.waiting import eventually, polls

SEEN_SECONDS: Final = 15.0
"""How long a cause may be missing from a view, on a machine without further work."""
READY_SECONDS: Final = 90.0
VIEWS: Final = ("readyz", "page", "status", "doctor")
"""In the order of the cost of a read."""
ALL_ALIKE: Final = (VIEWS,)
BY_READER: Final = (("readyz", "page"), ("status", "doctor"))
"""Groups of views with equal words, for causes that each connection attempt or each reader of a
file describes differently. The process reads once for two views, and each command reads separately.
"""
_FIGURES: Final = re.compile(r"\d[\d.,]*( (ms|s|min|h))?")
"""Figures that grow between two views."""
_CODE: Final = re.compile(r'<span class="option">([^<]*)</span>|</?code>|`')
_MARKS: Final = re.compile(r"(<[^>]*>|[;,:\s])+")
"""The page marks up code, and puts the parts of a problem on separate lines, where other views use
punctuation.
"""
_FORM: Final = re.compile(r'<form method="post" action="([^"]+)">(.*?)</form>', re.DOTALL)
_FIELD: Final = re.compile(r'name="([^"]+)" value="([^"]*)"')


def seen_seconds(seconds: float = SEEN_SECONDS) -> float:
    """Return *seconds* of an idle machine, scaled by the present load of this machine."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Site:
    """A running process of the program, and all views of an operator."""

    def __init__(self, config: Path, port: int, source: Database, target: Database) -> None:
        self.config = config
        self.base = f"http://127.0.0.1:{port}"
        self.source = source
        self.target = target
        self.environment: dict[str, str] = {}
        self.arguments: tuple[str, ...] = ()
        self.process: Process

    @contextmanager
    def running(self, *, until_ready: bool = True, spark: bool = False) -> Iterator[None]:
        """Run the program during a block."""
        with Process(self.config, *self.arguments, environment=self.environment, spark=spark) as it:
            self.process = it
            if until_ready:
                self.is_ready()
            yield
            self.output = it.output

    # ---- looking -------------------------------------------------------------------------------

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response | None:
        try:
            return httpx.get(f"{self.base}{path}", headers=headers, timeout=30)
        except httpx.TransportError:
            return None

    def is_ready(self) -> None:
        """Wait until readiness reports success."""

        deadline = time.monotonic() + READY_SECONDS
        for _ in polls(2 * READY_SECONDS, every=0.1):
            answer = self.get("/readyz")
            if answer is not None and answer.status_code == 200:
                return
            text = "no answer" if answer is None else answer.text
            is_alive = self.process.process.poll() is None
            assert is_alive, self.process.output
            assert time.monotonic() < deadline, f"{text}\n{self.process.output}"

    def view(self, name: str) -> str:
        """Return the present text of a view."""
        if name == "status":
            return "\n".join(_strings(self.status()))
        if name == "doctor":
            result = command(self.config, "doctor", "--json")
            return "\n".join(_strings(json.loads(result.stdout))) or result.stderr
        if name == "readyz":
            ready = self.get("/readyz")
            return "" if ready is None else "\n".join(_strings(ready.json()))
        page = self.get("/")
        return "" if page is None else html.unescape(_CODE.sub(r"\1", page.text))

    def status(self) -> Any:
        """Return the output of `streamer status --json`."""
        if "mapping_database" not in self.config.read_text():
            return report(self.config)
        result = command(self.config, "status", "--json")
        return json.loads(result.stdout) if result.stdout else result.stderr

    def sees(
        self,
        cause: str,
        remedy: str,
        *,
        in_views: tuple[str, ...] = VIEWS,
        alike: tuple[tuple[str, ...], ...] = ALL_ALIKE,
        runbook: str | None = None,
        seconds: float = SEEN_SECONDS,
    ) -> str:
        """Wait until every view shows *cause* and *remedy* (patterns), and links to *runbook*.

        The views of each group of *alike* have the same words. *seconds*: see `seen_seconds`.
        Return the remedy's text.
        """
        patterns = [cause, remedy, *([] if runbook is None else [f"/help/runbooks/{runbook}"])]
        began = time.monotonic()
        shown: dict[str, str] = {}
        missing: list[str] = []
        for _ in polls(seen_seconds(seconds), every=0.2):
            shown.clear()
            for name in sorted(in_views, key=VIEWS.index):
                shown[name] = self.view(name)
                missing = [f"{name}: {p}" for p in patterns if not re.search(p, shown[name])]
                if missing:  # the views that cost more can wait
                    break
            else:
                match = re.search(remedy, shown[in_views[-1]])
                assert match is not None
                missing = [
                    text for group in alike for text in self._differences(cause, shown, group)
                ]
                if not missing:
                    print(f"seen after {time.monotonic() - began:.1f} s")  # noqa: T201
                    return match[0]
        missing_lines = "\n".join(missing)
        if "page" in shown:
            shown["page"] = shown["page"].partition("<main")[2]
        raise AssertionError(f"not shown:\n{missing_lines}\n{shown}\n{self.process.output}")

    def _differences(
        self, cause: str, shown: dict[str, str], group: tuple[str, ...]
    ) -> Iterator[str]:
        """Yield the words about *cause* that a view of *group* lacks."""
        views = [name for name in group if name in shown]
        reader = "readyz" if "status" not in views else "status"
        sentences = self._sentences(reader) if views[1:] else []
        # The page folds further problems with the same cause.
        for sentence in [text for text in sentences if re.search(cause, text)][:1]:
            for name in views:
                if _plain(sentence) not in _plain(shown[name]):
                    yield f"{name}: {sentence}"

    def _sentences(self, view: str) -> list[str]:
        """Return the problems of a view, each with its remedy."""
        if view == "readyz":
            answer = self.get("/readyz")
            entries = {} if answer is None else answer.json()
            return [r["error"] for r in entries.get("reasons", []) + entries.get("problems", [])]
        status = self.status()
        problems = status["summary"]["problems"] if isinstance(status, dict) else []
        return ["; ".join(filter(None, (p["problem"], p["remedy"]))) for p in problems]

    # ---- mending -------------------------------------------------------------------------------

    def press(self, label: str) -> None:
        """Send the form of a button of the overview, as a browser would."""
        page = self.get("/")
        assert page is not None
        forms = [
            (to, form) for to, form in _FORM.findall(page.text) if f">{label}</button>" in form
        ]
        assert len(forms) == 1, page.text.partition("<main")[2]
        ((to, form),) = forms
        fields = {name: html.unescape(value) for name, value in _FIELD.findall(form)}
        answer = httpx.post(f"{self.base}{to}", data=fields, timeout=30)
        assert answer.status_code == 303, answer.text

    def run(self, line: str) -> str:
        """Run a command exactly as the program showed it, with this configuration."""
        name, *arguments = shlex.split(line)
        assert name == "streamer", line
        result = command(self.config, *arguments)
        assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
        return result.stdout

    def is_mended(self, *tables: str) -> None:
        """Wait until all tables are ready and all changes visible; then rows are equal."""
        self.is_ready()
        caught_up(self.process, READY_SECONDS)
        for table in tables or ("t",):
            assert_same(self.source, self.target, table)


def _plain(text: str) -> str:
    """Return a text without figures and marks."""
    return _FIGURES.sub("#", _MARKS.sub(" ", _CODE.sub(r"\1", text)))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, str):
        yield value


def make_site(
    directory: Path,
    source: Database,
    target: Database,
    tables: str = "t:",
    *,
    settings: str = "",
    **options: Any,
) -> Site:
    """Write a configuration that serves HTTP on a free port."""
    port = free_port()
    config = directory / "config.yaml"
    write_config(config, source, target, tables, settings=settings, port=port, **options)
    return Site(config, port, source, target)


def make_admin_site(directory: Path, source: Database, target: Database) -> Site:
    """Write a configuration with a mapping database, and apply a mapping of a table."""
    port = free_port()
    config = directory / "config.yaml"
    config.write_text(
        f'target: {{url: "{target.url}"}}\nhttp: {{listen: "127.0.0.1:{port}"}}\n'
        f"spool: {{directory: {directory / 'spool'}}}\n"
        f"mapping_database: {directory / 'mapping.sqlite'}\n"
    )
    site = Site(config, port, source, target)
    site.run(shlex.join(["streamer", "sources", "add", "shop", source.url]))
    site.run("streamer tables add shop t")
    site.run("streamer apply")
    return site


__all__ = ["Site", "eventually", "make_admin_site", "make_site"]
