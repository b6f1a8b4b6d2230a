"""The rows of the mapping database in SQL: reads, writes, checks and audit of each kind.

The functions take a connection and leave transactions to their caller,
`streamer.admin.mapping.admin_store`.
"""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import aiosqlite

from streamer.admin.mapping.api_models import COLUMNS, default_settings
from streamer.bookkeeping.requests import KEPT_DAYS
from streamer.errors.error_classes import InvalidError, NotFoundError, TakenError
from streamer.mapping.rules import SourceLabel

Row = dict[str, Any]
Content = dict[str, Any]
"""The draft or a revision: rows of databases, urls and tables, and the settings; encrypted."""

COLUMN_NAMES: Final = {"schema": "namespace"}
"""Names of columns that differ from the API's."""
TABLES: Final = {"database": "database", "url": "url", "table": '"table"'}
FIELD_NAME: Final = re.compile(r"[a-z_]+")


def from_sql(kind: str) -> str:
    """Return the FROM clause for rows of *kind*, as ``r``, with their database."""
    if kind == "database":
        return "from database r"
    return f"from {TABLES[kind]} r join database d on d.id = r.database_id"


def select_sql(kind: str) -> str:
    """Return the SELECT list for rows of *kind*."""
    columns = ["r.id", *(f"r.{COLUMN_NAMES.get(n, n)} as {n}" for n in COLUMNS[kind])]
    columns.append("r.settings")
    if kind != "database":
        columns.append("d.name as database")
    return f"select {', '.join(columns)}"


def field_expressions(kind: str) -> dict[str, str]:
    """Return the columns for filter, search and sort, as SQL."""
    expressions = {"id": "r.id"} | {n: f"r.{COLUMN_NAMES.get(n, n)}" for n in COLUMNS[kind]}
    if kind != "database":
        expressions["database"] = "d.name"
    for name, value in default_settings(kind).items():
        if isinstance(value, dict | list) or not FIELD_NAME.fullmatch(name):
            continue
        default = json.dumps(value).replace("'", "''")
        value_sql = f"json_extract(r.settings, '$.{name}')"
        expressions[name] = f"coalesce({value_sql}, json_extract('{default}', '$'))"
    return expressions


async def fetch_one(connection: aiosqlite.Connection, sql: str, parameters: list[Any]) -> Any:
    """Return the only row of a query."""
    (row,) = await connection.execute_fetchall(sql, parameters)
    return row


def row_of(kind: str, row: Any) -> Row:
    """Return a row as shown by the API, with the defaults of its settings."""
    fields: Row = dict(row)
    settings: Row = json.loads(fields.pop("settings"))
    return fields | default_settings(kind) | settings


async def fetch_row(connection: aiosqlite.Connection, kind: str, number: int) -> Row:
    """Return a row by id. Raises NotFoundError."""
    rows = list(
        await connection.execute_fetchall(
            f"{select_sql(kind)} {from_sql(kind)} where r.id = ?", [number]
        )
    )
    if not rows:
        raise NotFoundError(f"there is no {kind} {number}")
    return row_of(kind, rows[0])


async def fetch_all(connection: aiosqlite.Connection, kind: str) -> list[Row]:
    """Return every row of *kind*, by id."""
    rows = await connection.execute_fetchall(f"{select_sql(kind)} {from_sql(kind)} order by r.id")
    return [row_of(kind, row) for row in rows]


async def fetch_content(connection: aiosqlite.Connection) -> Content:
    """Return the draft."""
    content: Content = {}
    for kind, name in (("database", "databases"), ("url", "urls"), ("table", "tables")):
        columns = ["id", *(f"{COLUMN_NAMES.get(n, n)} as {n}" for n in COLUMNS[kind]), "settings"]
        columns += ["secret"] if kind == "url" else []
        rows = await connection.execute_fetchall(
            f"select {', '.join(columns)} from {TABLES[kind]} order by id"
        )
        content[name] = [{**dict(row), "settings": json.loads(row["settings"])} for row in rows]
    content["settings"] = await fetch_settings(connection)
    return content


async def fetch_latest(connection: aiosqlite.Connection) -> tuple[int, Content] | None:
    """Return number and content of the newest revision; None before the first."""
    rows = list(
        await connection.execute_fetchall(
            "select number, content from revision order by number desc limit 1"
        )
    )
    return (rows[0][0], json.loads(rows[0][1])) if rows else None


