"""The Dockerfile's steps, as far as they run without a container engine: `make image`."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from streamer.admin.page.manual_page import manual_texts

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[2]
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")
START_SECONDS: Final = 60.0


def step(containing: str) -> list[str]:
    """Return the one RUN command that contains a text, as words, to be run with this Python."""
    (line,) = (r for r in re.findall(r"^RUN (.*)$", DOCKERFILE, re.MULTILINE) if containing in r)
    assert line.startswith("python ")
    return [sys.executable, *shlex.split(line)[1:]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the image's own command, with the build tools that are locked."""
    directory = tmp_path_factory.mktemp("wheels")
    command = step("--wheel-dir /wheels .")
    command[command.index("/wheels")] = str(directory)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = directory.glob("pg_streamer-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the wheel is installed in. Its dependencies are taken from here."""
    directory = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", directory, wheel], check=True)
    return directory


def environment(installed: Path, **variables: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(installed)} | variables


def test_wheel_holds_every_migration(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {
            name: archive.read(name)
            for name in archive.namelist()
            if name.startswith("streamer/migrations/")
        }

    assert shipped == {
        f"streamer/migrations/{path.relative_to(ROOT / 'migrations')}": path.read_bytes()
        for path in (ROOT / "migrations").rglob("*.*")
    }


def test_wheel_holds_the_page(wheel: Path) -> None:
    page = ROOT / "streamer/admin/page"
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())

    for folder in ("templates", "static"):
        files = {str(path.relative_to(ROOT)) for path in (page / folder).iterdir()}
        assert len(files) >= 3
        assert files <= shipped


def test_wheel_holds_every_page_of_the_manual(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())

    assert {f"streamer/docs/{name}.md" for name in manual_texts()} <= shipped


def test_program_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = "import streamer, streamer.util.migrations as m; print(streamer.__file__); "
    program += "print(len(m.read_migrations('target')))"

    said = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    helped = subprocess.run(
        [sys.executable, installed / "bin" / "streamer", "--help"],
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert Path(said[0]).is_relative_to(installed)
    assert int(said[1]) > 0
    assert "teardown" in helped


def health_command() -> list[str]:
    (found,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    command = json.loads(found)
    assert command[0] == "python"
    return [sys.executable, *command[1:]]


@pytest.fixture
def listen() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def running(installed: Path, tmp_path: Path, listen: str) -> Iterator[subprocess.Popen[bytes]]:
    """The image's command with the image's variables, waiting for a target that is not there."""
    (tmp_path / "config.yaml").write_text(
        "target: {url: 'postgresql://nobody@127.0.0.1:1/dw'}\n"
        "sources: [{database: shop, urls: [{url: 'postgresql://nobody@127.0.0.1:1/shop'}],"
        " tables: {customers: }}]\n"
    )
    process = subprocess.Popen(
        [sys.executable, installed / "bin" / "streamer", "run"],
        cwd=tmp_path,
        env=environment(
            installed,
            STREAMER_HTTP__LISTEN=listen,
            STREAMER_SPOOL__DIRECTORY=str(tmp_path / "spool"),
        ),
        stderr=subprocess.DEVNULL,
    )
    yield process
    process.terminate()
    process.wait(timeout=START_SECONDS)


def is_healthy(listen: str) -> bool:
    return (
        subprocess.run(
            health_command(),
            env=os.environ | {"STREAMER_HTTP__LISTEN": listen},
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode
        == 0
    )


def test_health_command_tells_a_running_process_from_none(
    listen: str, running: "subprocess.Popen[bytes]"
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(listen):
        assert running.poll() is None
        assert time.monotonic() < deadline

    running.terminate()
    assert running.wait(timeout=START_SECONDS) == 0
    assert not is_healthy(listen)
