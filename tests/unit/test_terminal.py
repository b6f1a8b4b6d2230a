"""The end of a command: one line, and an exit code."""

import pytest
import typer

from streamer.cli.terminal import fail, run_to_end


def test_a_command_that_fails_while_it_runs_keeps_its_line_and_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work() -> None:
        fail("a process still runs it", 1)

    with pytest.raises(typer.Exit) as end:
        run_to_end(work())
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == "streamer: a process still runs it\n"
