"""The rows of the store as a `Mapping`, with the models and the builder of the YAML file.

The mapping omits an unfinished database, which lacks a url or a table. Pure, except that this
module reads environment variables, as the reader of a file does.
"""

from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from streamer.config.allowed_names import (
    HINT,
    AllowedNames,
    NotAllowedError,
)
from streamer.config.settings import Settings, SourceSettings, explain
from streamer.config.static_mapping import MappingBuilder
from streamer.config.yaml_file import Location, Replaced, escape_references, format_location
from streamer.errors.error_classes import (
    ConfigurationError,
    InvalidError,
    SettingsError,
    StoreError,
)
from streamer.mapping.rule_options import OnError
from streamer.mapping.rules import Mapping, MappingFault, SourceLabel
from streamer.postgres.conninfo import without_stored_passwords

Row = dict[str, Any]
Content = dict[str, Any]

_HINT: Final = "set it in the environment of `streamer run`"


@dataclass(frozen=True, slots=True)
class _Group:
    """A database, its urls and its tables."""

    database: Row
    urls: list[Row]
    tables: dict[str, Row]

    @property
    def is_complete(self) -> bool:
        return bool(self.urls and self.tables)


def groups_of(content: Content) -> list[_Group]:
    """Return the databases of *content* with their urls and tables, in order of name."""
    groups = []
    for database in sorted(content["databases"], key=lambda row: str(row["name"])):
        urls = [row for row in content["urls"] if row["database_id"] == database["id"]]
        tables = [row for row in content["tables"] if row["database_id"] == database["id"]]
        groups.append(
            _Group(
                database,
                sorted(urls, key=lambda row: row["sid"] or ""),
                {
                    table_key(row): row
                    for row in sorted(tables, key=lambda row: (row["schema"], row["name"]))
                },
            )
        )
    return groups


def table_key(row: Row) -> str:
    """Return the name of a table as a key of ``tables`` in the YAML."""
    return f"{row['schema']}.{row['name']}"


def unfinished(content: Content) -> list[str]:
    """Return a line for each omitted database, with the reason."""
    return [
        f'database "{group.database["name"]}" has no {"table" if group.urls else "url"} yet'
        for group in groups_of(content)
        if not group.is_complete
    ]


def build_mapping(
    content: Content, urls: Dictionary[int, str | StoreError], settings: Settings
) -> Mapping:
    """Return the sources that the rows describe.

    *urls*: complete with passwords, by id, or the error of an unreadable password. Raises
    ConfigurationError that names object and field.
    """
    groups = [group for group in groups_of(content) if group.is_complete]
    places = _Places(groups)
    models = []
    variables = Replaced()
    allowed = AllowedNames(settings.admin)
    faults: dict[Location, MappingFault] = {}
    for number, group in enumerate(groups):
        location: Location = ("sources", number)
        values = {
            **group.database["settings"],
            "database": group.database["name"],
            "urls": [
                {**row["settings"], "url": _url(row, urls), "sid": row["sid"]} for row in group.urls
            ],
            "tables": {key: row["settings"] for key, row in group.tables.items()},
        }
        for at, row in enumerate(group.urls):
            if isinstance(refused := urls[row["id"]], StoreError):
                faults[*location, "urls", at, "url"] = MappingFault(refused.message, refused.hint)
        values = _without_refused(values, location, allowed, places, faults)
        try:
            replaced = variables.in_source(values, location)
        except LookupError as exc:
            raise SettingsError(f"{places.describe(location)}: {exc.args[0]}", hint=_HINT) from None
        for url in replaced["urls"]:
            if url.get("password_file") is None:
                url["url"] = without_stored_passwords(url["url"])
        models.append(_validate(replaced, location, places))
    for where, text in variables.missing.items():
        faults.setdefault(where, MappingFault(f"{places.describe(where)}: {text}", _HINT))
    return MappingBuilder(
        models,
        target_namespace(content, settings),
        default_on_error(content, settings),
        settings,
        places.describe,
        variables,
        faults,
        history=settings.history,
    ).build()


