"""The mapping database is lost, deleted or replaced: nothing that is still needed goes with it."""

import json
from pathlib import Path

import httpx

from streamer.commands.demo.embedded_servers import free_port
from tests.support.postgres import Database, assert_same
from tests.support.process import Process, command
from tests.support.waiting import eventually


def get(port: int, path: str) -> httpx.Response | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=30)
    except httpx.HTTPError:
        return None


def shown(port: int, path: str) -> str:
    answer = get(port, path)
    return "" if answer is None else answer.text


def is_ready(port: int) -> bool:
    answer = get(port, "/readyz")
    return answer is not None and answer.status_code == 200


def test_a_lost_mapping_keeps_slots_and_progress_until_it_is_imported_again(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute("create table t (id int primary key); insert into t values (1)")
    port, config = free_port(), tmp_path / "config.yaml"
    database = tmp_path / "mapping.sqlite"
    config.write_text(
        f'target: {{url: "{target.url}"}}\nhttp: {{listen: "127.0.0.1:{port}"}}\n'
        f"spool: {{directory: {tmp_path / 'spool'}}}\nmapping_database: {database}\n"
    )

    def ok(*arguments: str) -> str:
        done = command(config, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ok("sources", "add", "shop", source.url)
    ok("tables", "add", "shop", "t")
    ok("apply")
    with Process(config, spark=False) as process:
        eventually(lambda: is_ready(port), 60, "it streams")
        slot = "select restart_lsn is not null from pg_replication_slots where slot_name = 'streamer_shop'"
        assert source.value(slot) is True

        # Deleted under the running process: it says so, refuses edits, and still streams.
        database.rename(tmp_path / "away")
        eventually(lambda: "was deleted" in shown(port, "/readyz"), 30, "readyz says so")
        assert "was deleted" in shown(port, "/healthz")
        assert "was deleted" in shown(port, "/")
        refused = command(config, "tables", "add", "shop", "other")
        assert refused.returncode != 0
        assert "was deleted" in refused.stderr
        source.execute("insert into t values (2)")
        eventually(lambda: target.value("select count(*) from t") == 2, 30, "it streams")
        backup = tmp_path / "backup.yaml"
        backup.write_text(ok("export"))
        assert backup.read_text().startswith("# Backup of streamer's mapping")

        # Replaced by another file, then put back.
        database.write_bytes(b"")
        eventually(lambda: "was replaced" in shown(port, "/readyz"), 30, "readyz says so")
        (tmp_path / "away").rename(database)
        eventually(lambda: is_ready(port), 30, "the file is back")
        assert "the mapping database is unusable" in process.output
        assert process.terminate() == 0

    for path in tmp_path.glob("mapping.sqlite*"):
        path.unlink()
    source.execute("insert into t values (3)")
    report = command(config, "status", "--json")
    assert report.returncode == 4
    assert '"shop"' in json.loads(report.stdout)["mapping"]["error"]
    with Process(config, spark=False) as process:
        eventually(
            lambda: "the target holds" in shown(port, "/readyz"), 60, "it knows what it lost"
        )
        assert "streamer import" in shown(port, "/readyz")
        assert "the target holds" in shown(port, "/")
        assert "pg_drop_replication_slot" not in process.output
        ok("import", str(backup))
        ok("apply")
        eventually(lambda: is_ready(port), 60, "it goes on")
        eventually(lambda: target.value("select count(*) from t") == 3, 30, "nothing is missed")
        assert_same(source, target, "t")
        assert target.value("select attempt from streamer.relation") == 1, "no second copy"
        assert process.terminate() == 0
