"""`streamer --version` and the metric `streamer_build_info` describe the program."""

import subprocess
from pathlib import Path

import pytest

from streamer.observability import build_facts
from tests.support.invoking import invoke


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of a program, with a commit."""
    directory = tmp_path / "checkout"
    (directory / "streamer").mkdir(parents=True)
    git(directory, "init", "--quiet")
    git(directory, "commit", "--quiet", "--allow-empty", "--message", "first")
    monkeypatch.setattr(build_facts, "_PACKAGE", directory / "streamer")
    return directory


def test_a_checkout_tells_its_commit(repository: Path) -> None:
    assert build_facts.commit() == git(repository, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "arguments",
    [
        ["pack-refs", "--all"],
        ["checkout", "--quiet", "--detach"],
        ["checkout", "--quiet", "-b", "feature/a"],
    ],
)
def test_every_state_of_a_repository_tells_its_commit(
    arguments: list[str], repository: Path
) -> None:
    git(repository, *arguments)
    assert build_facts.commit() == git(repository, "rev-parse", "HEAD")


def test_a_worktree_tells_its_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "worktree", "add", "--quiet", "-b", "second", str(tmp_path / "second"))
    git(tmp_path / "second", "commit", "--quiet", "--allow-empty", "--message", "second")
    monkeypatch.setattr(build_facts, "_PACKAGE", tmp_path / "second" / "streamer")
    assert build_facts.commit() == git(tmp_path / "second", "rev-parse", "HEAD")


def test_a_wheel_tells_the_commit_of_its_sources(repository: Path) -> None:
    (repository / "streamer" / build_facts.COMMIT_FILE).write_text("0123abcd\n")
    assert build_facts.commit() == "0123abcd"


def test_an_installation_of_unknown_origin_says_so(repository: Path, tmp_path: Path) -> None:
    (repository / ".git").rename(tmp_path / "git")
    assert build_facts.commit() is None
    assert "\ncommit unknown\n" in invoke("--version").stdout


def test_the_version_names_the_software_beside_the_program() -> None:
    lines = invoke("--version").stdout.splitlines()
    names = [line.partition(" ")[0] for line in lines]
    assert names == ["streamer", "commit", "Python", "PostgreSQL", "Spark"]
