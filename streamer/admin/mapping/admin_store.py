"""The SQLite database of the mapping: draft, revisions, audit.

One connection writes, for a single task at a time; a change and its audit rows are a transaction. A
second connection reads. SQLite uses a WAL journal, so readers never wait. Another
process (the command line, while `run` works) may read and edit as well. Callers encrypt passwords
before they call the store. Returned rows contain ``***`` in place of passwords; only `reveal` and
`reveal_each` return passwords.
"""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import aiosqlite
import structlog

from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.mapping.api_models import COLUMNS, row_settings
from streamer.admin.mapping.keyring import Keyring
from streamer.admin.mapping.mapping_file import MappingFile, damage_remedy, is_damage
from streamer.admin.mapping.mapping_rows import (
    COLUMN_NAMES,
    TABLES,
    Content,
    Row,
    column_values,
    fetch_all,
    fetch_content,
    fetch_latest,
    fetch_one,
    fetch_row,
    fetch_settings,
    fetch_users,
    field_expressions,
    from_sql,
    insert_row,
    key_of,
    label_of,
    now_text,
    prune_audit,
    row_of,
    select_sql,
    store_settings,
    translating_constraints,
    write_audit,
)
from streamer.bookkeeping.requests import TEARDOWN
from streamer.errors.error_classes import AdminError, InvalidError, NotFoundError, StoreError
from streamer.mapping.lost_mapping import MappingProblem
from streamer.postgres.url_passwords import check_url, fill_masks, has_mask, mask, secret_spans
from streamer.util.migrations import read_migrations

log = structlog.get_logger()

T = TypeVar("T")
BUSY_SECONDS: Final = 5.0
CHECK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Query:
    """The part of a list to return, and the order."""

    page: int = 1
    per_page: int = 50
    sort: str = "id"
    descending: bool = False
    search: str | None = None
    filters: dict[str, Any] = field(default_factory=dict)


@contextmanager
def _translating(path: Path | None) -> Iterator[None]:
    try:
        yield
    except (sqlite3.DatabaseError, OSError) as exc:
        hint = "check that it is a writable SQLite file, and that its disk has room"
        remedy = damage_remedy() if is_damage(exc) else hint
        raise StoreError(f"mapping database {path}: {exc}", hint=remedy) from exc


