"""The choice between the extension module and pure Python."""

import builtins
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from streamer.compiled import choice
from streamer.errors.error_classes import SettingsError


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extension module."""
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "streamer.compiled" and rest[2] == ("_compiled",):
            raise ModuleNotFoundError(name="streamer.compiled._compiled")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_pure_python_is_used_when_it_is_asked_for() -> None:
    assert choice.choose("pure") == (None, "STREAMER_IMPLEMENTATION is set")


@pytest.mark.usefixtures("not_built")
def test_an_installation_without_compiler_names_the_missing_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    module, reason = choice.choose("")
    assert module is None
    assert reason.startswith("no C compiler (")
    with pytest.raises(SettingsError, match="no C compiler"):
        choice.choose("compiled")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert choice.choose("")[1] == f"no Python headers (Python.h in {tmp_path})"


def test_a_module_of_another_source_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = choice.choose("")
    if module is None:
        return  # not built on this machine
    monkeypatch.setattr(module, "SOURCE_CRC", module.SOURCE_CRC ^ 1)
    assert choice.choose("") == (None, "it was built from another source")


def test_an_unknown_implementation_is_one_line_on_every_command() -> None:
    for arguments in (["--version"], ["status"]):
        done = subprocess.run(
            [sys.executable, "-m", "streamer", *arguments],
            env=os.environ | {"STREAMER_IMPLEMENTATION": "fast"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            'streamer: STREAMER_IMPLEMENTATION must be "pure" or "compiled", not \'fast\''
        ]


def test_the_version_names_the_implementation() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streamer", "--version"],
        env=os.environ | {"STREAMER_IMPLEMENTATION": "pure"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *_ = done.stdout.splitlines()
    assert first.endswith("(pure Python: STREAMER_IMPLEMENTATION is set)")
