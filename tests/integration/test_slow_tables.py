"""A table that is slow at the target, and the tables and sources beside it."""

from pathlib import Path

import pytest

from streamer.apply.write import worker
from streamer.runtime.process import open_services
from tests.support.postgres import Database, assert_same
from tests.support.streamer import Streamer

pytestmark = pytest.mark.usefixtures("without_spark")

CONFIG = """
target: {{url: "{target}"}}
http: {{listen: ""}}
workers: 1
spool: {{directory: {spool}}}
sources:
- database: shop
  urls: [{{url: "{source}"}}]
  tables: {{slow:, fast:}}
- database: crm
  urls: [{{url: "{source}"}}]
  tables: {{other:}}
"""
# A statement sees the commits before its start, so the trigger waits until the gate is opened.
GATE = """
create table gate ();
create function wait_at_gate() returns trigger language plpgsql as $$
begin
    while not exists (select from public.gate) loop perform pg_sleep(0.05); end loop;
    return new;
end $$;
create trigger gate before insert on slow for each row execute function wait_at_gate();
alter table slow enable always trigger gate;
"""


async def test_a_slow_table_stops_no_other_table_and_no_other_source(
    source: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_services, "QUEUE_BYTES_MAX", 200_000)
    monkeypatch.setattr(worker, "SLOW_SECONDS", 1.0)
    for table in ("slow", "fast", "other"):
        source.execute(f"create table {table} (id int primary key, note text)")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(source=source.url, target=target.url, spool=tmp_path / "spool"))
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        target.execute(GATE)
        source.execute("insert into slow values (0, 'first')")

        async def is_at_gate() -> bool:
            running = (
                "select 1 from pg_stat_activity where state = 'active' and wait_event = 'PgSleep'"
            )
            return bool(target.execute(f"{running} and datname = '{target.name}'"))

        await streamer.eventually(is_at_gate)
        for number in range(1, 60):
            source.execute(f"insert into slow values ({number}, repeat('x', 10000))")
        source.execute("insert into fast values (1, 'soon'); insert into other values (1, 'soon')")

        async def has_arrived() -> bool:
            arrived = "select (select count(*) from fast) + (select count(*) from other)"
            return target.value(arrived) == 2

        await streamer.eventually(has_arrived, 40)
        assert target.value("select count(*) from slow") == 0
        target.execute("insert into gate default values")
        await streamer.caught_up(40)
        for table in ("slow", "fast", "other"):
            assert_same(source, target, table)
    finally:
        target.execute("insert into gate default values")
        await streamer.stop()
