"""Trees of the program in other versions than the version under test.

As a program, the module becomes `streamer` of the tree in the variable TEST_TREE, in a new
interpreter.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import streamer
from streamer.util.migrations import read_migrations

ROOT: Final = Path(__file__).parents[2]
NEXT: Final = "99.0.0"
VARIABLE: Final = "TEST_TREE"
NEWEST: Final = read_migrations("target")[-1].number
NEEDED: Final = max(migration.needs for migration in read_migrations("target"))
"""The migration that all running programs of this version certainly know."""
_MIGRATION: Final = f"""\
-- needs: {NEEDED}
alter table streamer.source add column taste text not null default 'sweet';
alter table streamer.relation add column taste text not null default 'sweet';
alter table streamer.replica add column taste text not null default 'sweet';
alter table streamer.request add column taste text not null default 'sweet';
"""


def next_tree(directory: Path) -> Path:
    """Make the tree of the next version, whose migration adds columns; return *directory*."""
    shutil.copytree(ROOT / "streamer", directory / "streamer")
    shutil.copytree(ROOT / "migrations", directory / "migrations")
    (directory / f"migrations/target/{NEWEST + 1:04}_next.sql").write_text(_MIGRATION)
    module = directory / "streamer" / "__init__.py"
    text = module.read_text(encoding="utf-8")
    module.write_text(text.replace(f'"{streamer.__version__}"', f'"{NEXT}"'), encoding="utf-8")
    return directory


def released_tree(directory: Path) -> Path:
    """Return the tree of the last release; or the tree under test, if there is no such tree.

    A clone may lack the tags, and the last release may be too old for this bookkeeping.
    """
    tags = _git("tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname").split()
    if tags:
        directory.mkdir()
        archive = directory / "tree.tar"
        _git("archive", "--output", str(archive), tags[0], "streamer", "migrations")
        shutil.unpack_archive(archive, directory, filter="data")
        if _newest(directory) >= NEEDED:
            return directory
    return ROOT


def version_of(tree: Path) -> str:
    """Return the version of the program in *tree*."""
    text = (tree / "streamer" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    return str(version)


def _newest(tree: Path) -> int:
    return max(int(path.name[:4]) for path in (tree / "migrations/target").glob("*.sql"))


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    return result.stdout


if __name__ == "__main__":
    os.chdir(os.environ[VARIABLE])
    os.execv(sys.executable, [sys.executable, "-m", "streamer", *sys.argv[1:]])
