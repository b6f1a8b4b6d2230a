"""The SQLite database itself."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from streamer.admin.mapping import admin_store as module
from streamer.admin.mapping.admin_store import Query, open_store, statements
from streamer.admin.mapping.api_models import validate
from streamer.admin.mapping.keyring import Keyring
from streamer.errors.error_classes import StoreError
from streamer.util.migrations import Migration, read_migrations

if TYPE_CHECKING:
    from streamer.admin.mapping.export_and_import import DraftRows


def database(name: str) -> dict[str, object]:
    return validate("database", {"name": name})


async def test_migrations_are_applied_once_in_order_and_recorded(tmp_path: Path) -> None:
    path = tmp_path / "mapping.sqlite"
    for _ in range(2):
        store = await open_store(path, Keyring.temporary())
        await store.close()

    with sqlite3.connect(path) as plain:
        recorded = plain.execute("select number, name from migration order by number").fetchall()
        assert plain.execute("pragma journal_mode").fetchone() == ("wal",)
    plain.close()
    assert recorded == [(m.number, m.name) for m in read_migrations("admin")]


async def test_a_migration_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mapping.sqlite"
    known = read_migrations("admin")
    broken = Migration(99, "broken", "create table half (a);\ninsert into nowhere values (1);")
    monkeypatch.setattr(module, "read_migrations", lambda kind: [*known, broken])

    with pytest.raises(StoreError, match="nowhere"):
        await open_store(path, Keyring.temporary())

    with sqlite3.connect(path) as plain:
        assert plain.execute("select max(number) from migration").fetchone() == (known[-1].number,)
        assert plain.execute("select 1 from sqlite_master where name = 'half'").fetchall() == []
    plain.close()


async def test_a_newer_schema_is_refused_in_one_line_unless_older_programs_run_on_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mapping.sqlite"
    await (await open_store(path, Keyring.temporary())).close()
    with sqlite3.connect(path) as plain:
        plain.execute("insert into migration values (998, 'later', 1, 'now')")
        plain.commit()
        await (await open_store(path, Keyring.temporary())).close()
        plain.execute("insert into migration values (999, 'later', 999, 'now')")
    plain.close()

    with pytest.raises(StoreError, match="newer streamer") as error:
        await open_store(path, Keyring.temporary())
    assert "\n" not in str(error.value)


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    with pytest.raises(StoreError, match=r"notes\.txt"):
        await open_store(path, Keyring.temporary())
    with pytest.raises(StoreError, match="No such file"):
        await open_store(tmp_path / "nowhere" / "mapping.sqlite", Keyring.temporary())
    assert path.read_text().startswith("not a database")


def overwrite_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"no page of a database " * 4096)


def overwrite_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"no header of a database " * 10)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(0)


@pytest.mark.parametrize("damage", [overwrite_pages, overwrite_header, truncate])
async def test_damage_in_place_refuses_changes_and_keeps_the_last_reading(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path, keyring = tmp_path / "mapping.sqlite", Keyring.temporary()
    store = await open_store(path, keyring)
    await store.create("database", database("shop"), "test")
    await store.add_revision(await store.content(), "test")
    await store.close()
    intact = path.read_bytes()
    store = await open_store(path, keyring)
    content, latest = await store.content(), await store.latest()
    await store.check_file()
    assert store.problem is None

    damage(path)
    await store.check_file()
    assert store.problem is not None
    assert "is damaged" in store.problem.error
    assert "streamer export > backup.yaml" in store.problem.hint
    with pytest.raises(StoreError, match="is damaged"):
        await store.create("database", database("other"), "test")
    assert (await store.content(), await store.latest()) == (content, latest)

    # Only a restart ends the problem: connections of this process may have read either state.
    path.write_bytes(intact)
    await store.check_file()
    assert store.problem is not None
    await store.close()
    path.write_bytes(intact)
    store = await open_store(path, keyring)
    await store.check_file()
    assert store.problem is None
    assert await store.content() == content
    await store.close()


async def test_damage_that_a_statement_meets_is_noticed_before_the_next_look(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mapping.sqlite"
    await (await open_store(path, Keyring.temporary())).close()
    store = await open_store(path, Keyring.temporary())
    overwrite_pages(path)
    with pytest.raises(StoreError):
        await store.create("database", database("shop"), "test")
    with pytest.raises(StoreError, match="is damaged"):
        await store.create("database", database("shop"), "test")
    await store.close()


async def test_two_processes_edit_one_database(tmp_path: Path) -> None:
    """The command line, beside `run`: each sees the changes of the other, and no change is lost."""
    path = tmp_path / "mapping.sqlite"
    stores = [await open_store(path, Keyring.temporary()) for _ in range(2)]
    await asyncio.gather(
        *(stores[n % 2].create("database", database(f"d{n}"), f"actor {n % 2}") for n in range(40))
    )

    for store in stores:
        rows, total = await store.page("database", Query(per_page=100))
        assert total == 40
        assert {row["name"] for row in rows} == {f"d{n}" for n in range(40)}
        assert (await store.audit(Query()))[1] == 40
        await store.close()


async def test_a_refused_change_is_not_in_the_audit_either(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "mapping.sqlite", Keyring.temporary())
    wanted: DraftRows = [(database("a"), [], [])]
    await store.merge(wanted, None, "me")
    before = (await store.content(), await store.audit(Query()))
    table = validate("table", {"name": "t", "database_id": 1})
    with pytest.raises(Exception, match="already"):
        await store.merge([(database("b"), [], [table, table])], {"on_error": "stop"}, "me")
    assert (await store.content(), await store.audit(Query())) == before
    await store.close()


async def test_readers_see_one_state_while_somebody_writes(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "mapping.sqlite", Keyring.temporary())
    done = asyncio.Event()

    async def write() -> None:
        for number in range(30):
            table = validate("table", {"name": "t", "database_id": 1})
            await store.merge([(database(f"d{number}"), [], [table])], None, "me")
        done.set()

    writing = asyncio.create_task(write())
    seen = 0
    while not done.is_set():
        content = await store.content()
        assert len(content["databases"]) == len(content["tables"])
        seen += 1
    await writing
    assert seen > 1
    await store.close()


def test_a_script_is_split_where_sqlite_says() -> None:
    sql = "create table a (b text default ';');\n-- a comment; with one\ninsert into a\nvalues (1);"
    assert [s.strip().splitlines()[-1] for s in statements(sql)] == [
        "create table a (b text default ';');",
        "values (1);",
    ]


async def test_a_cancelled_change_leaves_the_store_usable(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "mapping.sqlite", Keyring.temporary())
    for delay in range(30):
        task = asyncio.create_task(store.create("database", database(f"d{delay}"), "me"))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    names = {row["name"] for row in (await store.content())["databases"]}
    audit, total = await store.audit(Query(per_page=100))
    assert total == len(names)
    assert {json.dumps(entry["label"]) for entry in audit} == {json.dumps(n) for n in names}
    await store.create("database", database("last"), "me")
    await store.close()
