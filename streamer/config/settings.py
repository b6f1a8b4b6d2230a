"""Settings: names, types, bounds, defaults and descriptions.

Precedence: command line, environment (``STREAMER_TARGET__URL``), file, default. Descriptions live
here only. ``make reference`` writes them to ``docs/reference/configuration.md`` and
``config.example.yaml``; the forms of the page and the API show them too. A form shows only the
first sentence of a description. ``title`` is the label in a form, ``examples`` the value in
``config.example.yaml``.
"""

import enum
import os
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from streamer.config.connection_settings import ConnectionSettings, Numbers, SecretText, Strict
from streamer.config.hash_keys import HashKeySettings, HashSettings
from streamer.config.notify_section import NotifySection
from streamer.config.opentelemetry_section import OpenTelemetrySection
from streamer.config.size_setting import Size
from streamer.config.sync_section import SyncSection
from streamer.config.yaml_file import Document, Location, format_location
from streamer.errors.error_classes import MappingError, SettingsError
from streamer.mapping.relation_names import parse_relation
from streamer.mapping.rule_options import (
    Create,
    DdlCapture,
    DdlKind,
    Initial,
    Interval,
    Keys,
    MetadataKind,
    OnColumnAdded,
    OnDdl,
    OnDelete,
    OnError,
    OnExpired,
    OnMaxRetainedWal,
    OnTableDropped,
    TableType,
    Transport,
    VersionColumn,
)

ENVIRONMENT_PREFIX: Final = "STREAMER_"
METRICS_TABLES_MAX: Final = 300
"""A table has up to eighteen series, and a process should stay below 10,000 series."""


def _restore_off(value: Any) -> Any:
    """YAML reads a plain ``off`` as false."""
    return "off" if value is False else value


_WORD_FOR_ALL: Final = TypeAdapter(OnDdl)
_BY_KIND: Final = TypeAdapter(dict[DdlKind, OnDdl])


def _on_ddl(value: Any, _: object) -> OnDdl | dict[DdlKind, OnDdl]:
    """Read a word or a dictionary. An error names only the form that the user wrote."""
    return (_WORD_FOR_ALL if isinstance(value, str) else _BY_KIND).validate_python(value)


class TargetSettings(ConnectionSettings):
    """``target``"""

    url: SecretText = Field(
        description="The target database, as a libpq URL or key=value string. An error "
        "names each libpq parameter that streamer does not support at the target.",
        examples=["postgresql://loader:${DW_PASSWORD}@warehouse.example/dw?sslmode=verify-full"],
    )
    schema_: str = Field(
        default="public",
        alias="schema",
        min_length=1,
        description="Schema of target tables whose rule names no schema.",
    )
    create_tables: bool = Field(
        default=True,
        description="Create missing target tables from the source's definition: columns with their "
        "exact types, NOT NULL, the primary key with `sid` first, and the history columns. "
        "streamer also creates types that the target lacks.",
    )
    create: Create = Field(
        default=Create.COLUMNS,
        description="Definitions that target tables get if streamer creates them. `sid` leads "
        "every unique key and foreign key. `streamer status` lists the definitions that the target "
        "cannot have, with their SQL.",
    )
    create_fk_indexes: bool = Field(
        default=False,
        description="Build missing indexes on foreign keys with CREATE INDEX CONCURRENTLY, once "
        "the tables are ready. `streamer indexes --missing-fk` lists the indexes.",
    )


def _check_listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if value and (not host or not port.isdigit() or not 0 <= int(port) <= 65535):
        raise ValueError("expected host:port, or an empty string to switch it off")
    return value


class HttpSettings(Strict):
    """``http``"""

    listen: Annotated[str, AfterValidator(_check_listen)] = Field(
        default="127.0.0.1:8000",
        description="Address and port of metrics, health checks, API and page. An empty string "
        "switches HTTP off. Without a token or a user, streamer accepts only a loopback address.",
    )
    metrics_tables_max: int = Field(
        default=METRICS_TABLES_MAX,
        ge=0,
        description="Up to this number of tables in the process, each table has separate metrics. "
        "Above that number, all tables of a source share a metric with an empty label `table`. "
        "Tables in error or paused still have a `streamer_table_state`.",
    )
    trusted_proxies: list[str] = Field(
        default=[],
        description="Addresses or networks of proxies whose `X-Forwarded-For` and "
        "`X-Forwarded-Proto` headers streamer trusts. If such a proxy terminates TLS, streamer "
        "marks session cookies Secure.",
    )