class AdminStore:
    """The mapping database. Made by `open_store`."""

    def __init__(
        self,
        path: Path | None,
        keyring: Keyring,
        writer: aiosqlite.Connection,
        reader: aiosqlite.Connection,
        file: MappingFile | None = None,
    ) -> None:
        self.path = path
        self.keyring = keyring
        self._writer = writer
        self._reader = reader
        self._write_lock = asyncio.Lock()
        self._read_lock = asyncio.Lock()
        self._file = file
        self._last_read: dict[str, Any] = {}
        self._logged: MappingProblem | None = None
        self.problem: MappingProblem | None = None
        """The fault of the file that `check_file` or a change found."""

    async def close(self) -> None:
        await self._writer.close()
        if self._reader is not self._writer:
            await self._reader.close()

    # ---- the file ------------------------------------------------------------------------------

    async def check_file(self) -> None:
        """Examine the file, and log its state. With a damaged file, the store rejects changes."""
        former, now = self._logged, await self._check_file(is_thorough=True)
        self._logged = now
        if now is not None and now != former:
            log.error("the mapping database is unusable", error=now.error, hint=now.hint)
        elif now is None and former is not None:
            log.info("the mapping database is usable again", path=self.path)

    async def _check_file(self, *, is_thorough: bool = False) -> MappingProblem | None:
        if self._file is not None:
            self.problem = await in_admin_thread(self._file.check, is_thorough=is_thorough)
        return self.problem

    async def _read_or_last(
        self, name: str, read: "Callable[[aiosqlite.Connection], Awaitable[T]]"
    ) -> T:
        """Read the part *name* of an intact file; of a damaged file, return the last reading.

        Pages and exports need the part while the process continues to stream.
        """
        if self._file is None or self._file.damage is None or name not in self._last_read:
            try:
                async with self._reads() as reader:
                    self._last_read[name] = await read(reader)
            except StoreError:
                if self._file is None or self._file.damage is None or name not in self._last_read:
                    raise
        part: T = self._last_read[name]
        return part

    # ---- reading -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _reads(self) -> AsyncIterator[aiosqlite.Connection]:
        """Yield a reader for a block that sees a single state of the database."""
        lock = self._write_lock if self._reader is self._writer else self._read_lock
        async with lock:
            with self._noticing_damage(), _translating(self.path):
                try:
                    await self._reader.execute("begin")
                    yield self._reader
                finally:
                    await self._reader.rollback()

    @contextmanager
    def _noticing_damage(self) -> Iterator[None]:
        """Record damage that SQLite finds during a statement as the state of the file."""
        try:
            yield
        except StoreError as exc:
            if self._file is None or not is_damage(exc.__cause__):
                raise
            self._file.damage = self._file.damage or str(exc.__cause__)
            self.problem = self._file.check(is_thorough=False)
            assert self.problem is not None
            raise StoreError(self.problem.error, hint=self.problem.hint) from exc

    async def page(self, kind: str, query: Query) -> tuple[list[Row], int]:
        """Return a page of the rows of *kind*, and the number of rows. Raises InvalidError."""
        expressions = field_expressions(kind)
        conditions, parameters = ["true"], []
        for name, value in query.filters.items():
            if name not in expressions:
                raise InvalidError(f"{name}: not a field to filter by")
            conditions.append(f"{expressions[name]} = ?")
            parameters.append(value)
        if query.search:
            texts = [e for n, e in expressions.items() if n not in ("id", "database_id")]
            matches = " or ".join(f"instr(lower({e}), lower(?)) > 0" for e in texts)
            conditions.append(f"({matches})")
            parameters += [query.search] * len(texts)
        if query.sort not in expressions:
            fields = ", ".join(sorted(expressions))
            raise InvalidError(f"sort: no field {query.sort}", hint=f"one of: {fields}")
        order = f"{expressions[query.sort]} {'desc' if query.descending else 'asc'}, r.id"
        where = f"{from_sql(kind)} where {' and '.join(conditions)}"
        async with self._reads() as reader:
            (total,) = await fetch_one(reader, f"select count(*) {where}", parameters)
            rows = await reader.execute_fetchall(
                f"{select_sql(kind)} {where} order by {order} limit ? offset ?",
                [*parameters, query.per_page, (query.page - 1) * query.per_page],
            )
        return [row_of(kind, row) for row in rows], total

    async def get(self, kind: str, number: int) -> Row:
        """Return a row. Raises NotFoundError."""
        async with self._reads() as reader:
            return await fetch_row(reader, kind, number)

    async def settings(self) -> Row:
        """Return the explicit settings of the mapping as a whole."""
        async with self._reads() as reader:
            return await fetch_settings(reader)

    async def content(self) -> Content:
        """Return the whole draft."""
        return await self._read_or_last("content", fetch_content)

    async def latest(self) -> tuple[int, Content] | None:
        """Return the newest revision with its number; None before the first revision."""
        return await self._read_or_last("latest", fetch_latest)

    async def audit(self, query: Query) -> tuple[list[Row], int]:
        """Return a page of the audit, the newest change first, and the number of all changes."""
        async with self._reads() as reader:
            (total,) = await fetch_one(reader, "select count(*) from audit", [])
            rows = await reader.execute_fetchall(
                "select id, at, actor, action, object, object_id, label, before, after from audit"
                " order by id desc limit ? offset ?",
                [query.per_page, (query.page - 1) * query.per_page],
            )
        entries = [dict(row) for row in rows]
        for entry in entries:
            for name in ("before", "after"):
                entry[name] = json.loads(entry[name]) if entry[name] else None
        return entries, total

    async def users(self) -> list[Row]:
        """Return the users with their password hashes."""
        return await self._read_or_last("users", fetch_users)

    async def set_user(self, name: str, role: str, password_hash: str, actor: str) -> bool:
        """Add or change a user; return whether the user is new."""
        async with self._writes() as writer:
            rows = await writer.execute_fetchall("select role from user where name = ?", [name])
            former = [{"role": row["role"]} for row in rows]
            await writer.execute(
                "insert into user values (?, ?, ?, ?) on conflict (name) do update"
                " set role = excluded.role, password_hash = excluded.password_hash",
                [name, role, password_hash, now_text()],
            )
            await write_audit(
                writer,
                actor,
                "change" if former else "create",
                "user",
                None,
                name,
                former[0] if former else None,
                {"role": role},
            )
        return not former

    async def remove_user(self, name: str, actor: str) -> None:
        """Remove a user. Raises NotFoundError."""
        async with self._writes() as writer:
            cursor = await writer.execute("delete from user where name = ?", [name])
            if cursor.rowcount == 0:
                raise NotFoundError(f'there is no user "{name}"', hint="see: streamer users list")
            await write_audit(writer, actor, "delete", "user", None, name)

    async def reveal(self, content: Content) -> dict[int, str]:
        """Return the complete urls of *content*, with passwords, by id. Raises StoreError."""

        def decrypt() -> dict[int, str]:
            return {
                row["id"]: self.keyring.decrypt(row["secret"], f"url {row['id']} ({row['url']})")
                if row["secret"]
                else row["url"]
                for row in content["urls"]
            }

        return await in_admin_thread(decrypt)

    async def reveal_each(self, content: Content) -> dict[int, str | StoreError]:
        """Return the complete urls of *content*; for an undecryptable password, the reason."""

        def decrypt(row: Row) -> str | StoreError:
            if not row["secret"]:
                return str(row["url"])
            try:
                return self.keyring.decrypt(row["secret"], f"url {row['id']} ({row['url']})")
            except StoreError as exc:
                return exc

        return await in_admin_thread(lambda: {row["id"]: decrypt(row) for row in content["urls"]})

    # ---- writing -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _writes(self) -> AsyncIterator[aiosqlite.Connection]:
        """Yield the writer for a block in a transaction."""
        async with self._write_lock:
            if (problem := await self._check_file()) is not None:
                raise StoreError(problem.error, hint=problem.hint)
            with self._noticing_damage(), _translating(self.path):
                try:
                    await self._writer.execute("begin immediate")
                    yield self._writer
                    await self._writer.execute("commit")
                except BaseException:
                    # After a cancellation, the connection still runs the statement in progress, and
                    # then the rollback. Outside a transaction, the rollback has no effect.
                    await self._writer.rollback()
                    raise

    async def create(self, kind: str, fields: Row, actor: str) -> Row:
        """Add a row. Raises InvalidError, TakenError."""
        async with self._writes() as writer:
            return await self._create(writer, kind, fields, actor)

    async def replace(
        self, kind: str, number: int, change: Callable[[Row], Row], actor: str
    ) -> Row:
        """Replace a row with the result of *change*. Raises AdminError."""
        async with self._writes() as writer:
            former = await fetch_row(writer, kind, number)
            return await self._replace(writer, kind, former, change(dict(former)), actor)

    async def delete(self, kind: str, number: int, actor: str) -> None:
        """Remove a row, and its dependents. Raises NotFoundError."""
        async with self._writes() as writer:
            await self._delete(writer, kind, await fetch_row(writer, kind, number), actor)

    async def set_settings(self, settings: Row, actor: str) -> Row:
        """Replace the explicit settings with *settings*."""
        async with self._writes() as writer:
            await store_settings(writer, settings, actor)
            return await fetch_settings(writer)

    async def merge(
        self, groups: list[tuple[Row, list[Row], list[Row]]], settings: Row | None, actor: str
    ) -> None:
        """Replace the draft with *groups*: each database with its urls and tables, without numbers.

        Existing rows keep their numbers, and urls keep the passwords for which ``***`` stands.
        *settings*: None leaves the settings unchanged.
        """
        async with self._writes() as writer:
            databases = await fetch_all(writer, "database")
            urls, tables = await fetch_all(writer, "url"), await fetch_all(writer, "table")
            by_name = {row["name"]: row for row in databases}
            for database, new_urls, new_tables in groups:
                stored = by_name.pop(database["name"], None)
                if stored is None:
                    stored = await self._create(writer, "database", database, actor)
                else:
                    await self._replace(writer, "database", stored, database, actor)
                number = stored["id"]
                for kind, present, new_rows in (
                    ("url", urls, new_urls),
                    ("table", tables, new_tables),
                ):
                    old_rows = {key_of(kind, r): r for r in present if r["database_id"] == number}
                    for fields in new_rows:
                        row = {**fields, "database_id": number}
                        stored_row = old_rows.pop(key_of(kind, row), None)
                        if stored_row is None:
                            await self._create(writer, kind, row, actor)
                        else:
                            await self._replace(writer, kind, stored_row, row, actor)
                    for row in old_rows.values():
                        await self._delete(writer, kind, row, actor)
            for row in by_name.values():
                await self._delete(writer, "database", row, actor)
            if settings is not None:
                await store_settings(writer, settings, actor)

    async def add_source(self, fields: Row, url: Row, tables: list[Row], actor: str) -> Row:
        """Add a url with tables, and the database of *fields* if new, in a single transaction.

        Return the url. Raises InvalidError, TakenError; an error of a table begins with its name.
        """
        async with self._writes() as writer:
            databases = await fetch_all(writer, "database")
            matches = [row for row in databases if row["name"] == fields["name"]]
            database = matches[0] if matches else None
            if database is None:
                database = await self._create(writer, "database", fields, actor)
            of_database = {"database_id": database["id"]}
            added = await self._create(writer, "url", url | of_database, actor)
            for table in tables:
                try:
                    await self._create(writer, "table", table | of_database, actor)
                except AdminError as exc:
                    raise type(exc)(f"{table['name']}: {exc.message}", hint=exc.hint) from None
            return added

    async def add_revision(self, content: Content, actor: str) -> int:
        """Store an applied mapping; return its number."""
        async with self._writes() as writer:
            cursor = await writer.execute(
                "insert into revision (applied_at, actor, content) values (?, ?, ?)",
                [now_text(), actor, json.dumps(content)],
            )
            number = cursor.lastrowid
            assert number is not None
            await write_audit(writer, actor, "apply", "mapping", number, f"revision {number}")
            return number

    async def drop_revision(self, number: int, actor: str) -> None:
        """Delete a revision that the running process rejected."""
        async with self._writes() as writer:
            await writer.execute("delete from revision where number = ?", [number])
            await write_audit(writer, actor, "refused", "mapping", number, f"revision {number}")

    async def write_teardown(self, actor: str, labels: list[str]) -> None:
        """Record that an operator tears sources down.

        The target cannot store this record: the teardown of the last source drops the target's
        audit.
        """
        async with self._writes() as writer:
            for label in labels:
                await write_audit(writer, actor, TEARDOWN, "source", None, label)

    async def write_discovery(self, actor: str, server: str) -> None:
        """Record that streamer logs in to a server on behalf of *actor*. Raises StoreError."""
        async with self._writes() as writer:
            await write_audit(writer, actor, "discover", "url", None, server)

    async def prune_audit(self) -> None:
        """Remove audit rows that are too old. Raises StoreError."""
        async with self._writes() as writer:
            await prune_audit(writer)

    async def restore(self, content: Content | None, actor: str) -> None:
        """Replace the draft with a revision, or with an empty draft."""
        content = content or {"databases": [], "urls": [], "tables": [], "settings": {}}
        async with self._writes() as writer:
            await writer.execute("delete from database")
            for row in content["databases"]:
                await insert_row(writer, "database", row)
            for kind, rows in (("url", content["urls"]), ("table", content["tables"])):
                for row in rows:
                    await insert_row(writer, kind, row)
            await writer.execute("delete from setting")
            for name, value in content["settings"].items():
                await writer.execute("insert into setting values (?, ?)", [name, json.dumps(value)])
            await write_audit(writer, actor, "discard", "mapping", None, "draft")

    async def _create(
        self, writer: aiosqlite.Connection, kind: str, fields: Row, actor: str
    ) -> Row:
        values = {**fields, "settings": row_settings(kind, fields)}
        if kind == "url":
            values |= await self._seal(fields["url"], None)
        number = await insert_row(writer, kind, values)
        row = await fetch_row(writer, kind, number)
        await write_audit(writer, actor, "create", kind, number, label_of(kind, row), None, row)
        return row

    async def _replace(
        self, writer: aiosqlite.Connection, kind: str, former: Row, fields: Row, actor: str
    ) -> Row:
        number = former["id"]
        values = {**fields, "settings": row_settings(kind, fields)}
        if kind == "url":
            (secret,) = await fetch_one(writer, "select secret from url where id = ?", [number])
            values |= await self._seal(fields["url"], (former["url"], secret))
        columns = [*COLUMNS[kind], "settings", *(["secret"] if kind == "url" else [])]
        assignments = ", ".join(f"{COLUMN_NAMES.get(name, name)} = ?" for name in columns)
        with translating_constraints(kind, fields):
            await writer.execute(
                f"update {TABLES[kind]} set {assignments} where id = ?",
                [*column_values(values, columns), number],
            )
        row = await fetch_row(writer, kind, number)
        has_new_password = kind == "url" and values["secret"] != secret
        if row != former or has_new_password:
            label = label_of(kind, row)
            action = "change password" if has_new_password and row == former else "change"
            await write_audit(writer, actor, action, kind, number, label, former, row)
        return row

    async def _delete(self, writer: aiosqlite.Connection, kind: str, row: Row, actor: str) -> None:
        await writer.execute(f"delete from {TABLES[kind]} where id = ?", [row["id"]])
        await write_audit(writer, actor, "delete", kind, row["id"], label_of(kind, row), row, None)

    async def _seal(self, url: str, stored: tuple[str, str | None] | None) -> Row:
        """Return a url as stored, with encrypted passwords; an unchanged url keeps *stored*."""

        def seal() -> Row:
            plain = None
            if stored is not None and stored[1] is not None:
                if url == stored[0]:
                    return {"url": stored[0], "secret": stored[1]}
                if has_mask(url):
                    plain = self.keyring.decrypt(stored[1], "this url")
            full = url
            if has_mask(url):
                if plain is None:
                    raise InvalidError("url: *** stands for a stored password, but none is stored")
                try:
                    full = fill_masks(url, plain)
                    check_url(full)
                except ValueError as exc:
                    raise InvalidError(f"url: {exc}") from None
            if not secret_spans(full) and mask(full) == full:
                return {"url": full, "secret": None}
            return {"url": mask(full), "secret": self.keyring.encrypt(full)}

        return await in_admin_thread(seal)


