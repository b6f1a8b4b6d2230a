"""Requests and answers of the API. The models of a database, a url and a table derive from the
settings of the YAML file. So API and file accept the same settings.
"""

from collections.abc import Iterable
from copy import copy
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from streamer.config.connection_settings import Strict
from streamer.config.settings import (
    SourceSettings,
    TableSettings,
    UrlSettings,
    fault_message,
)
from streamer.config.yaml_file import format_location
from streamer.control.resync_options import Mode, Resync
from streamer.copy.resync_scope import parse_resync
from streamer.errors.error_classes import InvalidError, MappingError
from streamer.mapping.expressions import EXPRESSION_BYTES_MAX
from streamer.mapping.relation_names import RelationPattern, parse_relation
from streamer.mapping.rule_options import OnError
from streamer.mapping.sid_and_history_columns import TABLE_COLUMNS_MAX
from streamer.postgres.url_passwords import MASK, check_url, has_mask

SOURCES_MAX: Final = 2000
"""The limit of a request about many sources."""

Body = TypeVar("Body", bound=BaseModel)

ID_MAX: Final = 2**63 - 1
"""The largest integer of SQLite."""


def check_text(value: str) -> str:
    """Refuse text that cannot be stored or sent."""
    if "\0" in value:
        raise ValueError("a NUL character cannot be part of it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode") from None
    return value


def _check_url(value: str) -> str:
    if has_mask(value):
        return check_text(value)  # checked once the stored password has replaced the mask
    check_url(value)
    return value


Id = Annotated[int, Field(ge=1, le=ID_MAX, strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(check_text)]
Sid = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(check_text)]
Condition = Annotated[str, Field(max_length=EXPRESSION_BYTES_MAX), AfterValidator(check_text)]
Url = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_check_url)]


def _fields(model: type[BaseModel], without: Iterable[str]) -> dict[str, Any]:
    return {
        name: (field.annotation, copy(field))
        for name, field in model.model_fields.items()
        if name not in set(without)
    }


def _extend(name: str, base: type[BaseModel], model: type[BaseModel], *without: str) -> Any:
    return create_model(name, __base__=base, **_fields(model, without))


class _Body(Strict):
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, populate_by_name=True
    )


class _DatabaseFields(_Body):
    name: Name = Field(description="A name for a group of databases with the same tables.")


class _UrlFields(_Body):
    database_id: Id = Field(description="The id of its database in `/api/databases`.")
    url: Url = Field(
        description="A libpq URL or key=value string; `${NAME}` stands for an environment "
        f"variable. `{MASK}` stands for a stored password."
    )
    sid: Sid | None = Field(
        default=None, description="Written to the column `sid` of the target's tables."
    )


class _TableFields(_Body):
    database_id: Id = Field(description="The id of its database in `/api/databases`.")
    name: Name = Field(
        description="The source's table, or a pattern with `*`. Without `schema`, `schema.table` "
        "means both."
    )
    schema_: Name | None = Field(
        default=None, alias="schema", description="The source's schema. Default: public."
    )


_OF_GROUP: Final = ("database", "urls", "tables")

DatabaseBody = _extend("Database", _DatabaseFields, SourceSettings, *_OF_GROUP)
# With a command, a user of the page could run programs on the machine.
COMMAND_FIELDS: Final = ("password_command", "password_lifetime")
UrlBody = _extend("Url", _UrlFields, UrlSettings, "url", "sid", *COMMAND_FIELDS)
TableBody = _extend("Table", _TableFields, TableSettings)

BODIES: Final[dict[str, type[BaseModel]]] = {
    "database": DatabaseBody,
    "url": UrlBody,
    "table": TableBody,
}
COLUMNS: Final = {
    "database": ("name",),
    "url": ("database_id", "sid", "url"),
    "table": ("database_id", "schema", "name"),
}
"""Fields of every row; the remaining fields are settings, stored unless equal to the default."""