async def fetch_users(connection: aiosqlite.Connection) -> list[Row]:
    """Return the users of the mapping database, by name."""
    rows = await connection.execute_fetchall(
        "select name, role, password_hash from user order by name"
    )
    return [dict(row) for row in rows]


async def fetch_settings(connection: aiosqlite.Connection) -> Row:
    """Return the settings of the mapping as a whole."""
    rows = await connection.execute_fetchall("select name, value from setting order by name")
    return {row["name"]: json.loads(row["value"]) for row in rows}


async def store_settings(writer: aiosqlite.Connection, settings: Row, actor: str) -> None:
    """Replace the settings of the mapping, and audit the change."""
    earlier = await fetch_settings(writer)
    later = {name: settings[name] for name in sorted(settings) if settings[name] is not None}
    if earlier == later:
        return
    await writer.execute("delete from setting")
    for name, value in later.items():
        await writer.execute("insert into setting values (?, ?)", [name, json.dumps(value)])
    await write_audit(writer, actor, "change", "settings", None, "settings", earlier, later)


def column_values(values: Row, columns: list[str]) -> list[Any]:
    """Return the values of *columns*."""
    return [
        json.dumps(values[name]) if name == "settings" else values.get(name) for name in columns
    ]


async def insert_row(writer: aiosqlite.Connection, kind: str, values: Row) -> int:
    """Insert a row; return the id."""
    columns = [*COLUMNS[kind], "settings", *(["secret"] if kind == "url" else [])]
    columns += ["id"] if "id" in values else []
    names = ", ".join(COLUMN_NAMES.get(name, name) for name in columns)
    marks = ", ".join("?" for _ in columns)
    with translating_constraints(kind, values):
        cursor = await writer.execute(
            f"insert into {TABLES[kind]} ({names}) values ({marks})", column_values(values, columns)
        )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


@contextmanager
def translating_constraints(kind: str, fields: Row) -> Iterator[None]:
    """Translate SQLite's refusal of a row into an error that names the field at fault."""
    try:
        yield
    except sqlite3.IntegrityError as exc:
        if "FOREIGN KEY" in str(exc):
            raise InvalidError(
                f"database_id: there is no database {fields['database_id']}"
            ) from exc
        if "UNIQUE" not in str(exc):
            raise InvalidError(f"{kind}: {exc}") from exc
        match kind:
            case "database":
                message = f'name: database "{fields["name"]}" already exists'
            case "url":
                sid = fields["sid"]
                label = "without a sid" if sid is None else f'with sid "{sid}"'
                message = f"sid: the database already has a url {label}"
            case _:
                name = f"{fields['schema']}.{fields['name']}"
                message = f'name: the database already has a table "{name}"'
        raise TakenError(message) from exc


async def write_audit(
    writer: aiosqlite.Connection,
    actor: str,
    action: str,
    kind: str,
    number: int | None,
    label: str,
    before: Row | None = None,
    after: Row | None = None,
) -> None:
    """Audit a change of an object by *actor*."""
    await writer.execute(
        "insert into audit (at, actor, action, object, object_id, label, before, after)"
        " values (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            now_text(),
            actor,
            action,
            kind,
            number,
            label,
            None if before is None else json.dumps(before),
            None if after is None else json.dumps(after),
        ],
    )
    await prune_audit(writer)


async def prune_audit(writer: aiosqlite.Connection) -> None:
    """Remove audit rows that are too old."""
    oldest = time_text(datetime.now(UTC) - timedelta(days=KEPT_DAYS))
    await writer.execute("delete from audit where at < ?", [oldest])


def key_of(kind: str, row: Row) -> tuple[Any, ...]:
    """Return the name of a row within the database."""
    return (row["sid"],) if kind == "url" else (row["schema"], row["name"])


def label_of(kind: str, row: Row) -> str:
    """Return the name of a row for people."""
    match kind:
        case "database":
            return str(row["name"])
        case "url":
            return SourceLabel(str(row["database"]), row["sid"])
        case _:
            return f"{row['database']} {row['schema']}.{row['name']}"


def now_text() -> str:
    """Return the present time in the stored form."""
    return time_text(datetime.now(UTC))


def time_text(time: datetime) -> str:
    """Return a time in the stored form."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
