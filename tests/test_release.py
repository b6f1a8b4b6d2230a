"""The files that build and publish the package agree with each other and with the package."""

import ast
import re
import tomllib
from typing import Any, Final

import yaml

import streamer
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


def test_a_release_needs_a_dated_entry_in_the_change_log() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    newest = re.search(r"^## (\S+), (unreleased|20\d\d-\d\d-\d\d)$", text, re.MULTILINE)
    assert newest is not None
    assert newest[1] == streamer.__version__


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