def _patch(name: str, body: type[BaseModel]) -> Any:
    """Return *body* without required fields; missing fields keep their values."""
    fields: dict[str, Any] = {}
    for field_name, field in body.model_fields.items():
        optional = copy(field)
        optional.default = None
        optional.default_factory = None
        fields[field_name] = (field.annotation, optional)
    return create_model(name, __base__=_Body, **fields)


DatabasePatch = _patch("DatabaseChanges", DatabaseBody)
UrlPatch = _patch("UrlChanges", UrlBody)
TablePatch = _patch("TableChanges", TableBody)


def _stored(name: str, body: type[BaseModel], **more: Any) -> Any:
    """Return *body* for an answer, with the number of the row."""
    fields: dict[str, Any] = {
        n: (field.annotation, copy(field)) for n, field in body.model_fields.items()
    }
    base: Any = create_model(f"_{name}", __base__=_Stored, **more)
    return create_model(name, __base__=base, **fields)


class _Stored(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    id: int


DatabaseRow = _stored("StoredDatabase", DatabaseBody)
UrlRow = _stored("StoredUrl", UrlBody, database=(str, ...))
TableRow = _stored("StoredTable", TableBody, database=(str, ...))


class MappingSettings(_Body):
    """Settings of the mapping as a whole; null: as the configuration file says."""

    target_schema: Name | None = Field(
        default=None, description="Schema of target tables whose rule names none."
    )
    on_error: OnError | None = Field(
        default=None, description="Reaction of a table when the target rejects one of its changes."
    )


class Page(BaseModel):
    """A part of a list. ``total``: the number of items on all pages."""

    items: list[Any]
    total: int
    page: int
    per_page: int


def _page(name: str, row: Any) -> Any:
    fields: dict[str, Any] = {"items": (list[row], ...)}
    return create_model(name, __base__=Page, **fields)


DatabasePage = _page("DatabasePage", DatabaseRow)
UrlPage = _page("UrlPage", UrlRow)
TablePage = _page("TablePage", TableRow)


class AuditEntry(BaseModel):
    """A change of the mapping or an operator's request: user, time, old and new values without
    passwords.
    """

    id: int
    at: str
    actor: str
    action: str
    object: str
    object_id: int | None
    label: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    state: str | None = None
    """The state of a request: queued, taken, done or failed."""
    error: str | None = None


class AuditPage(Page):
    items: list[AuditEntry]


class ErrorDetail(BaseModel):
    """An error, and the next step."""

    code: str
    message: str
    hint: str | None = None
    runbook: str
    """The path under which this process serves the runbook."""


class ErrorAnswer(BaseModel):
    """Every answer of 4xx and 5xx."""

    error: ErrorDetail


class Login(_Body):
    name: Name
    password: Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(check_text)]


class WhoAmI(BaseModel):
    """The user behind a request. ``csrf``: the value of X-CSRF-Token for changes in a session."""

    name: str
    role: Literal["viewer", "admin"]
    csrf: str | None = None


class DiscoverBody(_Body):
    """A database to survey: a stored one, or a url to try."""

    url: Url | None = None
    url_id: Id | None = None


class ApplyBody(_Body):
    """``force``: apply even if the plan found errors that would stop a source or a table."""

    force: bool = False


class ImportBody(_Body):
    """A configuration file, or the map.yaml of kuvasz-streamer; its sources replace the draft."""

    yaml: Annotated[str, Field(max_length=5_000_000), AfterValidator(check_text)]
    exclude_missing: bool = Field(
        default=False,
        description="When importing a map.yaml, leave out columns that the target lacks, as "
        "kuvasz-streamer does (`on_column_added: ignore`).",
    )


class ActionBody(_Body):
    """``sid`` restricts the action to this source of the table's database."""

    sid: Sid | None = None


class ResumeBody(ActionBody):
    """``skip_deletes``: leave out the deletes of the transaction before which `max_deleted_rows`
    paused the table.
    """

    skip_deletes: bool = False


