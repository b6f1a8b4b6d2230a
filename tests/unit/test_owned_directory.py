"""A process's directory: the process removes it at the end, or the next process at the start."""

import subprocess
import sys
from pathlib import Path

from streamer.util.owned_directory import OwnedDirectory

PROGRAM = """
import sys
from pathlib import Path
from streamer.util.owned_directory import OwnedDirectory
directory = OwnedDirectory(Path(sys.argv[1]), "streamer-x-")
(directory.path / "job-1.json").write_text("secret")
print(directory.path, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_a_directory_that_the_next_one_removes(tmp_path: Path) -> None:
    other = tmp_path / "streamer-x-foreign"
    other.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        with OwnedDirectory(tmp_path, "streamer-x-") as ours:
            assert (theirs / "job-1.json").exists(), "its process lives"
            assert ours.stat().st_mode & 0o777 == 0o700
        assert not ours.exists()
        process.kill()
    assert theirs.exists()
    with OwnedDirectory(tmp_path, "streamer-x-"):
        assert not theirs.exists()
    assert other.exists(), "no lock file says whose it is"


def test_a_directory_that_a_cleaner_removed_is_made_again(tmp_path: Path) -> None:
    with OwnedDirectory(tmp_path, "streamer-x-") as ours:
        (ours / "lock").unlink()
        ours.rmdir()
    directory = OwnedDirectory(tmp_path, "streamer-x-")
    (directory.path / "lock").unlink()
    directory.path.rmdir()
    directory.make_again()
    with OwnedDirectory(tmp_path, "streamer-x-"):
        assert directory.path.exists(), "its lock is there again"
    directory.close()
