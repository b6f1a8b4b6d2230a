"""``streamer demo`` as users run the command: both sides end equal, and no file stays without
`--keep`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from streamer.commands.demo import shop_tables
from streamer.commands.demo.demo_servers import DemoError, check_spark
from streamer.config import static_mapping
from streamer.mapping.rule_options import TableType
from tests.support.runbooks import block
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.spark]


class Demo:
    """A demo in a separate temporary directory, which identifies its processes."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-m", "streamer", "demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if "--json" not in arguments else subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(directory)},
        )

    def read_until(self, text: str) -> str:
        """Read lines until a line contains *text*; return all lines."""
        assert self.process.stdout is not None
        read = ""
        for line in self.process.stdout:
            read += line
            if text in line:
                return read
        raise AssertionError(f"{text!r} was never said:\n{read}")

    def processes(self) -> list[str]:
        """Return the command lines of all processes that belong to the demo."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"TMPDIR={self.directory}".encode() in path.read_bytes():
                    found.append(path.with_name("cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # the process has just ended
        return found

    def assert_nothing_is_left(self) -> None:
        eventually(lambda: not self.processes(), what="processes of the demo are left")
        assert list(self.directory.iterdir()) == []


@pytest.fixture
def place(server_directory: Path, request: pytest.FixtureRequest) -> Path:
    """Where a demo makes its directory: the servers' user can enter, too."""
    path = server_directory / re.sub(r"\W", "-", request.node.name)
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    return path


@pytest.mark.follows("runbooks:demo-fails#1")
def test_demo_ends_equal_and_kept_leaves_nothing_behind_once_stopped(place: Path) -> None:
    _, _, *keep = block("demo-fails#1").split()
    demo = Demo(place, *keep, "--seconds", "2", "--json")

    output, said = demo.process.communicate()

    assert demo.process.returncode == 0, said
    report = json.loads(output)
    assert report["equal"]
    assert {table["table"] for table in report["tables"]} == {t.source for t in shop_tables.TABLES}
    assert report["rows_copied"] > 100_000
    assert report["changes"] > 0
    for line in ("rows copied", "changes streamed", "peak lag", "equal            yes"):
        assert line in said
    assert_is_ready(said)
    (directory,) = place.iterdir()
    subprocess.run([directory / "stop"], check=True)
    demo.assert_nothing_is_left()


def assert_is_ready(said: str) -> None:
    """The program whose metrics' URL was *said* runs, and is in step."""
    metrics = re.search(r"metrics +(http://\S+)", said)
    assert metrics
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(metrics[1].replace("/metrics", "/readyz"), timeout=60) as answer:
        assert answer.status == 200
    address = metrics[1].removesuffix("metrics")
    assert f"page of streamer: {address}" in said
    assert re.search(rf"page +{re.escape(address)}", said)
    with opener.open(address, timeout=60) as answer:
        assert answer.status == 200
        assert b"shop:eu" in answer.read()


def test_interrupt_leaves_no_process_and_no_directory(place: Path) -> None:
    demo = Demo(place, "--seconds", "60")
    demo.read_until("Spark starts")
    assert demo.processes()

    demo.process.send_signal(signal.SIGINT)
    rest, _ = demo.process.communicate()

    assert demo.process.returncode == 130, rest
    assert "Traceback" not in rest
    demo.assert_nothing_is_left()


def test_the_configuration_lists_the_compared_tables(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "target: {url: postgresql://host/dw}\nsources:\n  - database: shop\n"
        f"    urls: [{{url: postgresql://host/shop}}]\n    tables:\n{shop_tables.TABLES_YAML}"
    )

    _, mapping = static_mapping.load(path)

    (source,) = mapping.sources
    found = [
        (
            str(rule.pattern),
            str(rule.target or rule.pattern),
            rule.type,
            tuple(sorted(rule.exclude)),
        )
        for rule in source.rules
    ]
    assert found == [(t.source, t.target, t.type, t.excluded) for t in shop_tables.TABLES]
    assert {t.type for t in shop_tables.TABLES} == set(TableType)


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.22"])
def test_old_java_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(DemoError, match="Java 17") as refused:
        check_spark()
    assert "install a Java runtime of version 17" in str(refused.value.hint)


def test_missing_java_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(DemoError, match="cannot be run"):
        check_spark()