def _without_refused(
    value: Any,
    location: Location,
    allowed: AllowedNames,
    places: "_Places",
    faults: dict[Location, MappingFault],
) -> Any:
    """Record a fault of the source for each string that names a forbidden variable or file.

    The environment does not replace the variables of such a string.
    """
    if isinstance(value, dict):
        items = value.items()
        return {k: _without_refused(v, (*location, k), allowed, places, faults) for k, v in items}
    if isinstance(value, list):
        numbered = enumerate(value)
        return [_without_refused(v, (*location, n), allowed, places, faults) for n, v in numbered]
    if not isinstance(value, str):
        return value
    is_of_url = location[2:3] == ("urls",)
    try:
        if is_of_url and location[4:] == ("url",):
            allowed.check_url(value)
        else:
            allowed.check_text(value)
        if is_of_url and location[4:] == ("password_file",):
            allowed.check_file(value)
    except NotAllowedError as exc:
        at = (*location[:4], "url") if is_of_url else location
        faults.setdefault(at, MappingFault(f"{places.describe(location)}: {exc}", HINT))
        return escape_references(value)
    return value


def _url(row: Row, urls: Dictionary[int, str | StoreError]) -> str:
    url = urls[row["id"]]
    return str(row["url"]) if isinstance(url, StoreError) else url


def target_namespace(content: Content, settings: Settings) -> str:
    """Return the schema of target tables whose rule names none."""
    return str(content["settings"].get("target_schema") or settings.target.schema_)


def default_on_error(content: Content, settings: Settings) -> OnError:
    """Return the error policy for tables whose rule sets no policy."""
    policy = content["settings"].get("on_error")
    try:
        return OnError(policy) if policy is not None else settings.on_error
    except ValueError:
        raise SettingsError(f"settings: on_error: {policy} is not known") from None


def _validate(values: Row, location: Location, places: "_Places") -> SourceSettings:
    try:
        return SourceSettings.model_validate(values)
    except ValidationError as exc:
        raise explain(exc, lambda inner: places.describe((*location, *inner))) from None


class _Places:
    """Names the object and the field at a location."""

    _PARTS: Final = ("urls", "tables")

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def describe(self, location: Location) -> str:
        if len(location) < 2 or not isinstance(location[1], int):
            return "mapping"
        group = self._groups[location[1]]
        name = group.database["name"]
        parts = location[2:]
        if len(parts) < 2 or parts[0] not in self._PARTS:
            return _joined(f'database {group.database["id"]} "{name}"', parts)
        if parts[0] == "urls":
            assert isinstance(parts[1], int)
            url = group.urls[parts[1]]
            label = SourceLabel(name, url["sid"])
            return _joined(f'url {url["id"]} "{label}"', parts[2:])
        table = group.tables[str(parts[1])]
        return _joined(f'table {table["id"]} "{parts[1]}" of database "{name}"', parts[2:])


def _joined(place: str, field: Location) -> str:
    return f"{place}: {format_location(field)}" if field else place


def check_table(fields: Row, settings: Settings) -> None:
    """Reject faults of a table's rule that need no server to detect. Raises InvalidError."""
    rule = {
        k: v
        for k, v in fields.items()
        if k not in ("id", "database_id", "schema", "name", "database")
    }
    try:
        replaced = replace_all(rule, AllowedNames(settings.admin))
    except LookupError:
        return  # `apply` reports this error: an operator may still set the variable
    except NotAllowedError as exc:
        raise InvalidError(str(exc), hint=HINT) from None
    key = table_key(fields)
    try:
        group = SourceSettings.model_validate(
            {"database": "x", "urls": [{"url": "host=x"}], "tables": {key: replaced}}
        )
        MappingBuilder(
            [group],
            settings.target.schema_,
            settings.on_error,
            settings,
            lambda location: _field(location),
            history=settings.history,
        ).build()
    except ValidationError as exc:
        error = explain(exc, _field)
        raise InvalidError(error.message, hint=error.hint) from None
    except ConfigurationError as exc:
        raise InvalidError(exc.message, hint=exc.hint) from None


def _field(location: Location) -> str:
    return format_location(location[4:]) or "target"


def replace_all(value: Any, allowed: AllowedNames) -> Any:
    """Replace variables in every string of *value*. Raises LookupError, NotAllowedError."""
    if isinstance(value, dict):
        return {key: replace_all(item, allowed) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_all(item, allowed) for item in value]
    return allowed.replace(value) if isinstance(value, str) else value