# ---- opening -----------------------------------------------------------------------------------


async def open_store(path: Path | None, keyring: Keyring) -> AdminStore:
    """Open the mapping database, create a missing file, and migrate the schema.

    Without a *path* the database is in memory. Raises StoreError.
    """
    with _translating(path):
        if path is None:
            connection = await _connect(":memory:")
            store = AdminStore(path, keyring, connection, connection)
        else:
            file = await in_admin_thread(MappingFile, path)
            writer = await _connect(path)
            try:
                await writer.execute("pragma journal_mode = wal")
                # A confirmed change survives a crash of the machine.
                await writer.execute("pragma synchronous = full")
                reader = await _connect(path)
                await reader.execute("pragma query_only = on")
            except BaseException:
                await writer.close()
                raise
            store = AdminStore(path, keyring, writer, reader, file)
        try:
            await _migrate(store)
        except BaseException:
            await store.close()
            raise
        return store


async def _connect(path: Path | str) -> aiosqlite.Connection:
    connection = await aiosqlite.connect(path, isolation_level=None, timeout=BUSY_SECONDS)
    try:
        connection.row_factory = sqlite3.Row
        await connection.execute("pragma foreign_keys = on")
    except BaseException:
        await connection.close()
        raise
    return connection


async def _migrate(store: AdminStore) -> None:
    migrations = await in_admin_thread(read_migrations, "admin")
    async with store._writes() as writer:
        await writer.execute(
            "create table if not exists migration (number integer primary key,"
            " name text not null, needs integer not null, applied_at text not null)"
        )
        newest, needs = await fetch_one(
            writer, "select max(number), coalesce(max(needs), 0) from migration", []
        )
    if needs > migrations[-1].number:
        raise StoreError(
            f"mapping database {store.path} was made by a newer streamer (migration {newest})",
            hint="run that version or a later one",
        )
    for migration in migrations:
        async with store._writes() as writer:
            applied = await writer.execute_fetchall(
                "select 1 from migration where number = ?", [migration.number]
            )
            if list(applied):
                continue
            for statement in statements(migration.sql):
                await writer.execute(statement)
            await writer.execute(
                "insert into migration values (?, ?, ?, ?)",
                [migration.number, migration.name, migration.needs, now_text()],
            )


def statements(sql: str) -> Iterator[str]:
    """Split a script, because SQLite's own function for scripts would end the transaction."""
    statement = ""
    for line in sql.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement
