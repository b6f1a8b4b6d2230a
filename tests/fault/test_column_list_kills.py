"""Killed while column lists change, the program goes on without an operator and without a gap."""

from functools import partial
from pathlib import Path

import pytest

from tests.support.postgres import Database
from tests.support.process import Process, caught_up, status
from tests.support.streamer import write_config
from tests.support.waiting import eventually

RULES = """
shrinks: {{column_list: true, exclude: [{}]}}
grows: {{column_list: true, exclude: [secret]}}
"""


@pytest.mark.timeout(300)
def test_killed_as_lists_shrink_and_grow(
    tmp_path: Path, source: Database, target: Database
) -> None:
    config = tmp_path / "config.yaml"
    for table in ("shrinks", "grows"):
        source.execute(
            f"create table {table} (id int primary key, v text, w text, secret text);"
            f"insert into {table} values (1, 'a', 'b', 'c')"
        )
    write_config(config, source, target, RULES.format("secret"))
    with Process(config, spark=False) as process:
        caught_up(process)
        process.kill()
    write_config(config, source, target, RULES.format("secret, w"))
    # The target has the column already, so nothing but the list shows that changes lack it.
    target.execute("alter table grows add x text")
    source.execute("alter table grows add x text")
    source.execute("insert into grows values (2, 'a', 'b', 'c', 'x')")
    environment = {"STREAMER_FAILPOINTS": "publication.relisted=kill"}
    with Process(config, spark=False, environment=environment) as process:
        eventually(partial(has_ended, process))
    source.execute("update shrinks set v = 'behind', secret = 'n'; update grows set v = 'behind'")
    with Process(config, spark=False) as process:
        caught_up(process)
        tables = status(config)[0]["tables"]
        assert [table["state"] for table in tables] == ["ready", "ready"], tables
    for rows in ("select id, v from shrinks", "select id, v, w, x from grows order by id"):
        assert target.execute(rows) == source.execute(rows)


def has_ended(process: Process) -> bool:
    return process.process.poll() is not None