class Role(enum.StrEnum):
    """The access of a user to the API and the page."""

    VIEWER = "viewer"
    ADMIN = "admin"


class UserSettings(Strict):
    """``admin.users[]``"""

    name: str = Field(min_length=1, description="User name for the login.", examples=["alice"])
    password_hash: SecretText = Field(
        description="The output of `streamer admin hash-password`.", examples=["$argon2id$…"]
    )
    role: Role = Field(default=Role.VIEWER, description="Access level of this user.")


class AdminSettings(Strict):
    """``admin``"""

    token: SecretText | None = Field(
        default=None,
        description="Bearer token with full access to the API. `openssl rand -hex 32` generates a "
        "token. In the variable STREAMER_ADMIN__TOKEN, the token stays out of the file.",
    )
    viewer_token: SecretText | None = Field(
        default=None, description="Bearer token with read access to the API."
    )
    users: list[UserSettings] = Field(default=[], description="Users with a password login.")
    key: SecretText | None = Field(
        default=None,
        description="Key that encrypts passwords in the mapping database, from `streamer admin "
        "generate-key`. The best place is the variable STREAMER_ADMIN__KEY. Of several keys, "
        "separated by commas, the first encrypts and all decrypt. Without it, `admin.key_file` "
        "holds the key.",
    )
    key_file: Path | None = Field(
        default=None,
        description="File with that key, mode 0600; streamer creates it if there is no key. The "
        "default is the path of the mapping database with the suffix `.key`.",
    )
    variables: list[str] = Field(
        default=[],
        description="Environment variables that the mapping database, the page and the API may "
        "name as `${NAME}`, with `*` for any characters. A url may name a variable in place of a "
        "password only.",
    )
    secrets_directory: Path | None = Field(
        default=None,
        description="Directory of the files that the mapping database, the page and the API may "
        "name: those of `password_file`, and `passfile`, `sslcert` and `sslkey` of a url. By "
        "default no file is allowed.",
    )
    session_hours: float = Field(
        default=12, gt=0, le=24 * 30, description="Hours until a user must log in again."
    )

    @property
    def has_credentials(self) -> bool:
        """Whether a client can authenticate."""
        return bool(self.token or self.viewer_token or self.users)


class SpoolSettings(Strict):
    """``spool``"""

    directory: Path | None = Field(
        default=None,
        description="Directory with room for held changes and large transactions. The directory "
        "must survive a restart of the machine: journals there hold the only copy of their "
        "changes. By default, streamer writes no journal, and uses a directory for each user, "
        "below the system's temporary directory. streamer makes the directory with mode 0700, and "
        "refuses a directory that another user may use or replace.",
    )

    @property
    def is_lasting(self) -> bool:
        """Whether files in the directory survive a restart of the machine."""
        return self.directory is not None

    @property
    def path(self) -> Path:
        """The configured directory, or a directory of the user below the temporary directory."""
        return self.directory or Path(tempfile.gettempdir()) / f"streamer-spool-{os.getuid()}"


def _check_table_names(names: list[str]) -> list[str]:
    try:
        for name in names:
            parse_relation(name, "public")
    except MappingError as exc:
        raise ValueError(f"{exc.message}: {exc.hint}") from None
    return names


TableNames = Annotated[list[str], AfterValidator(_check_table_names)]
"""Names of tables, or patterns, in the form of the keys of ``tables``."""


class UrlSettings(ConnectionSettings):
    """``sources[].urls[]``"""

    url: SecretText = Field(
        description="A source database, as a libpq URL or key=value string; every libpq parameter "
        "works.",
        examples=["postgresql://streamer:${SHOP_EU_PASSWORD}@eu-db.example/shop"],
    )
    sid: str | None = Field(
        default=None,
        min_length=1,
        description="Source id: written to the column `sid` of target tables, as part of the key. "
        "A group with several urls needs a different sid for each.",
        examples=["eu"],
    )
    priority: int | None = Field(
        default=None,
        description="Overrides the `priority` of the group for this database.",
        examples=[10],
    )
    exclude_tables: TableNames = Field(
        default=[],
        title="Tables left out",
        description="Tables to leave out of this database, besides the `exclude_tables` of the "
        "group. An exact name also leaves out a table that `tables` names.",
        examples=[["archive.*"]],
    )


