"""The versions of the program and of the software beside it, for `streamer --version`."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Final

from streamer import __version__
from streamer.compiled import choice
from streamer.postgres.supported_versions import MAJOR_TESTED, VERSION_MIN

_PACKAGE: Final = Path(__file__).parents[1]
COMMIT_FILE: Final = "commit.txt"
"""The file of a wheel with the commit that it was built from. `hatch_build.py` writes the file."""


def commit() -> str | None:
    """Return the hash of the program's commit; None if no wheel and no checkout has the hash."""
    try:
        return (_PACKAGE / COMMIT_FILE).read_text(encoding="ascii").strip()
    except OSError:
        return _head(_PACKAGE.parent / ".git")


def _head(git: Path) -> str | None:
    """Return the commit that a repository or a worktree has checked out (gitrepository-layout)."""
    try:
        if git.is_file():
            git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir: ").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        common = git / "commondir"
        shared = git / common.read_text(encoding="utf-8").strip() if common.exists() else git
        name = head.removeprefix("ref: ")
        if (shared / name).exists():
            return (shared / name).read_text(encoding="ascii").strip()
        packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)


_COMMIT: Final = commit()
"""Read at the import, because the event loop of a process reads no files."""


def labels() -> dict[str, str]:
    """Return the facts about the program alone, as labels of a metric."""
    return {
        "version": __version__,
        "commit": _COMMIT or "",
        "implementation": "pure" if choice.compiled is None else "compiled",
    }


def facts() -> dict[str, str]:
    """Return each fact by the name of its line: `streamer` first, then what it runs with."""
    try:
        spark = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        spark = "not installed"
    return {
        "streamer": f"{__version__} ({choice.describe()})",
        "commit": commit() or "unknown",
        "Python": platform.python_version(),
        "PostgreSQL": f"{VERSION_MIN // 10000} to {MAJOR_TESTED}",
        "Spark": spark,
    }
