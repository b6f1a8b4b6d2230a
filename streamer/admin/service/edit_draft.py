"""The command line's edits of the draft, by names of objects; and a plan as text."""

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import yaml
from pydantic import BaseModel

from streamer.admin.mapping.api_models import DatabaseBody, TableBody, UrlBody, table_pattern
from streamer.commands.check.findings import Fix, found_lines, one_line
from streamer.commands.check.planned_copies import copy_lines
from streamer.commands.tenants.add_and_remove import TenantChange
from streamer.errors.command_lines import command
from streamer.errors.error_classes import InvalidError, NotFoundError
from streamer.mapping.rules import SourceLabel
from streamer.postgres.url_passwords import with_password

if TYPE_CHECKING:
    from streamer.admin.service.mapping_client import MappingClient

Row = dict[str, Any]


async def add_source(client: "MappingClient", database: str, url: str, sid: str | None) -> Row:
    """Add a url, and its database if new. Raises AdminError."""
    groups = await client.rows("database", {"name": database})
    group = groups[0] if groups else await client.create("database", {"name": database})
    try:
        return await client.create("url", {"database_id": group["id"], "url": url, "sid": sid})
    except BaseException:
        if not groups:
            await client.delete("database", group["id"])
        raise


async def set_source(
    client: "MappingClient",
    database: str,
    sid: str | None,
    *,
    url: str | None = None,
    password: str | None = None,
    settings: list[str],
) -> Row:
    """Change the url, password or settings of *sid*, or settings of its database.

    *settings*: ``name=YAML``. Without *sid*, a setting that urls and databases share applies to
    the database. Return the url, or the database if only its settings change. Raises AdminError.
    """
    group = await _database(client, database)
    of_url: Row = {} if url is None else {"url": url}
    of_group: Row = {}
    for name, value in map(_setting, settings):
        if name in _URL_SETTINGS and (sid is not None or name not in _DATABASE_SETTINGS):
            of_url[name] = _or_default(UrlBody, name, value)
        elif name in _DATABASE_SETTINGS:
            of_group[name] = _or_default(DatabaseBody, name, value)
        else:
            raise _unknown(name, (*_URL_SETTINGS, *_DATABASE_SETTINGS))
    if of_group and not of_url and sid is None and password is None:
        return await client.patch("database", group["id"], of_group)
    row = await _url(client, group, database, sid)
    if password is not None:
        of_url["url"] = with_password(str(of_url.get("url", row["url"])), password)
    if of_group:
        await client.patch("database", group["id"], of_group)
    return await client.patch("url", row["id"], of_url) if of_url else row


async def remove_source(client: "MappingClient", database: str, sid: str | None) -> None:
    """Remove the url of *sid*; without a sid, the whole database. Raises AdminError."""
    group = await _database(client, database)
    if sid is None:
        await client.delete("database", group["id"])
        return
    row = await _url(client, group, database, sid)
    await client.delete("url", row["id"])


async def add_tenants(
    client: "MappingClient", database: str, urls: list[tuple[str, str]], *, applies: bool
) -> TenantChange:
    """Add tenants to the draft; apply the draft if it contains no other change.

    *urls*: the url and sid of each tenant. Raises AdminError.
    """
    was_changed = await client.is_changed()
    for url, sid in urls:
        await add_source(client, database, url, sid)
    return await _apply_tenants(client, database, [sid for _, sid in urls], applies, was_changed)


async def remove_tenant(
    client: "MappingClient", database: str, sid: str, *, applies: bool
) -> TenantChange:
    """Remove a tenant from the draft; apply the draft if it contains no other change.

    *applies*: whether to apply such a draft. Raises AdminError.
    """
    was_changed = await client.is_changed()
    await remove_source(client, database, sid)
    return await _apply_tenants(client, database, [sid], applies, was_changed)


async def _apply_tenants(
    client: "MappingClient", database: str, sids: list[str], applies: bool, was_changed: bool
) -> TenantChange:
    labels: list[str] = [SourceLabel(database, sid) for sid in sids]
    if was_changed or not applies:
        why = "; the draft has other changes, too" if was_changed and applies else ""
        step = f"see `{command('plan')}`, then run `{command('apply')}`{why}"
        return TenantChange(labels, next_step=step, is_applied=False)
    answer = await client.apply(force=False)
    warning = answer["warning"]
    cause = None if warning is None else f"remove the cause of this error: {warning}"
    return TenantChange(labels, next_step=cause)


