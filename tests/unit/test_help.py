"""The help of the command line: panels, a plain sentence and an example for each command."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from streamer.cli.main import app
from streamer.cli.shared_options import PANELS
from tests.support.invoking import invoke

PROGRAM: Any = typer.main.get_command(app)


def leaves(group: Any = PROGRAM, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*prefix, name))
        else:
            yield " ".join((*prefix, name)), command


COMMANDS = dict(leaves())


def test_the_help_shows_the_panels_in_their_order() -> None:
    shown = invoke("--help", environment={"COLUMNS": "200", "TERM": "dumb"}).output
    places = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    assert {getattr(command, "rich_help_panel", None) for command in PROGRAM.commands.values()} == {
        *PANELS
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_commands_and_options_consists_of_sentences(name: str) -> None:
    command = COMMANDS[name]
    for text in (command.help, *(p.help for p in command.params if p.name != "help")):
        assert re.fullmatch(r"\S.*[.]", text, re.DOTALL), text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_is_one_that_it_accepts(name: str) -> None:
    label, _, line = COMMANDS[name].epilog.partition(": ")
    assert label == "Example"
    words = shlex.split(re.sub(r" > \S+$", "", line))
    assert words[0] == "streamer"
    # Parsing alone: a missing argument, an unknown option or a wrong value raises.
    context = PROGRAM.make_context("streamer", words[1:])
    group = PROGRAM
    for word in name.split():
        arguments = [*context._protected_args, *context.args]
        assert arguments[0] == word
        group = group.commands[word]
        context = group.make_context(word, arguments[1:], parent=context)
