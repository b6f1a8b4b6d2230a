"""The output of `run --log-format json`: an object a line, which names its subject."""

import json
from pathlib import Path
from typing import Any

from streamer.util.lsn import Lsn
from tests.support.postgres import Database
from tests.support.process import Process, command
from tests.support.streamer import write_config
from tests.support.waiting import eventually

SECRET = "hunter2-of-the-log"


def test_lines_name_source_table_and_lsn(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, v text)")
        db.execute("create table q (id int primary key)")
    target.execute("alter table t add check (v <> 'bad'); alter table q add check (id < 10)")
    source.parameters = f"password={SECRET}"
    path = tmp_path / "config.yaml"
    tables = "t: {on_error: stop}\nq: {on_error: quarantine, initial: none}"
    write_config(path, source, target, tables, sid="eu:1")

    with Process(path, "--log-format", "json", spark=False) as process:

        def lines() -> list[dict[str, Any]]:
            # A line that is not JSON fails here.
            return [json.loads(line) for line in process.output.splitlines()]

        def said(event: str) -> dict[str, Any] | None:
            return next((line for line in lines() if line["event"] == event), None)

        eventually(lambda: said("table copied"), what=process.output)
        source.execute("insert into t values (1, 'bad')")
        source.execute("insert into q values (11)")
        stopped = eventually(lambda: said("table stopped"), what=process.output)
        assert stopped["runbook"] == "/help/runbooks/table-in-error"
        eventually(lambda: said("rows are in quarantine"), what=process.output)
        target.execute("alter table t drop constraint t_v_check")
        eventually(lambda: said("table recovered"), what=process.output)
        assert command(path, "quarantine", "retry").returncode == 0
        eventually(lambda: said("rows in quarantine were applied again"), what=process.output)
        # The connection is lost: the error does not name the source, but the line does.
        slot = (
            "select active_pid from pg_replication_slots where slot_name like 'streamer_shop_eu%'"
        )
        source.execute(f"select pg_terminate_backend(({slot}))")
        eventually(
            lambda: [line for line in lines() if line["event"].endswith(", retrying")],
            what=process.output,
        )
        assert process.terminate() == 0
        found = lines()

    names = {line["event"] for line in found}
    about_tables = {
        *("table copied", "table stopped", "table recovered"),
        *("rows are in quarantine", "rows in quarantine were applied again"),
    }
    assert about_tables < names
    for line in found:
        assert {"event", "level", "timestamp"} <= set(line)
        if "source" in line:
            assert (line["source"], line["database"], line["sid"]) == ("shop:eu:1", "shop", "eu:1")
        if line["event"] in about_tables:
            assert line["table"] in ("public.t", "public.q")
        if line["event"] in about_tables or line["event"].endswith(", retrying"):
            assert line["database"] == "shop"
    for event in ("streaming", "table copied"):
        (first, *_) = [line for line in found if line["event"] == event]
        assert Lsn.parse(first["lsn"])
    assert Lsn.parse(stopped["lsn"])
    assert SECRET not in json.dumps(found)