def _nothing_is_defaults(value: Any) -> Any:
    return {} if value is None else value


class PartitionSettings(Strict):
    """``sources[].tables.*.partition_by``"""

    column: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the target, of type `date`, `timestamp` or `timestamptz`. The "
        "source's value is written unchanged. Required for `type: append`. The partitions of a "
        "history are always by the end of the version, `kvsz_end`.",
        examples=["created_at"],
    )
    interval: Interval = Field(
        default=Interval.MONTH, description="Length of a partition; bounds are in UTC."
    )
    keep: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Number of intervals before the present interval whose rows stay. streamer "
        "removes older partitions, and copies no older rows. Without `keep`, all rows stay for "
        "ever.",
        examples=[24],
    )
    since: date | None = Field(
        default=None,
        description="Date of the oldest partition, if all rows stay. Older rows go to the default "
        "partition. Required for `type: append` without `keep`.",
        examples=["2020-01-01"],
    )
    on_expired: OnExpired = Field(
        default=OnExpired.DROP, description="Action on partitions older than `keep`."
    )


class TableSettings(Strict):
    """``sources[].tables.*``; an empty value means: clone the table under its own name."""

    target: str | None = Field(
        default=None,
        title="Target",
        description="Target table, with or without a schema. Without a schema, streamer uses "
        "`target.schema`, for source tables of every schema. `{database}`, `{sid}`, `{schema}` and "
        "`{table}` stand for the source's names, as in "
        '`"{database}_{schema}.{table}"`. In the rule of a pattern, `*` stands for the name of the '
        'source table, as in `"archive.*"`. A part in double quotes is literal.',
        examples=["sales.orders"],
    )
    sid: str | None = Field(
        default=None,
        min_length=1,
        title="Source id of the rows",
        description="The sid of the table's rows, instead of the sid of the url, for a database "
        "with a schema for each tenant. `{schema}` stands for the schema of the source table. "
        "`{schema:tenant_(.*)}` stands for the group of a regular expression that matches the "
        "whole name. `{table}`, `{database}` and `{sid}` work, too. The target table needs a "
        "column `sid`.",
        examples=["{sid}_{schema}"],
    )
    type: TableType = Field(
        default=TableType.CLONE,
        title="Type",
        description="Effect of source changes on the target table.",
        examples=["history"],
    )
    columns: dict[str, str] | None = Field(
        default=None,
        title="Columns",
        description="Columns to replicate, with their names at the target. The key is required. In "
        "a target table that you created yourself, streamer also writes unlisted columns that "
        "exist on both sides. By default streamer replicates all columns under the source's names.",
        examples=[{"id": "order_id", "customer_id": "customer_id", "total": "total"}],
    )
    exclude: list[str] = Field([], title="Columns left out", description="Columns to leave out.")
    column_list: bool = Field(
        False, title="Column list", description="Keep excluded columns at the source."
    )
    filter: str | None = Field(
        default=None,
        title="Filter",
        description="SQL condition over the source's columns; streamer replicates only rows that "
        "match.",
        examples=["region = 'EU'"],
    )
    keys: Keys | None = Field(
        default=None,
        title="Keys",
        description="Promise about the keys of tables that share the target table without a sid. "
        "A unique key of the target refuses a row that breaks the promise.",
    )
    copy_where: str | None = Field(
        default=None,
        title="Rows of the first copy",
        description="SQL condition over the source's columns: the first copy of the table reads "
        "only rows that match. Later changes of all rows reach the target, and a later copy reads "
        "all rows. The condition may use only columns whose source values the target has.",
        examples=["created_at >= '2024-01-01'"],
    )
    set: dict[str, str | HashSettings] = Field(
        default={},
        title="Computed columns",
        description="SQL expressions over the source's columns, by target column. "
        "`{hmac: email, key: people}` hashes the column `email` with a key of `hash_keys`.",
        examples=[{"email": "md5(email)"}],
    )
    on_error: OnError | None = Field(
        default=None,
        title="When the target rejects a change",
        description="Overrides the global `on_error` for this table.",
    )
    initial: Initial = Field(
        default=Initial.COPY,
        title="Existing rows",
        description="How replication of the table begins. The setting applies once: a later resync "
        "copies the table, and needs `truncate_target` if the target holds rows that streamer did "
        "not write.",
    )
    truncate_target: bool = Field(
        default=False,
        title="Delete existing target rows before the copy",
        description="Allow a copy to delete rows of this source that streamer did not write. "
        "Otherwise streamer refuses to copy into a table that holds such rows.",
    )
    create: Create | None = Field(
        default=None,
        title="Definitions of a created table",
        description="Overrides the `create` of the source, or `target.create`, for this table.",
    )
    partitioned: bool = Field(
        default=False,
        title="Partitions at the target",
        description="A target that streamer creates for a partitioned table has the same "
        "partitions, with their names and bounds. With `ddl: capture`, streamer also creates later "
        "partitions, and detaches partitions if `on_ddl` applies `detach_partition`. Not for "
        "`type: history`.",
    )
    partition_by: PartitionSettings | None = Field(
        default=None,
        title="Time partitions",
        description="Time partitions of a target that streamer creates. streamer also creates the "
        "partitions of later intervals, and removes old partitions. Only for `type: append` and "
        "`type: history`.",
    )
    on_column_added: OnColumnAdded = Field(
        default=OnColumnAdded.STOP,
        title="When the source adds a column",
        description="Reaction to a source column that the target lacks. With `add`, existing rows "
        "get the values that ADD COLUMN gave them at the source. A renamed column stops the table "
        "instead.",
    )
    on_table_dropped: OnTableDropped = Field(
        default=OnTableDropped.STOP,
        title="When the source drops the table",
        description="Reaction when the table is no longer at the source. With `keep` and `close`, "
        "the table joins again as soon as the source has a table of that name.",
    )
    verify_interval: float | None = Field(
        default=None,
        ge=0,
        title="Verification interval",
        description="Overrides the global `verify_interval`, in seconds, for this table. 0 "
        "switches the verification off.",
    )
    metadata: dict[MetadataKind, str] = Field(
        default={},
        title="Row metadata",
        description="Columns of the target with facts about the last change of a row, by fact: "
        "`committed_at`, `synced_at`, `lsn` and `operation`; with `on_delete: mark` also "
        "`deleted_at`.",
    )
    history: dict[VersionColumn, str] = Field(
        default={},
        title="Columns of versions",
        description="Overrides names of the global `history` for this table, which is of `type: "
        "history`.",
        examples=[
            {
                "start": "valid_from",
                "end": "valid_to",
                "deleted": "is_deleted",
                "id": "version_id",
            }
        ],
    )
    on_delete: OnDelete = Field(
        default=OnDelete.APPLY,
        title="When the source deletes rows",
        description="Effect of a DELETE or TRUNCATE on the rows of a clone.",
    )
    skip_truncate: bool = Field(
        default=False,
        title="Ignore TRUNCATE",
        description="Keep the target's rows when the source truncates the table. Status and "
        "metrics count each such TRUNCATE. A row that the source inserts later replaces the row "
        "with the same key.",
    )
    max_deleted_rows: int | None = Field(
        default=None,
        ge=0,
        title="Deleted rows per transaction",
        description="Pause the table before a source transaction that deletes more rows of the "
        "table, or truncates the table. `streamer resume` then applies the transaction, and "
        "`streamer resume --skip-deletes` applies the transaction without the deletes. Not set: no "
        "limit.",
        examples=[10000],
    )
    priority: int = Field(
        default=0,
        title="Priority of its copy",
        description="Order of copies in a source: tables with a higher priority first, then "
        "smaller tables first.",
        examples=[10],
    )


