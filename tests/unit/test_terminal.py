"""The end of a command: a line, and an exit code."""

from pathlib import Path

import pytest
import typer

from streamer.cli.terminal import fail, run_to_end
from streamer.util.owned_directory import OwnedDirectory


def test_a_command_that_fails_while_it_runs_keeps_its_line_and_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work() -> None:
        fail("a process still runs it", 1)

    with pytest.raises(typer.Exit) as end:
        run_to_end(work())
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == "streamer: a process still runs it\n"


def test_a_temporary_directory_that_others_may_exchange_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)

    async def work() -> None:
        OwnedDirectory(tmp_path, "streamer-compare-").close()

    with pytest.raises(typer.Exit) as end:
        run_to_end(work())
    assert end.value.exit_code == 2
    printed = capsys.readouterr().err
    assert f"cannot use {tmp_path} for temporary files: other users may replace it" in printed
    assert "set TMPDIR to a directory of streamer's own user" in printed
