"""Settings: what the configuration may say, with types, bounds and defaults.

Precedence: command line, environment (``STREAMER_TARGET__URL``), file, default. Everything else
about a setting (what it is for, its unit) is in ``config.example.yaml``, which a test keeps
complete.
"""

import enum
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema, core_schema
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from streamer.config.yaml_file import Document, Location, format_location
from streamer.errors import SettingsError
from streamer.mapping.rules import (
    Initial,
    OnColumnAdded,
    OnError,
    OnMaxRetainedWal,
    Secret,
    TableType,
    Transport,
)

ENVIRONMENT_PREFIX: Final = "STREAMER_"


class _SecretAnnotation:
    """Makes `Secret` a type pydantic knows: read from a string, never written out."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            Secret,
            core_schema.str_schema(min_length=1, strict=True),
            serialization=core_schema.plain_serializer_function_ser_schema(repr),
        )


SecretText = Annotated[Secret, _SecretAnnotation]


_SIZE: Final = re.compile(r"\s*(\d+)\s*(B|kB|MB|GB|TB)?\s*", re.ASCII)
_UNITS: Final = {None: 1, "B": 1, "kB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_BIGINT_MAX: Final = 2**63 - 1


def parse_size(value: Any) -> Any:
    """Read a size as PostgreSQL writes them; a number alone is bytes."""
    if not isinstance(value, str):
        return value
    if (match := _SIZE.fullmatch(value)) is None:
        raise ValueError('expected a size such as "10GB", with B, kB, MB, GB or TB, or bytes')
    return int(match[1]) * _UNITS[match[2]]


Size = Annotated[int, BeforeValidator(parse_size), Field(strict=True, le=_BIGINT_MAX)]
"""Bytes."""


class Strict(BaseModel):
    """A section: unknown keys are refused, values are what they seem."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class TargetSettings(Strict):
    """``target``"""

    url: SecretText
    schema_: str = Field(default="public", alias="schema", min_length=1)
    create_tables: bool = True
    create_fk_indexes: bool = False


_SECRET_NAME: Final = re.compile("(?i)secret|password|token|access.?key")


