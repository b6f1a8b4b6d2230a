"""The commands of the tutorial and of the guides, as a reader types them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from streamer.commands.demo.embedded_servers import free_port
from streamer.config import static_mapping
from tests.support.postgres import Database, drop_database
from tests.support.process import ROOT, Process, caught_up, command
from tests.support.runbooks import block, run_block
from tests.support.waiting import eventually

TABLES: Final = """
create schema sales;
create table customers (id int primary key, region text);
create table orders (id int primary key, region text, v text);
create table items (id int primary key, name text, price int, customer int references customers);
create table sales.returns (id int primary key);
insert into customers values (1, 'EU'), (2, 'US');
insert into orders values (1, 'EU', 'a'), (2, 'US', 'b');
insert into items values (1, 'pen', 2, 1);
"""
CONFIG: Final = """\
target: {{url: "{target}"}}
http: {{listen: "127.0.0.1:{port}"}}
spool: {{directory: "{directory}/spool"}}
sources:
- database: shop
  urls: [{{url: "{source}", sid: eu}}]
  tables: {{customers: , orders: , items: , sales.returns: }}
"""


@pytest.fixture
def config(source: Database, target: Database, tmp_path: Path) -> Path:
    """A configuration of the tables that the guides name."""
    source.execute(TABLES)
    path = tmp_path / "config.yaml"
    urls = {"source": source.url, "target": target.url}
    path.write_text(CONFIG.format(**urls, port=free_port(), directory=tmp_path))
    return path


def test_the_commands_of_the_guides(config: Path, source: Database, target: Database) -> None:
    def change_the_target() -> None:
        target.execute("update orders set v = 'wrong' where id = 1")

    run_block(config, "guides:prepare-source#1")
    assert (config.parent / "missing.sql").is_file()
    with Process(config, spark=False) as process:
        caught_up(process)
        run_block(config, "guides:standby-as-source#1")
        run_block(config, "guides:choose-tables#1")
        run_block(config, "guides:upgrade#1")
        run_block(config, "guides:upgrade#2")
        assert "equal" in run_block(config, "guides:is-it-right#1")
        assert "items" in run_block(config, "guides:indexes-under-foreign-keys#1", code=1)
        run_block(config, "guides:indexes-under-foreign-keys#2")
        run_block(config, "guides:tenants#1")

        for table, place in (
            ("orders", "guides:columns-that-change#1"),
            ("items", "guides:columns-that-change#3"),
        ):
            assert command(config, "pause", table).returncode == 0
            run_block(config, place)
        run_block(config, "guides:columns-that-change#2")
        run_block(config, "guides:initial-copy-and-resync#1")
        run_block(config, "guides:initial-copy-and-resync#2")

        change_the_target()
        run_block(config, "guides:repair#2", code=1)
        assert "update" in (config.parent / "repair.sql").read_text().lower()
        run_block(config, "guides:repair#1")
        assert target.value("select v from orders where id = 1") == "a"

        script = config.parent / "2026-11-add-note.sql"
        script.write_text("alter table orders add column note text")
        run_block(config, "guides:scripts#1")
        source.execute("update orders set note = 'n'")
        assert script.stem in run_block(config, "guides:scripts#2")
        run_block(config, "guides:requests#1", {"17": "1"})
        caught_up(process)
        assert target.value("select count(*) from orders where note = 'n'") == 2
        run_block(config, "guides:monitor#1")


def test_the_commands_for_a_mapping_database(
    source: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute(TABLES)
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    path, listen = tmp_path / "config.yaml", f"127.0.0.1:{free_port()}"
    path.write_text(
        f'target: {{url: "{target.url}"}}\nmapping_database: "{tmp_path}/mapping.sqlite"\n'
        f'http: {{listen: "{listen}"}}\nspool: {{directory: "{tmp_path}/spool"}}\n'
    )
    address = f"127.0.0.1:{source.server.port}/{source.name}"
    names = {"streamer:${SHOP_PASSWORD}@127.0.0.1/shop": f"postgres:${{SHOP_PASSWORD}}@{address}"}
    processes: list[Process] = []
    try:
        for line in block("guides:mapping-database-and-page#1", names).splitlines():
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").partition("=")
                is_token = value == "$(openssl rand -hex 32)"
                monkeypatch.setenv(name, "a" * 64 if is_token else shlex.split(value)[0])
            elif line == "streamer run &":
                processes.append(Process(path, spark=False))
                eventually(lambda: answers(f"http://{listen}/healthz"), 60)
            else:
                done = command(path, *shlex.split(line)[1:])
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        eventually(lambda: target.value("select to_regclass('orders') is not null"), 60)
        eventually(lambda: target.value("select count(*) from orders") == 2, 60)
        run_block(path, "guides:mapping-database-and-page#2")
    finally:
        for process in processes:
            process.kill()
    (loaded,) = static_mapping.load(tmp_path / "backup.yaml")[1].sources
    assert loaded.label == "shop:eu"


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


# ---- the tutorial ------------------------------------------------------------------------------

TUTORIAL: Final = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def blocks_of(language: str) -> list[str]:
    """Return the blocks of the tutorial in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)


def commands_of(place: str) -> list[list[str]]:
    """Return the commands of a block as words, without the directory of the program."""
    lines = block(place).splitlines()
    return [shlex.split(line.replace(".venv/bin/", ""), comments=True) for line in lines]


@pytest.fixture
def shop(source: Database) -> Iterator[Database]:
    """The database of the tutorial, whose statements make roles and the target."""
    source.execute(
        """
        create schema audit;
        create table customers (id int primary key, v text);
        create table orders (id int primary key, v text);
        create table audit.events (v text);
        insert into customers values (1, 'a'); insert into orders values (1, 'b');
        insert into audit.events values ('c');
        """
    )
    try:
        yield source
    finally:
        drop_database(source.server, "dw")
        source.execute("drop owned by streamer, loader; drop role streamer, loader")


@pytest.mark.since(15)  # GRANT SET ON PARAMETER
def test_the_tutorial(shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands_of("docs:README#1") == commands_of("docs:tutorial#1")
    # The statements of the administrator
    for sql in blocks_of("sql"):
        for statement in filter(str.strip, sql.split(";\n")):
            shop.execute(statement)
    # The configuration
    port, path = shop.server.port, tmp_path / "config.yaml"
    (text,) = blocks_of("yaml")
    text = text.replace("127.0.0.1/dw", f"127.0.0.1:{port}/dw")
    path.write_text(text.replace("127.0.0.1/shop", f"127.0.0.1:{port}/{shop.name}"))
    monkeypatch.setenv("STREAMER_HTTP__LISTEN", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("STREAMER_SPOOL__DIRECTORY", str(tmp_path / "spool"))

    exported, check, run = commands_of("docs:tutorial#1")
    for variable in exported[1:]:
        monkeypatch.setenv(*variable.split("=", 1))
    done = command(path, *check[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert run == ["streamer", "run"]
    with Process(path, spark=False):
        for words in commands_of("docs:tutorial#2"):
            done = command(path, *words[1:])
            assert done.returncode == 0, done.stdout + done.stderr
        assert "3 ready" in done.stdout
        warehouse = Database(shop.server, "dw")
        assert warehouse.execute("select sid, v from customers") == [("eu", "a")]
        assert warehouse.value("select count(*) from orders where kvsz_end > '9000-01-01'") == 1
        assert warehouse.value("select v from events") == "c"