async def add_table(
    client: "MappingClient", database: str, fields: Row, settings: list[str]
) -> Row:
    """Add a table with further *settings*, as ``name=YAML``. Raises AdminError."""
    group = await _database(client, database)
    more = dict(_setting(text) for text in settings)
    return await client.create("table", {**fields, **more, "database_id": group["id"]})


async def set_table(
    client: "MappingClient", database: str, table: str, fields: Row, settings: list[str]
) -> Row:
    """Change *fields* and *settings* (``name=YAML``) of a table. Raises AdminError."""
    row = await _table(client, database, table)
    changes = dict(fields)
    for name, value in map(_setting, settings):
        if name not in _TABLE_SETTINGS:
            raise _unknown(name, _TABLE_SETTINGS)
        changes[name] = _or_default(TableBody, name, value)
    return await client.patch("table", row["id"], changes)


async def remove_table(client: "MappingClient", database: str, table: str) -> None:
    """Remove a table. Raises AdminError."""
    row = await _table(client, database, table)
    await client.delete("table", row["id"])


async def _table(client: "MappingClient", database: str, table: str) -> Row:
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
            hint="`streamer tables list` shows its tables",
        )
    return rows[0]


async def _url(client: "MappingClient", group: Row, database: str, sid: str | None) -> Row:
    """Return the url of *sid*; without a sid, the only url."""
    filters = {"database_id": group["id"]} | ({} if sid is None else {"sid": sid})
    rows = await client.rows("url", filters)
    if len(rows) == 1:
        return rows[0]
    if rows:
        raise InvalidError(
            f'database "{database}" has {len(rows)} urls', hint="choose one of them with --sid"
        )
    obstacle = "no url" if sid is None else f'no url with sid "{sid}"'
    raise NotFoundError(
        f'database "{database}" has {obstacle}', hint="`streamer sources list` shows its urls"
    )


async def _database(client: "MappingClient", name: str) -> Row:
    rows = await client.rows("database", {"name": name})
    if not rows:
        raise NotFoundError(
            f'there is no database "{name}"', hint="`streamer sources add` creates it"
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


_DATABASE_SETTINGS: Final = tuple(DatabaseBody.model_fields)
_URL_SETTINGS: Final = tuple(name for name in UrlBody.model_fields if name != "database_id")
_TABLE_SETTINGS: Final = tuple(
    field.alias or name for name, field in TableBody.model_fields.items() if name != "database_id"
)


def _or_default(body: type[BaseModel], name: str, value: Any) -> Any:
    """Return *value*; for null, the default value of the setting."""
    field = body.model_fields.get(name)
    if value is not None or field is None or field.is_required():
        return value
    default = field.get_default(call_default_factory=True)
    return default.value if isinstance(default, Enum) else default


def _unknown(name: str, names: Iterable[str]) -> InvalidError:
    return InvalidError(
        f'there is no setting "{name}"', hint=f"the settings are: {', '.join(sorted(names))}"
    )


def plan_lines(plan: Row) -> Iterable[str]:
    """Write a plan for people."""
    for source in plan["sources"]:
        name = source["database"] + (f":{source['sid']}" if source["sid"] is not None else "")
        reads = ", from a standby" if source["role"] == "standby" else ""
        if source["action"] == "keep":
            yield f"{name}: unchanged{reads}"
            continue
        is_left = source["action"] == "forgotten"
        action = "already removed" if is_left else source["action"]
        yield f"{name}: {action}; slot {source['slot']}: {source['slot_action']}{reads}"
        for table in source["tables"]:
            if table["action"] != "keep":
                yield f"  {_table_line(table)}"
        if source["publication_sql"]:
            yield f"  {'run' if is_left else 'streamer runs'} at the source:"
            yield from (f"    {one_line(sql)};" for sql in source["publication_sql"])
    for finding in plan["findings"]:
        place = " ".join(
            part for part in (finding["source"] or "target", finding["object"]) if part
        )
        fix = None
        if finding["fix"]:
            fix = Fix(
                finding["at"],
                tuple(finding["sql"]),
                finding["words"],
                introduction=finding["introduction"],
            )
        yield from found_lines(f"{finding['severity']:<7} {place}: {finding['problem']}", fix)
    for note in plan["notes"]:
        yield f"note    {note}"
    yield from copy_lines(plan["copies"], plan["sources_at_once"])
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
