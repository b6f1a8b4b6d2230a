"""The mapping of kuvasz-streamer: its map.yaml, and the SQLite database that replaces that file.

kuvasz-streamer reads the tables ``db``, ``url`` and ``tbl`` of that database. `read_database`
converts these tables into a map.yaml, the only input of an import.
"""

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any, Final

import yaml

from streamer.config.yaml_file import Document, Location, format_location
from streamer.errors.error_classes import SettingsError
from streamer.mapping.rule_options import OnColumnAdded

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
_NOT_WRITTEN: Final = ("tbl_id", "db_id", "schema", "name")


def is_database(path: Path) -> bool:
    """Whether *path* is a readable SQLite database."""
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


def read_database(path: Path) -> str:
    """Return the mapping in an SQLite database of kuvasz-streamer as a map.yaml.

    Raises SettingsError for a different kind of database.
    """
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            groups = [_group(connection, row) for row in connection.execute("select * from db")]
    except (sqlite3.Error, IndexError) as exc:
        raise SettingsError(
            f"{path}: not a mapping of kuvasz-streamer: {exc}",
            hint="it has the tables db, url and tbl; import takes a YAML file, too",
        ) from None
    return yaml.safe_dump(groups, sort_keys=False, allow_unicode=True)


def _group(connection: sqlite3.Connection, database: sqlite3.Row) -> dict[str, Any]:
    number = (database["db_id"],)
    urls = connection.execute("select * from url where db_id = ? order by url_id", number)
    tables = connection.execute("select * from tbl where db_id = ? order by tbl_id", number)
    return {
        "database": database["name"],
        "urls": [{"url": row["url"], "sid": row["sid"]} for row in urls],
        "tables": {
            _table_name(row): {
                name: row[name]
                for name in row.keys()  # noqa: SIM118  # a Row iterates over its values
                if name not in _NOT_WRITTEN and row[name] not in (None, "")
            }
            for row in tables
        },
    }


def _table_name(row: sqlite3.Row) -> str:
    name, namespace = str(row["name"]), str(row["schema"])
    name = f'"{name}"' if "." in name else name
    return name if namespace == "public" else f"{namespace}.{name}"


def from_kuvasz(
    group: Any,
    location: Location,
    document: Document,
    notes: list[str],
    *,
    excludes_missing: bool,
) -> Any:
    """Convert a database of a map.yaml. Raises SettingsError for a setting with a different meaning
    in streamer.

    *excludes_missing*: leave out columns that the target lacks, as kuvasz-streamer does.
    """
    if not isinstance(group, dict):
        return group
    urls, tables = group.get("urls"), group.get("tables")
    converted = dict(group)
    if isinstance(urls, list):
        converted["urls"] = [_url_from_kuvasz(url) for url in urls]
    if isinstance(tables, dict):
        converted["tables"] = {
            name: _table_from_kuvasz(
                table,
                (*location, "tables", name),
                document,
                notes,
                excludes_missing=excludes_missing,
            )
            for name, table in tables.items()
        }
    return converted


def _url_from_kuvasz(url: Any) -> Any:
    if not isinstance(url, dict):
        return url
    converted = dict(url)
    if isinstance(sid := url.get("sid"), int) and not isinstance(sid, bool):
        converted["sid"] = str(sid)
    if converted.get("sid") == "":
        del converted["sid"]
    if isinstance(text := url.get("url"), str):
        converted["url"] = _without_replication(text)
    return converted


def _without_replication(text: str) -> str:
    """Remove `replication=…`: streamer adds this parameter where needed."""
    address, mark, query = text.partition("?")
    if not mark:
        return re.sub(r"(^|\s)replication\s*=\s*\S+", "", text).strip()
    parameters = [part for part in query.split("&") if not part.startswith("replication=")]
    return address + (f"?{'&'.join(parameters)}" if parameters else "")


def _table_from_kuvasz(
    table: Any,
    location: Location,
    document: Document,
    notes: list[str],
    *,
    excludes_missing: bool,
) -> Any:
    if table is None:
        table = {}
    if not isinstance(table, dict):
        return table
    where = f"{document.where(location)}: {format_location(location)}"
    for name in ("filter", "set"):
        if table.get(name):
            raise SettingsError(
                f"{where}: `{name}` is in CEL, and streamer needs SQL",
                hint=f"remove `{name}` from this file, and write the SQL after the import",
            )
    if table.get("partitions_regex"):
        notes.append(
            f"{where}: `partitions_regex` is left out: a partitioned table is mapped by its root, "
            "and its partitions come with it"
        )
    settings = {
        name: value
        for name, value in table.items()
        if name not in ("filter", "set", "partitions_regex") and value not in (None, "")
    }
    if excludes_missing:
        settings["on_column_added"] = OnColumnAdded.IGNORE.value
    return settings
