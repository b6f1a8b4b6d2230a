"""What is shipped to executors on other machines is all that a task needs there."""

import subprocess
import sys
from pathlib import Path

import psycopg

from streamer.sync.spark_job import SHIPPED, is_local, write_shipped


def test_what_is_shipped_imports_by_itself(tmp_path: Path) -> None:
    """With psycopg and nothing else of ours or of others, also where another version is there."""
    archive = tmp_path / "tasks.zip"
    write_shipped(archive)
    packages = Path(psycopg.__file__).parent.parent
    program = f"""
import sys
sys.path[1:1] = [{str(archive)!r}]
sys.path.append({str(packages)!r})
import streamer.sync.parts
ours = sorted(name for name in sys.modules if name.split(".")[0] == "streamer")
assert all({str(archive)!r} in sys.modules[name].__file__ for name in ours), ours
others = {{"asyncpg", "structlog", "pydantic", "pyspark", "rich"}} & set(sys.modules)
assert not others, others
print(*ours)
"""
    result = subprocess.run(
        [sys.executable, "-I", "-c", program], check=False, capture_output=True, text=True, cwd="/"
    )
    assert result.returncode == 0, result.stderr
    assert tuple(result.stdout.split()) == SHIPPED


def test_only_tasks_in_the_drivers_own_process_are_local() -> None:
    masters = [
        "local",
        "local[*]",
        "local[2,4]",
        "local-cluster[2,1,512]",
        "spark://localhost:7077",
    ]
    assert [is_local(master) for master in masters] == [True, True, True, False, False]
