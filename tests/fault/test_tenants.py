"""A tenant's life: added, compared, removed, and purged by commands that are killed."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.commands.tenants.purge_rows import purge
from streamer.commands.tenants.tenant_list import read_tenants
from streamer.config import static_mapping
from streamer.errors.error_classes import MappingError
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, database
from tests.support.process import command, run
from tests.support.runbooks import run_block
from tests.support.streamer import Streamer
from tests.support.waiting import until

pytestmark = [
    pytest.mark.usefixtures("without_spark", "short_backoffs"),
    pytest.mark.timeout(240),
]

CONFIG = """
target: {{url: "{target}"}}  # the warehouse
http: {{listen: ""}}
spool: {{directory: {spool}}}
sources:
- database: shop
  urls:
  # Tenants, in the order of their coming.
  - {{url: "{source}", sid: eu}}
  tables:
    orders:
    items:
    log: {{type: append}}
    parts: {{keys: disjoint}}
"""
DDL = """
create table orders (id int primary key, v text);
create table items (id int primary key, v text);
create table log (id int primary key, v text);
create table parts (id int primary key, v text);
insert into parts values (1, 'v');
insert into orders select n, repeat('x', 50) from generate_series(1, 2000) n;
insert into items select n, 'v' from generate_series(1, 300) n;
insert into log select n, 'v' from generate_series(1, 300) n;
"""
LEFT = "select count(*) from {} where sid = 'us'"
SLOTS = "select count(*) from pg_replication_slots where database = current_database()"


async def tenants(config: Path, *arguments: str, failpoints: str = "") -> tuple[int, Any]:
    """Run `streamer tenants`; return the exit code, and the JSON or the message."""
    done = await asyncio.to_thread(
        run,
        "streamer",
        *("--config", str(config), "tenants", *arguments, "--json"),
        environment={"STREAMER_FAILPOINTS": failpoints},
        seconds=120,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


@pytest.mark.follows("runbooks:remove-a-source#2")
@pytest.mark.follows("runbooks:remove-a-source#3")
async def test_a_tenant_is_added_compared_removed_and_purged_despite_kills(
    shared_server: Server, source: Database, target: Database, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(source=source.url, target=target.url, spool=tmp_path / "spool"))
    address = TargetAddress.parse(static_mapping.load(path)[0].target.url)
    with database(shared_server, "source_us") as us:
        for db in (source, us):
            db.execute(DDL)
        us.execute("alter table items add more int; alter table log add check (id > 0)")
        us.execute("update parts set id = 2")
        streamer = Streamer(path)
        streamer.start()
        try:
            await streamer.caught_up(60)

            # Added by a line, which the process reads.
            code, said = await tenants(path, "add", "shop", us.url, "--sid", "us")
            assert (code, said["tenants"], said["lines"]) == (0, ["shop:us"], [])
            assert "  # Tenants, in the order of their coming.\n" in path.read_text()
            us.execute("alter table items drop more")
            both = static_mapping.load(path)[1]
            await streamer.engine.apply(both)
            streamer.mapping = both
            await streamer.caught_up(60)
            assert target.value("select count(*) from orders") == 4000

            us.execute("alter table items add more int")
            code, drift = await tenants(path, "drift", "items", "log")
            assert code == 1
            unequal = {
                (item["table"], item["kind"], item["name"]): item["deviating"]
                for item in drift["items"]
                if not item["equal"]
            }
            assert unequal[("public.items", "column", "more")] in (
                {"shop:us": "integer"},
                {"shop:eu": None},
            )
            assert ("public.log", "check", "CHECK ((id > 0))") in unequal

            # A column of this tenant, which the target has after the tenant's removal.
            target.execute("alter table log add column own int")
            us.execute("alter table log add column own int; insert into log values (900, 'v', 1)")
            await streamer.caught_up(60)

            # The purge deletes no rows of a mapped tenant.
            code, said = await tenants(path, "purge", "shop", "--sid", "us", "--yes")
            assert code == 2
            assert "is in the mapping" in said
            (eu, _) = both.sources
            without = replace(both, sources=(eu,))
            with pytest.raises(MappingError, match=r'source "shop:us" is streaming'):
                await purge(address, without, "shop", "us", actor="test")

            # Removed: the process reads the file again, and drops the slot.
            remove = asyncio.to_thread(run_block, path, "remove-a-source#2", {"eu": "us"})
            removing = asyncio.create_task(remove)

            async def is_taken_out() -> bool:
                return us.url not in path.read_text()

            await until(is_taken_out, seconds=60)
            mapping = static_mapping.load(path)[1]
            assert us.value(SLOTS) == 1
            await streamer.engine.apply(mapping)
            streamer.mapping = mapping
            await removing
            assert us.value(SLOTS) == 0
            (_, left) = await read_tenants(address, mapping)
            assert (left.label, left.state) == ("shop:us", "removed")
            assert {part.target for part in left.purge} == {
                "public.orders",
                "public.items",
                "public.log",
            }
            code, said = await tenants(path, "add", "shop", us.url, "--sid", "us")
            assert code == 2
            assert "tenants purge shop --sid us --yes" in said

            assert await remedies(path) == ["run first: streamer tenants purge shop --sid us --yes"]
            await killed_purges(path, target)
            await asyncio.to_thread(run_block, path, "remove-a-source#3", {"eu": "us"})
            for table, count in (("orders", 2000), ("items", 300), ("log", 300)):
                assert target.value(LEFT.format(table)) == 0
                assert target.value(f"select count(*) from {table}") == count
            # Rows without a sid remain. The purge says so, also if a purge was interrupted before.
            arguments = ("tenants", "purge", "shop", "--sid", "us", "--yes")
            done = await asyncio.to_thread(command, path, *arguments)
            assert done.returncode == 0
            assert done.stderr.splitlines()[0] == (
                'rows of "shop:us" may remain in public.parts, because the table has no column sid; '
                "delete them by hand, by their keys; or, to copy the tables that still write to "
                "public.parts, run: streamer resync public.parts --database shop --sid eu"
            )
            assert target.execute("table parts order by id") == [(1, "v"), (2, "v")]
            assert await remedies(path) == [
                'run at the target: alter table "public"."log" drop column "own"'
            ]
            target.execute("alter table log drop column own")
            assert await remedies(path) == []
            assert (await read_tenants(address, mapping))[1:] == []
            source.execute("insert into orders values (0, 'new')")
            await streamer.caught_up(60)
            assert target.value("select count(*) from orders where sid = 'eu'") == 2001
            assert target.value("select count(*) from streamer.source") == 1
        finally:
            await streamer.stop()


async def remedies(config: Path) -> list[str]:
    """Return the remedies for columns that only a removed tenant had."""
    _, drift = await tenants(config, "drift", "log")
    return [item["remedy"] for item in drift["items"] if item["remedy"] is not None]


async def killed_purges(config: Path, target: Database) -> None:
    """Kill purges before and after their commits: no deleted row is uncounted."""
    deleted = "select coalesce(sum(rows_deleted), 0) from streamer.purge"
    before = 2601
    for failpoint in ("purge.deleted=kill", "purge.stored=kill", "purge.deleted=kill@2"):
        code, _ = await tenants(
            config, "purge", "shop", "--sid", "us", "--yes", failpoints=failpoint
        )
        assert code == -9
        there = sum(int(str(target.value(LEFT.format(t)))) for t in ("orders", "items", "log"))
        assert target.value(deleted) == before - there
    acts = "select state from streamer.request where action = 'purge' order by id"
    assert target.execute(acts) == [("failed",), ("failed",), ("running",)]