class ResyncBody(ActionBody):
    """``mode``: write all rows again, or only those that differ. ``force``: leave out columns that
    the target lacks. ``where``: copy only rows for which this SQL over the source's columns is
    true. ``columns``: copy only these columns of the existing rows, by the target's names.
    ``skip_changes``: leave out the changes before the copy, so the past of a history or append
    table gets a gap.
    """

    mode: Mode = Mode.RELOAD
    force: bool = False
    skip_changes: bool = False
    where: Condition | None = None
    columns: Annotated[list[Name], Field(min_length=1, max_length=TABLE_COLUMNS_MAX)] | None = None

    def resync(self) -> Resync:
        """Return the resync, checked as on the command line. Raises InvalidError."""
        try:
            return parse_resync(
                self.mode,
                force=self.force,
                where=self.where,
                columns=self.columns,
                skips_changes=self.skip_changes,
            )
        except MappingError as exc:
            raise InvalidError(exc.message, hint=exc.hint) from None


class SourceName(_Body):
    """A source."""

    database: Name
    sid: Sid | None = None


class BulkBody(_Body):
    """A selection of tables in ``sources``.

    ``tables``: names or patterns; an empty list selects all. ``state``: the state of the tables;
    null selects any state.
    """

    sources: Annotated[list[SourceName], Field(min_length=1, max_length=SOURCES_MAX)]
    tables: Annotated[list[Name], Field(max_length=TABLE_COLUMNS_MAX)] = Field(default_factory=list)
    state: Literal["error", "paused", "ready"] | None = None


class BulkResyncBody(BulkBody):
    """``mode``, ``force`` and ``skip_changes``: see the resync of one table."""

    mode: Mode = Mode.RELOAD
    force: bool = False
    skip_changes: bool = False


class BulkOutcome(BaseModel):
    """The outcome of the request to a source. ``error``: why some tables are left out."""

    database: str
    sid: str | None
    tables: int
    error: str | None
    hint: str | None


class BulkAnswer(BaseModel):
    """``tables``: the number of tables that got the request. ``failed``: the number of sources with
    an error; ``sources`` lists these first.
    """

    action: Literal["pause", "resume", "resync"]
    tables: int
    failed: int
    sources: list[BulkOutcome]


class HistoryMark(BaseModel):
    """An event to mark in a chart. ``at``: unix time. A restart, error or copy in the memory of the
    process.
    """

    at: int
    kind: Literal["restart", "error", "copy"]
    text: str


class _History(BaseModel):
    """The last day as columns of equal length. ``times``: unix time, each 10 s in the last hour,
    before that each minute. An unknown value is null.
    """

    times: list[int]
    lag_seconds: list[float | None]
    changes_per_second: list[float | None]
    marks: list[HistoryMark]


class HistoryAnswer(_History):
    """The last day of a source."""

    source: str
    retained_wal_bytes: list[float | None]


class TableHistoryAnswer(_History):
    """The last day of a table, as far as this process has sampled the table."""

    source: str
    table: str
    held_bytes: list[float | None]


class FleetHistoryAnswer(_History):
    """The last day of all sources: the highest lag, and totals. If processes share the sources,
    each point is a minute.
    """

    retained_wal_bytes: list[float | None]
    p50_seconds: list[float | None]
    p95_seconds: list[float | None]
    p99_seconds: list[float | None]


class SourceProblem(BaseModel):
    """A problem of a source, or of a table of it, with its runbook."""

    place: str
    what: str
    kind: Literal["bad", "warning"]
    runbook: str
    command: str | None


class FleetSource(BaseModel):
    """A source in a line. ``health``: ``bad`` and ``warning`` need an operator, ``busy`` copies.

    ``states``: the number of tables by the state that the page shows. A ready table that waits,
    such as for a lock, counts as ``waiting``. ``problems``: the first of ``problem_count``
    problems.
    """

    database: str
    sid: str | None
    label: str
    state: str
    health: Literal["bad", "warning", "busy", "good", "quiet"]
    problem_count: int
    problems: list[SourceProblem]
    lag_seconds: float | None
    lag_bytes: int | None
    retained_wal_bytes: int | None
    waiting_for: str | None
    process: str | None
    """The process that runs the source."""
    table_count: int
    states: dict[str, int]
    copied_share: float | None
    seconds_left: float | None


