"""Prepares a release: the version in `PLACES`, the change log, and the checksums of the migrations.

``make release VERSION=0.2.0`` runs this module. From then on a test compares the released
migrations with their checksums. CONTRIBUTING.md has the remaining steps.
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
CHECKSUMS: Final = "migrations/released.sha256"
"""The released migrations, in the form of sha256sum."""
UNRELEASED: Final = "## Unreleased\n"
PLACES: Final = (
    ("streamer/__init__.py", '__version__ = "'),
    ("Dockerfile", "--tag streamer:"),
    ("Dockerfile", 'image.version="'),
    ("deploy/helm/streamer/Chart.yaml", "version: "),
    ("deploy/helm/streamer/Chart.yaml", "appVersion: "),
    ("deploy/kubernetes/streamer.yaml", "image: streamer:"),
    ("docs/guides/deploy.md", " streamer:"),
)
"""Files that contain the version, each with the text before the version."""
_VERSION: Final = r"\d+\.\d+\.\d+"


def checksums(root: Path) -> Iterator[str]:
    """Yield the line of each migration in `CHECKSUMS`."""
    for path in sorted((root / "migrations").glob("*/*.sql")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        yield f"{digest}  {path.relative_to(root).as_posix()}\n"


def prepare(root: Path, version: str, day: date) -> None:
    """Write *version* into the files of *root*. Raises ValueError for an unsuitable version."""
    if re.fullmatch(_VERSION, version) is None:
        raise ValueError(f"the version must look like 1.2.3, not {version!r}")
    log = root / "CHANGELOG.md"
    text = log.read_text(encoding="utf-8")
    if f"\n## {version}, " in text:
        raise ValueError(f"CHANGELOG.md already has the version {version}")
    if text.count(UNRELEASED) != 1 or not _changes(text):
        raise ValueError(f"CHANGELOG.md has no changes under {UNRELEASED.strip()!r}")
    text = text.replace(UNRELEASED, f"{UNRELEASED}\n## {version}, {day.isoformat()}\n")
    for place, before in PLACES:
        _replace_version(root / place, before, version)
    log.write_text(text, encoding="utf-8")
    (root / CHECKSUMS).write_text("".join(checksums(root)), encoding="ascii")


def _replace_version(path: Path, before: str, version: str) -> None:
    """Write *version* in place of each version of the file that follows the text *before*."""
    pattern = rf"(?<={re.escape(before)}){_VERSION}"
    text, count = re.subn(pattern, version, path.read_text(encoding="utf-8"))
    if not count:
        raise ValueError(
            f"{path} has no version after {before!r}: mend PLACES in scripts/release.py"
        )
    path.write_text(text, encoding="utf-8")


def _changes(text: str) -> str:
    """Return the section of unreleased changes."""
    return text.partition(UNRELEASED)[2].partition("\n## ")[0].strip()


if __name__ == "__main__":
    try:
        prepare(ROOT, " ".join(sys.argv[1:]), datetime.now(tz=UTC).date())
    except ValueError as exc:
        sys.exit(str(exc))
