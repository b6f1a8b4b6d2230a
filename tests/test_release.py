"""The files that build and publish the package agree with each other and with the package."""

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
