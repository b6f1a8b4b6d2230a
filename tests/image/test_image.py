"""The Dockerfile's steps, as far as they run without a container engine: `make image`."""

import json
import os
import re
import shlex
import shutil
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
START_SECONDS: Final = 300.0
"""The machine may be busy."""


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


def instruction(name: str) -> list[str]:
    """Return the words of an instruction that the Dockerfile gives as a JSON array."""
    (words,) = re.findall(rf"^{name} (?:.* )?(\[.*\])$", DOCKERFILE, re.MULTILINE)
    return [str(word) for word in json.loads(words)]


def of_installed(words: list[str], installed: Path) -> list[str]:
    """Return a command of the image with the program that the tests have installed."""
    place = words.index("streamer")
    program = [sys.executable, str(installed / "bin" / "streamer")]
    return [*words[:place], *program, *words[place + 1 :]]


@pytest.fixture
def listen() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def write_mounted(directory: Path, listen: str) -> None:
    """Write the file that the user of the image mounts."""
    (directory / "config.yaml").write_text(
        f"http: {{listen: '{listen}'}}\n"
        "target: {url: 'postgresql://nobody@127.0.0.1:1/dw'}\n"
        "sources: [{database: shop, urls: [{url: 'postgresql://nobody@127.0.0.1:1/shop'}],"
        " tables: {customers: }}]\n"
    )


@pytest.fixture
def running(
    installed: Path, tmp_path: Path, listen: str, init: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The image's first process with its variables, waiting for a target that is not there."""
    write_mounted(tmp_path, listen)
    words = instruction("ENTRYPOINT") + instruction("CMD")
    assert words[0] == Path(init).name
    variables = dict(re.findall(r"\b(STREAMER_\w+)=(\S+)", DOCKERFILE))
    assert list(variables) == ["STREAMER_SPOOL__DIRECTORY"]
    process = subprocess.Popen(
        of_installed(words, installed),
        cwd=tmp_path,
        env=environment(installed, STREAMER_SPOOL__DIRECTORY=str(tmp_path / "spool")),
        stderr=subprocess.DEVNULL,
    )
    yield process
    process.terminate()
    process.wait(timeout=START_SECONDS)


def is_healthy(installed: Path, directory: Path, **variables: str) -> bool:
    """Run the image's health check; the engine reserves all exit codes but 0 and 1."""
    command = of_installed(instruction("HEALTHCHECK"), installed)
    check = subprocess.run(
        command,
        cwd=directory,
        env=environment(installed, **variables),
        capture_output=True,
        check=False,
    )
    assert check.returncode in (0, 1), check.stderr
    return check.returncode == 0


def test_health_check_asks_the_address_of_the_mounted_file(
    installed: Path, tmp_path: Path, running: "subprocess.Popen[bytes]"
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(installed, tmp_path):
        assert running.poll() is None
        assert time.monotonic() < deadline

    running.terminate()
    assert running.wait(timeout=START_SECONDS) == 0
    assert not is_healthy(installed, tmp_path)


def test_health_check_asks_the_address_of_a_variable_first_and_none_without_http(
    installed: Path, tmp_path: Path, listen: str
) -> None:
    write_mounted(tmp_path, "")

    assert is_healthy(installed, tmp_path)
    assert not is_healthy(installed, tmp_path, STREAMER_HTTP__LISTEN=listen)


# ---- the first process -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def init() -> str:
    """The init that the Dockerfile installs, from the distribution of the tests."""
    path = shutil.which("tini")
    assert path is not None, "the image's init is missing: apt-get install tini"
    assert re.search(r"apt-get install .* tini\b", DOCKERFILE)
    return path


ORPHAN: Final = """
import os, time
end, start = os.pipe()
answer, said = os.pipe()
if (parent := os.fork()) == 0:
    if (orphan := os.fork()) == 0:
        os.close(start)
        os.read(end, 1)
        os._exit(0)
    os.write(said, str(orphan).encode())
    os._exit(0)
os.waitpid(parent, 0)
status = f"/proc/{int(os.read(answer, 20))}/stat"
os.close(start)  # the orphan reads to the end, and ends
deadline = time.monotonic() + 100
outcome = "never ended"
while time.monotonic() < deadline:
    try:
        state = open(status).read().rpartition(")")[2].split()[0]
    except OSError:
        outcome = "reaped"
        break
    if state == "Z" and os.getpid() == 1:  # no further process could reap the orphan
        outcome = "zombie"
        break
print(outcome)
"""
"""Leaves an orphan behind, lets the orphan end, and prints whether pid 1 reaps the orphan."""


@pytest.mark.parametrize(("has_init", "outcome"), [(False, "zombie"), (True, "reaped")])
def test_orphans_of_the_program_are_reaped(has_init: bool, outcome: str, init: str) -> None:
    """The namespace of a container begins with pid 1, as here. Without an init, the program is pid 1."""
    options = ["--fork", "--pid", "--mount-proc"]
    if os.getuid():
        options += ["--user", "--map-root-user"]
    first = [init, "--"] if has_init else []

    said = subprocess.run(
        ["unshare", *options, *first, sys.executable, "-c", ORPHAN],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )

    assert said.stdout.strip() == outcome, said.stderr
