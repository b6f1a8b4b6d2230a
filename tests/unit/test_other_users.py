"""streamer obeys no directory and no file of a foreign user of the machine."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streamer.apply.lanes.spool import SpoolDirectory
from streamer.compare import parquet_report
from streamer.config.settings import SpoolSettings
from streamer.copy.spark import job
from streamer.errors.error_classes import SpoolError
from streamer.postgres.credentials import ConnectionUrl, job_url
from streamer.postgres.password_source import PasswordSource, open_job_url
from streamer.util.owned_directory import NotPrivateError, make_private, read_private

NOBODY = 65534
# Makes streamer's directory before streamer does, and replaces the first job in the directory.
ATTACK = """
mkdir "$1" && chmod 777 "$1" && echo ready
until set -- "$1" "$2" "$1"/streamer-* && test -d "$3"; do :; done
mv "$3" "$3-own" && mkdir "$3" && cat > "$3/job-1.json" && echo done
"""


@pytest.fixture
def shared_temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of all users, like /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        path = Path(name)
        path.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield path


def foreign(path: Path) -> Path:
    """Give *path* to a foreign user; without the right to do so, return a path of root."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        return path
    return Path("/" if path.is_dir() else "/etc/passwd")


def test_another_user_cannot_make_the_spool_and_name_a_command(shared_temporary: Path) -> None:
    spool, loot = SpoolSettings().path, shared_temporary / "loot"
    command = shlex.join(["sh", "-c", f"id -u > {loot}; echo password"])
    url = {"url": "host=db", "now": "host=db", "file": None, "command": command, "seconds": 1}
    ends = {"source_url": json.dumps(url), "target_url": json.dumps(url), "server": [], "fence": []}
    forged = {"tasks": [[]], "ends": ends | {"snapshot_name": "", "application_name": ""}}
    with subprocess.Popen(
        ["sh", "-c", ATTACK, "attack", str(spool)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        user=NOBODY if os.geteuid() == 0 else None,
    ) as attacker:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        try:
            attacker.stdin.write(json.dumps(forged))
            assert attacker.stdout.readline() == "ready\n"
            with pytest.raises(SpoolError) as refused:
                job.run_job(cast("Any", None), SpoolDirectory(spool).path / "job-1.json")
        finally:
            attacker.kill()
    owner = f"it belongs to the user with id {NOBODY}, not to this user"
    assert f"cannot use {spool} for held changes: " in str(refused.value)
    if os.geteuid() == 0:
        assert owner in str(refused.value)
        assert refused.value.hint == "set spool.directory to a directory of streamer's own user"
    assert not loot.exists()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o1777])
def test_a_directory_that_others_may_use_is_refused_with_the_command(
    mode: int, tmp_path: Path
) -> None:
    (path := tmp_path / "the spool").mkdir()
    path.chmod(mode)
    with pytest.raises(SpoolError, match=f"its mode is {mode:04o}") as refused:
        SpoolDirectory(path)
    assert refused.value.hint is not None
    subprocess.run(shlex.split(refused.value.hint), check=True)
    SpoolDirectory(path).close()


def test_another_user_cannot_exchange_a_directory_on_the_way(shared_temporary: Path) -> None:
    make_private(shared_temporary / "own" / "spool")  # the sticky bit keeps what is ours

    (open_to_all := shared_temporary / "open").mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(NotPrivateError, match=f"because {open_to_all} has the mode 0777"):
        make_private(open_to_all / "spool")
    with pytest.raises(SpoolError, match="other users may replace it"):
        SpoolDirectory(open_to_all / "spool")

    (link := shared_temporary / "link").symlink_to(open_to_all)
    with pytest.raises(NotPrivateError, match=f"because {open_to_all} has the mode 0777"):
        make_private(link / "spool")

    open_to_all.chmod(0o755)
    make_private(link / "spool")
    if os.geteuid() == 0:
        os.lchown(link, NOBODY, NOBODY)
        with pytest.raises(NotPrivateError, match=f"{link} above it belongs to the user with id"):
            make_private(link / "spool")
        open_to_all.chmod(0o775)
        os.chown(open_to_all, 0, NOBODY)
        with pytest.raises(NotPrivateError, match=f"because {open_to_all} has the mode 0775"):
            make_private(open_to_all / "spool")
        foreign(open_to_all)
        with pytest.raises(NotPrivateError, match=f"{open_to_all} above it belongs to the user"):
            make_private(open_to_all / "spool")


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotPrivateError, match="symbolic link"):
        make_private(link)


def test_missing_directories_are_made_for_this_user_alone(tmp_path: Path) -> None:
    make_private(path := tmp_path / "a" / "b")
    assert {each.stat().st_mode & 0o777 for each in (path, path.parent)} == {0o700}
    make_private(path)
    with pytest.raises(NotPrivateError):
        make_private(foreign(path))


def test_a_job_of_another_user_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "job-1.json"
    path.write_text("{}")
    path.chmod(0o644)
    with pytest.raises(NotPrivateError, match="its mode is 0644"):
        read_private(path)
    path.chmod(0o600)
    assert read_private(path) == "{}"
    with pytest.raises(NotPrivateError):
        job.run_job(cast("Any", None), foreign(path))


def test_a_driver_reads_the_job_of_a_report_in_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of a cluster writes this job for a driver of this machine."""
    jobs = []

    def read_job(command: list[str], **_: object) -> None:
        jobs.append(json.loads(read_private(Path(command[-1]))))

    monkeypatch.setattr(subprocess, "run", read_job)
    cluster = cast("Any", SimpleNamespace(master="spark://host:7077"))
    parquet_report.write_parquet(cluster, tmp_path / "rows.parquet", {}, [])

    assert [fields["program"] for fields in jobs] == ["parquet"]
    assert list(tmp_path.iterdir()) == []


async def test_a_job_names_no_command(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = shlex.join([sys.executable, "-c", f"open({str(mark)!r}, 'a'); print('secret')"])
    text = await job_url(ConnectionUrl("host=db", PasswordSource(command=command, seconds=60)))
    assert "print(" not in text
    mark.unlink()
    forged = json.loads(text) | {"kept": None, "command": command, "seconds": 0}
    assert "secret" in open_job_url(json.dumps(forged))  # the password of the job's start
    assert not mark.exists()
