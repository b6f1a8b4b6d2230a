"""The blocks of the documentation, and their commands as an operator types them.

The place ``runbooks:PAGE#N`` is the block with number N of a runbook. A test that runs this block in
the situation of the page has the marker ``follows`` with the place. The place ``guides:PAGE#N``, or
``docs:PAGE#N`` above the folders, is the block with number N of a page's blocks ``sh``. A test that
runs such a block contains the place. No test runs a block ``shell``. *names* of a test stand in place
of names of the page, such as ``orders``.
"""

import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.process import ROOT, Process, command

NO_NAMES: Final[Mapping[str, str]] = {}
_BLOCK: Final = re.compile(r"^ *```.*?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_COMMANDS: Final = re.compile(r"^ *```sh\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_PLACE: Final = re.compile(r'"((?:guides|docs):[\w-]+#\d+)"')


def read_blocks() -> dict[str, str]:
    """Return the text of each block by its place."""
    return {
        f"runbooks:{path.stem}#{number}": textwrap.dedent(text)
        for path in sorted((ROOT / "docs" / "runbooks").glob("*.md"))
        for number, text in enumerate(_BLOCK.findall(path.read_text(encoding="utf-8")), 1)
    }


def read_commands() -> dict[str, str]:
    """Return the text of each block ``sh`` outside of the runbooks by its place."""
    docs = ROOT / "docs"
    pages = {"guides": docs.glob("guides/*.md"), "docs": [*docs.glob("*.md"), ROOT / "README.md"]}
    return {
        f"{folder}:{path.stem}#{number}": textwrap.dedent(text)
        for folder, paths in pages.items()
        for path in sorted(paths)
        for number, text in enumerate(_COMMANDS.findall(path.read_text(encoding="utf-8")), 1)
    }


def read_run() -> set[str]:
    """Return the places of guides and pages whose blocks tests run."""
    tests = (ROOT / "tests").rglob("test_*.py")
    return {place for path in tests for place in _PLACE.findall(path.read_text(encoding="utf-8"))}


def block(place: str, names: Mapping[str, str] = NO_NAMES) -> str:
    """Return the text of a block with *names*."""
    text = read_commands()[place] if ":" in place else read_blocks()[f"runbooks:{place}"]
    for name, replacement in names.items():
        parts = re.split(rf"(?<!\w){re.escape(name)}(?!\w)", text)
        assert len(parts) > 1, f"{place} does not name {name}"
        text = replacement.join(parts)
    return text


def run_block(
    config: Path, place: str, names: Mapping[str, str] = NO_NAMES, *, code: int = 0
) -> str:
    """Run the commands of a block beside *config*, and return their output.

    *code*: the exit code of the last command.
    """
    output = ""
    *first, last = block(place, names).splitlines()
    for line, expected in [*((line, 0) for line in first), (last, code)]:
        words, _, file = line.partition(" > ")
        program, *arguments = shlex.split(words, comments=True)
        assert program == "streamer", line
        result = command(config, *arguments)
        assert result.returncode == expected, f"{line}\n{result.stdout}{result.stderr}"
        output += result.stdout
        if file:
            (config.parent / file).write_text(result.stdout)
    return output


def start_block(config: Path, place: str, names: Mapping[str, str] = NO_NAMES) -> Process:
    """Start the program by the line `streamer run …` of a block."""
    program, action, *arguments = shlex.split(block(place, names))
    assert (program, action) == ("streamer", "run"), place
    return Process(config, *arguments, spark=False)
