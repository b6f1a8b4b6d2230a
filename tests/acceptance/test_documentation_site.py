"""The documentation builds as a site."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    """The test runs the command of ``make docs`` and writes the site elsewhere."""
    (command,) = re.findall(r"\$\(python\) (-m mkdocs .*)$", (ROOT / "Makefile").read_text(), re.M)

    result = subprocess.run(
        [sys.executable, *command.split(), "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "site" / "runbooks" / "table-in-error.html").is_file()