def _check_spark_settings(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for name, given in value.items():
        if not str(name).startswith("spark."):
            raise ValueError(f'"{name}" is not a setting of Spark: those begin with spark.')
        if _SECRET_NAME.search(str(name)) or re.search("://.*@", str(given)):
            raise ValueError(
                f'"{name}" would be seen in process lists; write it to spark-defaults.conf in the'
                " directory that SPARK_CONF_DIR names, with mode 0600"
            )
    return {
        name: str(given).lower() if isinstance(given, bool) else str(given)
        for name, given in value.items()
        if given is not None
    }


class SyncSection(Strict):
    """``sync``"""

    spark_master: str = "local[*]"
    spark_settings: Annotated[dict[str, str], BeforeValidator(_check_spark_settings)] = {}
    allow_insecure_spark: bool = False
    jobs: int = Field(default=4, ge=1, le=256)
    rows_per_second: float | None = Field(default=None, gt=0)
    defer_indexes: bool = True


def _check_listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if value and (not host or not port.isdigit() or not 0 <= int(port) <= 65535):
        raise ValueError("expected host:port, or an empty string to switch it off")
    return value


class HttpSettings(Strict):
    """``http``"""

    listen: Annotated[str, AfterValidator(_check_listen)] = "127.0.0.1:8000"
    trusted_proxies: list[str] = []


class Role(enum.StrEnum):
    """What somebody may do with the API and the page: look, or also change."""

    VIEWER = "viewer"
    ADMIN = "admin"


class UserSettings(Strict):
    """``admin.users[]``"""

    name: str = Field(min_length=1)
    password_hash: SecretText
    role: Role = Role.VIEWER


class AdminSettings(Strict):
    """``admin``"""

    token: SecretText | None = None
    viewer_token: SecretText | None = None
    users: list[UserSettings] = []
    key: SecretText | None = None
    key_file: Path | None = None
    session_hours: float = Field(default=12, gt=0, le=24 * 30)

    @property
    def has_credentials(self) -> bool:
        """Whether anybody can prove to be somebody."""
        return bool(self.token or self.viewer_token or self.users)


class SpoolSettings(Strict):
    """``spool``"""

    directory: Path | None = None

    @property
    def path(self) -> Path:
        """Where spools are: what was given, or a directory of the user's own."""
        return self.directory or Path(tempfile.gettempdir()) / f"streamer-spool-{os.getuid()}"


class UrlSettings(Strict):
    """``sources[].urls[]``"""

    url: SecretText
    sid: str | None = Field(default=None, min_length=1)


def _nothing_is_defaults(value: Any) -> Any:
    return {} if value is None else value


class TableSettings(Strict):
    """``sources[].tables.*``; nothing at all means: clone it under its own name."""

    target: str | None = None
    type: TableType = TableType.CLONE
    columns: dict[str, str] | None = None
    exclude: list[str] = []
    filter: str | None = None
    set: dict[str, str] = {}
    on_error: OnError | None = None
    initial: Initial = Initial.COPY
    truncate_target: bool = False
    on_column_added: OnColumnAdded = OnColumnAdded.STOP


class SourceSettings(Strict):
    """``sources[]``: a group of databases with the same tables."""

    database: str = Field(min_length=1)
    urls: list[UrlSettings] = Field(min_length=1)
    tables: dict[str, Annotated[TableSettings, BeforeValidator(_nothing_is_defaults)]] = Field(
        min_length=1
    )
    streaming: bool = True
    transport: Transport = Transport.TEXT
    forward_origins: bool = False
    failover: bool = False
    max_retained_wal: Annotated[Size, Field(ge=1 << 20)] | None = None
    on_max_retained_wal: OnMaxRetainedWal = OnMaxRetainedWal.WARN
    heartbeat_interval: float | None = Field(default=None, ge=0, le=3600)


class Settings(BaseSettings):
    """The whole configuration."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
        hide_input_in_errors=True,
        populate_by_name=True,
    )

    target: TargetSettings
    workers: int = Field(default=4, ge=1, le=64)
    commit_interval: float = Field(default=0.2, ge=0, le=60)
    consistency: Literal["table", "transaction"] = "table"
    on_error: OnError = OnError.STOP
    heartbeat_interval: float = Field(default=5.0, ge=0, le=3600)
    sync: SyncSection = SyncSection()
    http: HttpSettings = HttpSettings()
    spool: SpoolSettings = SpoolSettings()
    admin: AdminSettings = AdminSettings()
    mapping_database: Path | None = None
    sources: list[SourceSettings] = []


class _FileSource(PydanticBaseSettingsSource):
    """The file, below environment and command line."""

    def __init__(self, settings_class: type[BaseSettings], values: dict[str, Any]) -> None:
        super().__init__(settings_class)
        self._values = values

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values


def load_settings(document: Document, overrides: dict[str, Any] | None = None) -> Settings:
    """Validate a file's values, with environment and *overrides* above them.

    Raises SettingsError that names file, line and key of the first fault.
    """

    class FileSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, _FileSource(settings_cls, document.values)

    try:
        return FileSettings(**(overrides or {}))
    except ValidationError as exc:
        raise explain(exc, document.where) from None


_MESSAGES: Final = {
    "extra_forbidden": "unknown key",
    "missing": "required, but not given",
}


def explain(error: ValidationError, where: Callable[[Location], str]) -> SettingsError:
    """Return the first fault as an error of ours; *where* says which place a location is."""
    # The most specific fault first: an unknown key is often the cause of one that is missing.
    details = sorted(error.errors(), key=lambda detail: detail["type"] == "missing")
    detail = details[0]
    location: Location = detail["loc"]
    name = format_location(location)
    variable = f"{ENVIRONMENT_PREFIX}{'__'.join(str(part).upper() for part in location)}"
    hint = None
    if detail["type"] == "extra_forbidden":
        hint = "config.example.yaml lists every key"
    elif detail["type"] == "missing":
        hint = f"add it to the file or set {variable}"
    return SettingsError(f"{where(location)}: {name}: {fault_message(detail)}", hint=hint)


def fault_message(detail: Any) -> str:
    """Say in our words what pydantic found; without the value."""
    return _MESSAGES.get(detail["type"], _lower_first(detail["msg"]))


def _lower_first(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
