"""The program's commands in the process of the test."""

from unittest import mock

from typer.testing import CliRunner, Result

from streamer.cli.main import app
from streamer.observability import logs


def invoke(*arguments: str, stdin: str = "", environment: dict[str, str] | None = None) -> Result:
    """Run ``streamer`` with *arguments*, and without the log, which would outlive the command."""
    with mock.patch.object(logs, "configure"):
        return CliRunner().invoke(app, list(arguments), input=stdin, env=environment)
