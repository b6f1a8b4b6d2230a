"""The files that build and publish the package agree with each other and with the package."""

import ast
import itertools
import re
import shutil
import subprocess
import tomllib
from datetime import date
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import streamer
from scripts import release
from streamer.util.migrations import read_migrations
from tests.test_docs import ROOT

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS: Final = ROOT / ".github" / "workflows"


def workflow(name: str) -> dict[str, Any]:
    document = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def classified_pythons() -> set[str]:
    prefix = "Programming Language :: Python :: "
    return {c.removeprefix(prefix) for c in PROJECT["project"]["classifiers"] if prefix in c}


def test_the_build_server_checks_code_documentation_and_tests() -> None:
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()

    assert [c for c in commands if c.startswith("make ")] == [
        "make check",
        "make docs",
        "make test",
    ]


def test_the_forge_runs_the_same_checks_on_each_python_that_the_package_names() -> None:
    job = workflow("checks.yaml")["jobs"]["checks"]

    assert job["steps"][-1]["run"] == ".ci/run"
    assert set(job["strategy"]["matrix"]["python"]) == classified_pythons()


def test_wheels_are_built_for_each_python_that_the_package_names() -> None:
    built = {
        re.sub(r"cp3(\d+)-\*", r"3.\1", tag) for tag in PROJECT["tool"]["cibuildwheel"]["build"]
    }

    assert built == classified_pythons()


def test_wheels_are_built_on_machines_of_each_architecture_without_emulation() -> None:
    job = workflow("release.yaml")["jobs"]["wheels"]

    assert job["runs-on"] == "${{ matrix.os }}"
    assert set(job["strategy"]["matrix"]["os"]) == {
        *("ubuntu-24.04", "ubuntu-24.04-arm"),
        *("macos-15-intel", "macos-15"),
    }
    assert set(PROJECT["tool"]["cibuildwheel"]) == {"build", "skip", "test-command"}


def test_the_newest_version_of_the_change_log_is_the_version_of_the_package() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == release.UNRELEASED.removeprefix("## ").strip()
    for heading in headings[1:2]:
        assert re.fullmatch(rf"{re.escape(streamer.__version__)}, 20\d\d-\d\d-\d\d", heading)


def test_a_released_migration_never_changes() -> None:
    present = set(release.checksums(ROOT))
    released = (ROOT / release.CHECKSUMS).read_text(encoding="ascii").splitlines(keepends=True)

    assert set(released) <= present, "write a new migration: CONTRIBUTING.md, Migrations"


@pytest.mark.parametrize("kind", ["target", "admin"])
def test_each_later_migration_names_the_programs_that_run_on_its_schema(kind: str) -> None:
    migrations = read_migrations(kind)

    assert [migration.number for migration in migrations] == list(range(1, len(migrations) + 1))
    for before, migration in itertools.pairwise(migrations):
        assert migration.sql.startswith("-- needs: "), migration.name
        assert before.needs <= migration.needs <= migration.number


def versions_in(path: Path, version: str) -> int:
    """Count *version* in the file, without packages (``==0.1.0``) and history (``since 0.1.0``)."""
    pattern = rf"(?<![\d.=])(?<!since ){re.escape(version)}(?![\d.])"
    return len(re.findall(pattern, path.read_text(encoding="utf-8", errors="replace")))


def files_with_the_version() -> list[str]:
    """Return the tracked files that contain the version; not the log, results and example values."""
    command = ["git", "-C", str(ROOT), "grep", "--name-only", "--fixed-strings"]
    excluded = ("CHANGELOG.md", "benchmarks/results", "tests", "*.lock")
    paths = [f":!{path}" for path in excluded]
    result = subprocess.run(
        [*command, streamer.__version__, "--", *paths], capture_output=True, text=True, check=True
    )
    return [
        name for name in result.stdout.split() if versions_in(ROOT / name, streamer.__version__)
    ]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that a release changes, and all others that contain the version."""
    shutil.copytree(ROOT / "migrations", tmp_path / "migrations")
    for name in {*files_with_the_version(), *(path for path, _ in release.PLACES)}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Log\n\n## Unreleased\n\n- One.\n\n## 0.1.0, 2026-01-01\n"
    )
    return tmp_path


def test_a_release_writes_the_version_into_each_file_that_contains_the_version(tree: Path) -> None:
    before = {
        name: versions_in(tree / name, streamer.__version__) for name in files_with_the_version()
    }

    release.prepare(tree, "97.98.99", date(2026, 2, 3))

    assert {name: versions_in(tree / name, "97.98.99") for name in before} == before
    assert set(before) == {path for path, _ in release.PLACES}


def test_a_release_names_the_place_that_has_no_version(tree: Path) -> None:
    (tree / "Dockerfile").write_text("FROM python\n")

    with pytest.raises(ValueError, match=r"Dockerfile has no version after '--tag streamer:'"):
        release.prepare(tree, "0.2.0", date(2026, 2, 3))


def test_a_release_writes_version_date_and_checksums(tree: Path) -> None:
    release.prepare(tree, "0.2.0", date(2026, 2, 3))

    assert '\n__version__ = "0.2.0"\n' in (tree / "streamer/__init__.py").read_text()
    assert (tree / "CHANGELOG.md").read_text() == (
        "# Log\n\n## Unreleased\n\n## 0.2.0, 2026-02-03\n\n- One.\n\n## 0.1.0, 2026-01-01\n"
    )
    assert (tree / release.CHECKSUMS).read_text().splitlines(keepends=True) == list(
        release.checksums(ROOT)
    )
    with pytest.raises(ValueError, match="no changes"):
        release.prepare(tree, "0.2.1", date(2026, 2, 3))


@pytest.mark.parametrize(("version", "words"), [("0.1.0", "already has"), ("v0.2", "look like")])
def test_an_unsuitable_version_is_refused(tree: Path, version: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        release.prepare(tree, version, date(2026, 2, 3))


DEPENDENCIES: Final = (ROOT / "docs" / "internals" / "dependencies.md").read_text(encoding="utf-8")
DOCUMENTED: Final = {"_asdict", "_exit", "_fields", "_replace"}
"""Names of the standard library that begin with an underscore and are public all the same."""


def test_the_page_names_each_package_that_the_program_needs() -> None:
    packages = re.findall(r"^\| `([\w\[\]-]+)` \| [a-zA-Z]", DEPENDENCIES, re.MULTILINE)
    required = [re.split("[><=]", text)[0] for text in PROJECT["project"]["dependencies"]]

    assert packages == sorted(required)


def private_names() -> set[str]:
    """Return the attributes with an underscore that the program reads and no module of it has."""
    trees = [ast.parse(path.read_bytes()) for path in (ROOT / "streamer").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    stored = {
        n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
    named = {n.id for n in nodes if isinstance(n, ast.Name)}
    read = {n.attr for n in nodes if isinstance(n, ast.Attribute) and re.match("_[a-z]", n.attr)}
    return read - defined - stored - named - DOCUMENTED


def test_the_page_names_the_private_parts_of_packages_with_their_tests() -> None:
    rows = re.findall(r"^\| `[\w-]+` \| (`.*?) \| .*`(tests/\S+)` \|$", DEPENDENCIES, re.MULTILINE)
    listed = {name for names, _ in rows for name in re.findall(r"\b(_\w+)`", names)}

    assert len(rows) >= 3
    assert private_names() <= listed
    assert all((ROOT / path).exists() for _, path in rows)
