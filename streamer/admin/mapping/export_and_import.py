"""Exports the mapping as YAML, and imports YAML of streamer or the map.yaml of kuvasz-streamer.

An export is a configuration that `streamer run` accepts. The export contains the settings of the
configuration file and the sources of the store by name, without default values. An export never
contains a secret: a variable stands in place of a stored password or of a secret of the file. A
command that prints a secret counts as a secret, too. An import into the same store keeps the stored
password of each URL that is exactly as exported. Pure.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from streamer.admin.mapping import api_models
from streamer.admin.mapping.kuvasz_import import from_kuvasz
from streamer.admin.mapping.mapping_of_draft import groups_of
from streamer.admin.mapping.written_settings import WrittenSettings, is_url
from streamer.config.settings import SourceSettings, explain
from streamer.config.yaml_file import Document, Location, format_location, parse_document
from streamer.errors.error_classes import InvalidError, SettingsError
from streamer.postgres.url_passwords import MASK, mask_written, replace_secrets

Row = dict[str, Any]
Content = dict[str, Any]
DraftRows = list[tuple[Row, list[Row], list[Row]]]
"""Databases with their urls and tables."""

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NOT_EXPORTED: Final = ("mapping_database", "sources", "admin")


class _Variables:
    """Unique, unused names for the variables that stand for secrets.

    ``settings``: the exported settings of the configuration file.
    """

    def __init__(self, urls: dict[int, str], base: WrittenSettings) -> None:
        texts = [*urls.values(), *_strings(base.values)]
        self._taken = {name for text in texts for name in _REFERENCE.findall(text)}
        self.names: list[str] = []
        exported = {k: v for k, v in base.values.items() if k not in _NOT_EXPORTED}
        self.settings = replace(base, values=exported).without_secrets(self._hide)

    def stand_in(self, url: str, label: str) -> str:
        """Return *url* with a variable for each password."""
        return replace_secrets(url, lambda span: self._variable(label, span.parameter))

    def _hide(self, location: Location, text: str, loaded: str) -> str:
        *parents, name = map(str, location)
        label = "_".join(parents)
        if is_url(location) and mask_written(text, loaded) != MASK:
            return self.stand_in(text, label)
        return self._variable(label, name)

    def _variable(self, label: str, parameter: str) -> str:
        base = re.sub(r"[^A-Z0-9_]", "_", f"{label}_{parameter}".upper())
        base = base if base[:1].isalpha() else f"_{base}"
        chosen, number = base, 2
        while chosen in self._taken:
            chosen, number = f"{base}_{number}", number + 1
        self._taken.add(chosen)
        self.names.append(chosen)
        return f"${{{chosen}}}"


HEADER: Final = """\
# Backup of streamer's mapping, as a configuration file. It holds no passwords.
# To restore it: streamer import FILE, then streamer apply.
"""


def _users_comment(users: Sequence[tuple[str, str]]) -> str:
    """Return comment lines with the users, whose passwords an operator must set again."""
    lines = [f"#   streamer users add {shlex.quote(name)} --role {role}\n" for name, role in users]
    # A name may contain a line break, which would end the comment.
    lines = [line for line in lines if len(line.splitlines()) == 1]
    return "# Users of the mapping database; add them again, each with a password:\n" + "".join(
        lines
    )


def export_mapping(
    content: Content,
    urls: dict[int, str],
    base: WrittenSettings,
    users: Sequence[tuple[str, str]] = (),
) -> tuple[str, list[str]]:
    """Return the YAML, and the names of the variables that stand for secrets.

    *base*: the configuration file.
    """
    groups = groups_of(content)
    variables = _Variables(urls, base)
    document = dict(variables.settings)
    if (schema := content["settings"].get("target_schema")) is not None:
        document["target"] = {**(document.get("target") or {}), "schema": schema}
    if (on_error := content["settings"].get("on_error")) is not None:
        document["on_error"] = on_error
    document["sources"] = [
        _export_group(group.database, group.urls, group.tables, urls, variables)
        for group in groups
        if group.is_complete
    ]
    text = write_yaml(document)
    comment = _users_comment(users) if users else ""
    return HEADER + comment + text, variables.names


def _export_group(
    database: Row,
    rows: list[Row],
    tables: dict[str, Row],
    urls: dict[int, str],
    variables: _Variables,
) -> Row:
    exported = []
    for row in rows:
        entry = {"url": variables.stand_in(urls[row["id"]], _label(database, row))}
        if row["sid"] is not None:
            entry["sid"] = row["sid"]
        exported.append({**entry, **row["settings"]})
    return {
        "database": database["name"],
        "urls": exported,
        **database["settings"],
        "tables": {
            key.removeprefix("public.") if _is_in_public(row) else key: row["settings"] or None
            for key, row in tables.items()
        },
    }


def _is_in_public(row: Row) -> bool:
    return bool(row["schema"] == "public")


class _Dumper(yaml.SafeDumper):
    """Writes null as an empty text, and indents lists below their key."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "")
)