class FleetPage(Page):
    """``summary``: the fleet in words. ``healths``: the number of sources by health."""

    summary: str
    healths: dict[str, int]
    items: list[FleetSource]


class TenantBody(_Body):
    """A tenant: a database of a group."""

    database: Name
    sid: Sid


class NewTenantBody(TenantBody):
    """A tenant to add. In ``url``, ``{sid}`` stands for the sid."""

    url: Annotated[str, Field(min_length=1, max_length=10_000)]


class QuarantineBody(_Body):
    """A selection of changes by number, or of all changes of a table (a name or a pattern)."""

    ids: list[Id] = Field(default_factory=list, max_length=10_000)
    table: Name | None = None
    database: Name | None = None
    sid: Sid | None = None


def explain(error: ValidationError) -> InvalidError:
    """Return an error that names the first field at fault."""
    return InvalidError(fault(error.errors()[0]))


def fault(detail: Any) -> str:
    """Return a line that names the field at fault, and the fault."""
    location = [part for part in detail["loc"] if part not in ("body", "query", "path", "header")]
    name = format_location(tuple(location))
    message = fault_message(detail)
    return f"{name}: {message}" if name else message


def validate(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row for storage and answers. Raises InvalidError."""
    try:
        body = BODIES[kind].model_validate(values)
    except ValidationError as exc:
        raise explain(exc) from None
    fields = body.model_dump(mode="json", by_alias=True)
    for name, value in fields.items():
        _check_texts(name, value)
    if kind == "table":
        pattern = table_pattern(fields["name"], fields["schema"])
        fields["schema"], fields["name"] = pattern.written_namespace, pattern.written_name
    return fields


def read_as(model: type[Body], values: dict[str, Any]) -> Body:
    """Return *values* as a body of the API. Raises InvalidError."""
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        raise explain(exc) from None


def validate_as(model: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """Return *values* in the form of a body of the API. Raises InvalidError."""
    return read_as(model, values).model_dump(mode="json")


def _check_texts(place: str, value: Any) -> None:
    """Refuse text, at any depth, that storage or transport rejects. Raises InvalidError."""
    if isinstance(value, str):
        try:
            check_text(value)
        except ValueError as exc:
            raise InvalidError(f"{place}: {exc}") from None
    elif isinstance(value, list):
        for item in value:
            _check_texts(place, item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_texts(place, key)
            _check_texts(place, item)


def table_pattern(name: str, schema: str | None) -> RelationPattern:
    """Read a table's name, in one part or in two. Raises InvalidError."""
    try:
        if schema is None:
            return parse_relation(name, "public")
        return parse_relation(f"{_part(schema)}.{_part(name)}", "public")
    except MappingError as exc:
        raise InvalidError(f"name: {exc.message}", hint=exc.hint) from None


def _part(text: str) -> str:
    """Quote an unquoted name that contains a dot: a field holds a single part of a name."""
    if "." in text and not (len(text) > 1 and text.startswith('"') and text.endswith('"')):
        return '"' + text.replace('"', '""') + '"'
    return text


def row_settings(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the part of *fields* to store as settings: without columns and default values."""
    model = BODIES[kind]
    body = model.model_validate({k: v for k, v in fields.items() if k not in ("id", "database")})
    stored = body.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {name: value for name, value in stored.items() if name not in COLUMNS[kind]}


def default_settings(kind: str) -> dict[str, Any]:
    """Return the settings of a row with default values."""
    fields: dict[str, Any] = {}
    for name, field in BODIES[kind].model_fields.items():
        alias = field.alias or name
        if alias not in COLUMNS[kind]:
            value = field.get_default(call_default_factory=True)
            fields[alias] = getattr(value, "value", value)
    return fields