class SourceSettings(Strict):
    """``sources[]``: a group of databases with the same tables."""

    database: str = Field(
        min_length=1,
        description="Name of a group of databases with the same tables. Part of the slot's name, "
        "and a label in status, metrics and log.",
        examples=["shop"],
    )
    urls: list[UrlSettings] = Field(min_length=1, description="The databases of the group.")
    tables: dict[
        str,
        Annotated[
            TableSettings,
            BeforeValidator(_nothing_is_defaults, json_schema_input_type=TableSettings | None),
        ],
    ] = Field(
        min_length=1,
        description="The tables to replicate. `name` means `public.name`; a part of a name that "
        "contains a dot goes in double quotes. `*` matches any characters; an exact name takes "
        "precedence over a pattern. A pattern never matches a table that belongs to an extension.",
    )
    exclude_tables: TableNames = Field(
        default=[],
        title="Tables left out",
        description="Tables to leave out although a pattern of `tables` matches: names or "
        "patterns. An exact name in `tables` takes precedence over a pattern here.",
        examples=[["bi.*", "*.tmp_*"]],
    )
    priority: int = Field(
        default=0,
        title="Priority of first copies",
        description="Order in which sources copy their tables, if more than "
        "`sync.sources_at_once` wait: a higher priority first.",
        examples=[10],
    )
    streaming: bool = Field(
        default=True,
        title="Stream large transactions before they commit",
        description="Receive large transactions before they commit, so that the source does not "
        "keep the changes until the end. Needs PostgreSQL 14 or later.",
    )
    transport: Transport = Field(
        default=Transport.AUTO,
        title="Transport",
        description="Format in which the source sends values. If a column does not qualify for "
        "binary, the source sends all values as text. `status --json` shows the transport of each "
        "table, and the reason.",
    )
    forward_origins: bool = Field(
        default=False,
        title="Forward replicated changes",
        description="Also replicate changes that the source itself received by replication. "
        "Cascading replication needs this setting; two databases that feed each other must not "
        "use this setting.",
    )
    failover: bool = Field(
        default=False,
        title="Failover slot",
        description="Create the slot with FAILOVER, so that standbys with `sync_replication_slots "
        "= on` keep it. Streaming then continues after a failover of the source. Needs PostgreSQL "
        "17 or later.",
    )
    sequences: bool = Field(
        default=False,
        title="Follow sequences",
        description="Keep sequences of the target ahead of the sequences of the source. This "
        "includes identity and serial columns of mapped tables, and any sequences of the same name "
        "in `target.schema`. streamer reads the sequences every 3 seconds, and leaves a margin of "
        "at least 1,000 values.",
    )
    create: Create | None = Field(
        default=None,
        title="Definitions of created tables",
        description="Overrides `target.create` for the tables of this group.",
    )
    ddl: Annotated[
        DdlCapture,
        BeforeValidator(_restore_off, json_schema_input_type=DdlCapture | Literal[False]),
    ] = Field(
        default=DdlCapture.OFF,
        title="Capture changes to definitions",
        description="How streamer detects changes to table definitions. `capture` needs an event "
        "trigger at the source, which only a superuser may create: `streamer check` prints the "
        "SQL.",
    )
    on_ddl: Annotated[OnDdl | dict[DdlKind, OnDdl], WrapValidator(_on_ddl)] = Field(
        default={},
        title="Reaction to changes to definitions",
        description="With `ddl: capture`: `apply`, `stop` or `ignore`, as a single word for all "
        "kinds of change, or by kind. By kind, `drop_column`, `change_type`, `drop_attribute`, "
        "`change_attribute` and `detach_partition` stop by default, because these changes can lose "
        "values; the rest apply.",
        examples=[{"drop_column": "stop", "change_type": "stop"}],
    )
    max_retained_wal: Annotated[Size, Field(ge=1 << 20)] | None = Field(
        default=None,
        title="Limit on retained WAL",
        description="WAL that each database of the group may retain for streamer, such as `10GB`; "
        "at least 1MB. A plain number is bytes. streamer warns at half of the limit, and reduces "
        "copies to a quarter of their speed at 80 %. Not set: half of `max_slot_wal_keep_size` of "
        "the source for a journal, else no limit.",
        examples=["10GB"],
    )
    on_max_retained_wal: OnMaxRetainedWal | None = Field(
        default=None,
        title="When that limit is reached",
        description="What streamer does at that limit. `spool` needs a `spool.directory` that "
        "survives a restart. Not set: `spool` with a `spool.directory`, else `warn`.",
    )
    heartbeat_interval: float | None = Field(
        default=None,
        ge=0,
        le=3600,
        title="Heartbeat interval",
        description="Overrides the global `heartbeat_interval`, in seconds, for this group. 0 "
        "switches heartbeats off.",
    )


