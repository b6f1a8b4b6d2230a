"""What the command line does with the draft, by the names that people use; and a plan as text."""

from collections.abc import Iterable
from typing import Any

import yaml

from streamer.admin.client import Client
from streamer.admin.models import table_pattern
from streamer.errors import InvalidError, NotFoundError

Row = dict[str, Any]


async def add_source(client: Client, database: str, url: str, sid: str | None) -> Row:
    """Add a url, and the database if that is new. Raises AdminError."""
    found = await client.rows("database", {"name": database})
    group = found[0] if found else await client.create("database", {"name": database})
    try:
        return await client.create("url", {"database_id": group["id"], "url": url, "sid": sid})
    except BaseException:
        if not found:
            await client.delete("database", group["id"])
        raise


async def remove_source(client: Client, database: str, sid: str | None) -> None:
    """Remove the url of a sid, or else a whole database. Raises AdminError."""
    group = await _database(client, database)
    if sid is None:
        await client.delete("database", group["id"])
        return
    rows = await client.rows("url", {"database_id": group["id"], "sid": sid})
    if not rows:
        raise NotFoundError(f'database "{database}" has no url with sid "{sid}"')
    await client.delete("url", rows[0]["id"])


async def add_table(client: Client, database: str, fields: Row, settings: list[str]) -> Row:
    """Add a table; *settings* are others of it, as ``name=YAML``. Raises AdminError."""
    group = await _database(client, database)
    more = dict(_setting(text) for text in settings)
    return await client.create("table", {**fields, **more, "database_id": group["id"]})


async def remove_table(client: Client, database: str, table: str) -> None:
    """Remove a table. Raises AdminError."""
    group = await _database(client, database)
    pattern = table_pattern(table, None)
    filters = {
        "database_id": group["id"],
        "schema": pattern.written_namespace,
        "name": pattern.written_name,
    }
    rows = await client.rows("table", filters)
    if not rows:
        raise NotFoundError(
            f'database "{database}" has no table "{table}"',
            hint="`streamer tables list` shows those it has",
        )
    await client.delete("table", rows[0]["id"])


async def _database(client: Client, name: str) -> Row:
    rows = await client.rows("database", {"name": name})
    if not rows:
        raise NotFoundError(
            f'there is no database "{name}"', hint="`streamer sources add` makes it"
        )
    return rows[0]


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if equals:
            return name, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise InvalidError(f"--setting {text}: expected NAME=VALUE, the value as in YAML")


def plan_lines(plan: Row) -> Iterable[str]:
    """Write a plan for people."""
    for source in plan["sources"]:
        name = source["database"] + (f":{source['sid']}" if source["sid"] is not None else "")
        if source["action"] == "keep":
            yield f"{name}: stays as it is"
            continue
        yield f"{name}: {source['action']}; slot {source['slot']}: {source['slot_action']}"
        for table in source["tables"]:
            if table["action"] != "keep":
                yield f"  {_table_line(table)}"
        for sql in source["publication_sql"]:
            yield f"  at the source: {sql}"
    for finding in plan["findings"]:
        place = " ".join(
            part for part in (finding["source"] or "target", finding["object"]) if part
        )
        fix = f"; {finding['fix']}" if finding["fix"] else ""
        yield f"{finding['severity']:<7} {place}: {finding['problem']}{fix}"
    for note in plan["notes"]:
        yield f"note    {note}"
    estimate = plan["estimate"]
    if estimate["tables"]:
        yield (
            f"to copy: {estimate['tables']} tables, about {estimate['rows']} rows, "
            f"{_size(estimate['size_bytes'])}, about {estimate['seconds']:.0f} s "
            f"({estimate['basis']})"
        )
    if not plan["changes"]:
        yield "nothing changes"


def _table_line(table: Row) -> str:
    line = f"{table['action']} {table['source']} → {table['target']} ({table['type']})"
    if table["action"] == "copy" and table["size_bytes"] is not None:
        line += f", about {table['rows']} rows, {_size(table['size_bytes'])}"
    return f"{line}: {table['reason']}" if table["reason"] else line


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.0f} TB"
