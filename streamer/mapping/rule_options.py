"""The values that options of rules can have. Pure."""

import enum
from collections.abc import Mapping as AnyMapping
from types import MappingProxyType
from typing import Final


class TableType(enum.StrEnum):
    """The effect of source changes on the target table."""

    CLONE = "clone"
    APPEND = "append"
    HISTORY = "history"


class OnError(enum.StrEnum):
    """The reaction of a table when the target rejects a row."""

    STOP = "stop"
    QUARANTINE = "quarantine"


class Initial(enum.StrEnum):
    """The way to fill a table at its start."""

    COPY = "copy"
    KEEP = "keep"
    NONE = "none"


class OnColumnAdded(enum.StrEnum):
    """The reaction to a source column that the target lacks."""

    STOP = "stop"
    ADD = "add"
    IGNORE = "ignore"


class OnTableDropped(enum.StrEnum):
    """The reaction when a session drops the table at the source."""

    STOP = "stop"
    KEEP = "keep"
    CLOSE = "close"


class Keys(enum.StrEnum):
    """The promise about the keys of tables that share a target table without a sid."""

    DISJOINT = "disjoint"
    """No two of the tables contain the same key."""


class Create(enum.StrEnum):
    """The parts of a source table's definition that a created target table gets."""

    COLUMNS = "columns"
    KEYS = "keys"
    ALL = "all"


class Interval(enum.StrEnum):
    """The length of a time partition."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    YEAR = "year"


class OnExpired(enum.StrEnum):
    """The action on a time partition that is older than the rule's `keep`."""

    DROP = "drop"
    DETACH = "detach"


class Transport(enum.StrEnum):
    """The format in which the stream sends values."""

    AUTO = "auto"
    TEXT = "text"
    BINARY = "binary"


class OnDelete(enum.StrEnum):
    """The effect of a DELETE or TRUNCATE at the source."""

    APPLY = "apply"
    MARK = "mark"


class MetadataKind(enum.StrEnum):
    """Facts about the last change of a row that a column of the target may hold."""

    COMMITTED_AT = "committed_at"
    SYNCED_AT = "synced_at"
    LSN = "lsn"
    OPERATION = "operation"
    DELETED_AT = "deleted_at"


METADATA_TYPES: Final[AnyMapping[MetadataKind, str]] = MappingProxyType(
    {
        MetadataKind.COMMITTED_AT: "timestamp with time zone",
        MetadataKind.SYNCED_AT: "timestamp with time zone",
        MetadataKind.LSN: "pg_lsn",
        MetadataKind.OPERATION: "text",
        MetadataKind.DELETED_AT: "timestamp with time zone",
    }
)
"""The types of metadata columns, by PostgreSQL's names."""


class VersionColumn(enum.StrEnum):
    """The columns of a history table with the validity and the order of versions."""

    START = "start"
    END = "end"
    DELETED = "deleted"
    ID = "id"


class DdlKind(enum.StrEnum):
    """The kinds of changes of a definition that streamer understands."""

    ADD_COLUMN = "add_column"
    DROP_COLUMN = "drop_column"
    RENAME_COLUMN = "rename_column"
    WIDEN_TYPE = "widen_type"
    CHANGE_TYPE = "change_type"
    SET_NOT_NULL = "set_not_null"
    DROP_NOT_NULL = "drop_not_null"
    SET_DEFAULT = "set_default"
    SET_EXPRESSION = "set_expression"
    RENAME_TABLE = "rename_table"
    ATTACH_PARTITION = "attach_partition"
    DETACH_PARTITION = "detach_partition"
    ADD_INDEX = "add_index"
    DROP_INDEX = "drop_index"
    RENAME_INDEX = "rename_index"
    ADD_CONSTRAINT = "add_constraint"
    DROP_CONSTRAINT = "drop_constraint"
    RENAME_CONSTRAINT = "rename_constraint"
    VALIDATE_CONSTRAINT = "validate_constraint"
    CREATE_TYPE = "create_type"
    DROP_TYPE = "drop_type"
    RENAME_TYPE = "rename_type"
    ADD_ENUM_VALUE = "add_enum_value"
    RENAME_ENUM_VALUE = "rename_enum_value"
    CHANGE_DOMAIN = "change_domain"
    ADD_ATTRIBUTE = "add_attribute"
    DROP_ATTRIBUTE = "drop_attribute"
    RENAME_ATTRIBUTE = "rename_attribute"
    CHANGE_ATTRIBUTE = "change_attribute"


class DdlCapture(enum.StrEnum):
    """Whether the source reports changes of definitions in its stream."""

    OFF = "off"
    CAPTURE = "capture"


class OnDdl(enum.StrEnum):
    """The reaction to a change of a definition."""

    APPLY = "apply"
    STOP = "stop"
    IGNORE = "ignore"


ON_DDL_DEFAULT: Final[AnyMapping[DdlKind, OnDdl]] = MappingProxyType(
    dict.fromkeys(DdlKind, OnDdl.APPLY)
    | dict.fromkeys(
        (
            *(DdlKind.DROP_COLUMN, DdlKind.CHANGE_TYPE),
            *(DdlKind.DROP_ATTRIBUTE, DdlKind.CHANGE_ATTRIBUTE),
            DdlKind.DETACH_PARTITION,
        ),
        OnDdl.STOP,
    )
)
"""By default, a change that loses values stops the table, so that an operator decides. An index or
a constraint has no values.
"""


def on_ddl_by_kind(reactions: OnDdl | AnyMapping[DdlKind, OnDdl]) -> AnyMapping[DdlKind, OnDdl]:
    """Return the reaction to each kind. A single word applies to all kinds; a missing kind gets the
    default.
    """
    if isinstance(reactions, OnDdl):
        return dict.fromkeys(DdlKind, reactions)
    return {**ON_DDL_DEFAULT, **reactions}


class OnMaxRetainedWal(enum.StrEnum):
    """The reaction when a source retains more WAL than the limit."""

    WARN = "warn"
    SPOOL = "spool"
    DROP = "drop"