class Settings(Numbers, BaseSettings):
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
    workers: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Connections that write to the target in parallel.",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Replicas that `streamer run` starts; they share a port.",
    )
    commit_interval: float = Field(
        default=0.2,
        ge=0,
        le=60,
        description="Longest time in seconds that a change waits in a worker before the worker "
        "begins to commit it, unless an earlier commit takes longer. A worker waits that long only "
        "when it has a backlog, because larger commits cost less.",
    )
    commit_interval_min: float = Field(
        default=0,
        ge=0,
        le=60,
        description="Shortest time in seconds between the starts of two commits of a worker. By "
        "default a worker commits as soon as the preceding commit ends. With few changes, a higher "
        "value saves the target flushes of its WAL; each change then waits up to that long. A "
        "value above `commit_interval` has no further effect.",
    )
    consistency: Literal["table", "transaction"] = Field(
        default="table",
        description="Visibility of a source transaction that changes several tables.",
    )
    on_error: OnError = Field(
        default=OnError.STOP,
        description="Reaction of a table when the target rejects a change.",
    )
    history: dict[VersionColumn, str] = Field(
        default={},
        description="Names of the columns with the validity and the order of versions, in tables "
        "of `type: history`.",
    )
    heartbeat_interval: float = Field(
        default=5.0,
        ge=0,
        le=3600,
        description="Seconds between heartbeats of a source. A heartbeat is an empty transaction "
        "that measures the delay from commit to visibility. 0 switches heartbeats off.",
    )
    discovery_interval: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Seconds between two searches for new tables of a source that match a pattern; "
        "streamer adds these tables by itself, and with `ddl: capture` at once. 0 switches the "
        "search off.",
    )
    conflicts_kept: int = Field(
        default=1000,
        ge=1,
        le=1_000_000,
        description="Number of the newest conflicts of each table that `streamer conflicts` can "
        "show. A conflict is a change whose row the target lacks or already has.",
    )
    verify_interval: float = Field(
        default=0,
        ge=0,
        description="Seconds between two comparisons of a table with its source. The process "
        "compares in quiet times, table after table. `status`, page and metrics show when each "
        "table was last found equal. 0 switches verification off.",
        examples=[0],
    )
    verify_rows_per_second: float = Field(
        default=20_000,
        gt=0,
        description="Maximum number of rows per second that a verification reads from a "
        "source, unless `sync.rows_per_second` is lower.",
    )
    statistics_interval: float = Field(
        default=60,
        ge=0,
        le=86400,
        description="Seconds between two lines of statistics in the log for each source: changes, "
        "transactions, lag, retained WAL, and the time that the target takes. A source without "
        "changes has no line. 0 switches the lines off.",
    )
    sync: SyncSection = SyncSection()
    http: HttpSettings = HttpSettings()
    admin: AdminSettings = AdminSettings()
    notify: NotifySection = NotifySection()
    opentelemetry: OpenTelemetrySection = OpenTelemetrySection()
    spool: SpoolSettings = SpoolSettings()
    mapping_database: Path | None = Field(
        default=None,
        description="SQLite file that holds the mapping instead of `sources`. Operators edit the "
        "file over HTTP, on the page, or with `streamer sources` and `streamer tables` while `run` "
        "works. streamer creates the file; `streamer import` moves `sources` into it.",
    )
    hash_keys: dict[str, HashKeySettings] = Field(
        default={},
        description="Secret keys for hashes in `set`, by name. Each has a `key` of at least 32 "
        "characters, a `key_file` or a `key_command`. streamer computes HMAC-SHA256 itself, so "
        "neither server gets a key.",
    )
    sources: list[SourceSettings] = Field(
        default=[], description="The groups of source databases, and the tables to replicate."
    )


class _FileSource(PydanticBaseSettingsSource):
    """Values of the file; environment and command line take precedence."""

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
    """Return the first fault as a SettingsError; *where* names the file and line of a location."""
    # The most specific fault first: an unknown key is often the cause of a missing key.
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
    """Return pydantic's finding as one clause, without the value."""
    return _MESSAGES.get(detail["type"], _lower_first(detail["msg"]))


def _lower_first(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