def write_yaml(document: Row) -> str:
    """Return *document* in the form that an operator would write."""
    return yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
        default_flow_style=False,
    )


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


# ---- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Import:
    """The groups and settings of a file. ``settings``: None for a file of kuvasz-streamer.
    ``notes``: messages for the user.
    """

    groups: DraftRows
    settings: Row | None = None
    notes: list[str] = field(default_factory=list)


def read_import(path: Path, text: str, *, excludes_missing: bool = False) -> Import:
    """Read a configuration file or a map.yaml. Raises ConfigurationError with line and key.

    *excludes_missing*: see `from_kuvasz`.
    """
    document = parse_document(path, text, replace=False, list_key="sources")
    notes: list[str] = []
    if document.is_list:
        document.values["sources"] = [
            from_kuvasz(
                group, ("sources", number), document, notes, excludes_missing=excludes_missing
            )
            for number, group in enumerate(document.values["sources"])
        ]
    elif excludes_missing:
        raise SettingsError(
            f"{path}: --exclude-missing is for a mapping of kuvasz-streamer",
            hint="set `on_column_added: ignore` for the tables instead",
        )
    sources = document.values.get("sources")
    if not isinstance(sources, list):
        raise SettingsError(
            f"{path}: the file has no `sources`",
            hint="import takes a configuration file with `sources`, or a map.yaml of "
            "kuvasz-streamer",
        )
    groups = []
    names: set[str] = set()
    for number, group in enumerate(sources):
        location: Location = ("sources", number)
        model = _validate(group, location, document)
        if model.database in names:
            raise SettingsError(
                f'{document.where(location)}: database "{model.database}" occurs twice',
                hint="merge its urls and tables",
            )
        names.add(model.database)
        groups.append(_rows(group, location, document))
    return Import(groups, None if document.is_list else _settings(document), notes)


def _validate(group: Any, location: Location, document: Document) -> SourceSettings:
    try:
        return SourceSettings.model_validate(group)
    except ValidationError as exc:
        raise explain(exc, lambda inner: document.where((*location, *inner))) from None


def _settings(document: Document) -> Row:
    target = document.values.get("target")
    settings: Row = {
        "target_schema": target.get("schema") if isinstance(target, dict) else None,
        "on_error": document.values.get("on_error"),
    }
    try:
        return api_models.MappingSettings.model_validate(settings).model_dump(mode="json")
    except ValidationError as exc:
        raise explain(exc, document.where) from None


def _rows(group: Row, location: Location, document: Document) -> tuple[Row, list[Row], list[Row]]:
    database = {k: v for k, v in group.items() if k not in ("database", "urls", "tables")}
    urls = [
        _row("url", {**url, "database_id": 1}, (*location, "urls", number), document)
        for number, url in enumerate(group["urls"])
    ]
    tables = []
    for key, table in group["tables"].items():
        place = (*location, "tables", key)
        tables.append(
            _row("table", {**(table or {}), "name": key, "database_id": 1}, place, document)
        )
    named = _row("database", {**database, "name": group["database"]}, location, document)
    for kind, rows in (("url", urls), ("table", tables)):
        seen: set[Any] = set()
        for row in rows:
            key_of_row = row["sid"] if kind == "url" else (row["schema"], row["name"])
            if key_of_row in seen:
                where = document.where((*location, f"{kind}s"))
                name = key_of_row if kind == "url" else ".".join(key_of_row)
                raise SettingsError(f"{where}: {kind} {name} occurs twice")
            seen.add(key_of_row)
    return named, urls, tables


def _row(kind: str, values: Row, location: Location, document: Document) -> Row:
    try:
        return api_models.validate(kind, values)
    except InvalidError as exc:
        where = f"{document.where(location)}: {format_location(location)}"
        raise SettingsError(f"{where}: {exc.message}", hint=exc.hint) from None


def mask_passwords(
    groups: DraftRows, content: Content, urls: dict[int, str], base: WrittenSettings
) -> DraftRows:
    """In URLs that are exactly as exported, replace the variables with masks of the passwords."""
    variables = _Variables(urls, base)
    stored = {
        (group.database["name"], row["sid"]): (
            variables.stand_in(urls[row["id"]], _label(group.database, row)),
            row["url"],
        )
        for group in groups_of(content)
        if group.is_complete
        for row in group.urls
    }
    restored: DraftRows = []
    for database, url_rows, tables in groups:
        rows = []
        for row in url_rows:
            exported, masked = stored.get((database["name"], row["sid"]), ("", ""))
            rows.append({**row, "url": masked} if row["url"] == exported else row)
        restored.append((database, rows, tables))
    return restored


def _label(database: Row, url: Row) -> str:
    name = str(database["name"])
    return name if url["sid"] is None else f"{name}_{url['sid']}"
