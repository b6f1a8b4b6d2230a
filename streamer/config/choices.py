"""The words that settings accept, with their meanings: for the reference and for forms."""

from typing import Final

CHOICES: Final[dict[str, dict[str, str]]] = {
    "consistency": {
        "table": "tables can differ by up to one commit interval",
        "transaction": "a source transaction becomes visible as a whole; each source has one "
        "worker",
    },
    "on_error": {
        "stop": "the table stops until an operator acts; all remaining tables continue",
        "quarantine": "the change and later changes of the same row go to streamer.quarantine; "
        "the table continues",
    },
    "role": {
        "viewer": "read access",
        "admin": "full access",
    },
    "type": {
        "clone": "the target table stays equal to the source table",
        "append": "applies inserts and updates, and ignores DELETE and TRUNCATE",
        "history": "keeps every version of a row, with its period of validity",
    },
    "initial": {
        "copy": "replication begins with a copy of the existing rows",
        "keep": "as copy; target rows stay unless the source has the same key or an equal row",
        "none": "replication begins with changes; the target must already hold the source's rows",
    },
    "keys": {
        "disjoint": "several tables share the target table without a sid, "
        "and no two tables contain the same key",
    },
    "on_column_added": {
        "stop": "the table stops, and its error has the ALTER TABLE to run",
        "add": "streamer adds the column to the target, without NOT NULL",
        "ignore": "streamer leaves the column out",
    },
    "on_table_dropped": {
        "stop": "the table stops until an operator acts",
        "keep": "the target keeps the rows, and streamer no longer lists the table",
        "close": "as keep, and the open versions of a history end (`type: history` only)",
    },
    "create": {
        "columns": "columns, NOT NULL and the primary key",
        "keys": "also unique constraints, exclusion constraints and indexes",
        "all": "also defaults, checks, foreign keys, comments and statistics targets",
    },
    "ddl": {
        "off": "streamer compares columns when changes arrive, as `on_column_added` decides",
        "capture": "the source reports changes in its stream, and streamer makes them at the "
        "target in the same place, as `on_ddl` decides",
    },
    "on_ddl": {
        "apply": "streamer makes the change at the target",
        "stop": "the table stops until an operator runs `streamer ddl apply`, `skip` or `edit`",
        "ignore": "the target stays as it is",
        "add_column": "a new column",
        "drop_column": "a dropped column",
        "rename_column": "a renamed column",
        "widen_type": "a wider type, which holds every value of the old type",
        "change_type": "a different type, or new values that the statement computes",
        "set_not_null": "a column becomes NOT NULL",
        "drop_not_null": "a column may be null",
        "set_default": "a default, or an identity with `create: all`, is set, changed or dropped",
        "set_expression": "a new expression of a generated column, which the target also "
        "recomputes",
        "attach_partition": "a partition attached with rows in it; without `apply` the status "
        "shows the missing rows, and a table with `keys: disjoint` stops",
        "detach_partition": "a partition detached or dropped; with `apply`, its rows leave the "
        "target table, except in an append table",
        "rename_table": "a new name of a partition, or a new name or schema of a table that a "
        "single pattern matches. For such a table, `ignore` acts like `stop`",
        "add_index": "a new index, if `create` is `keys` or `all`",
        "drop_index": "a dropped index",
        "rename_index": "a renamed index",
        "add_constraint": "a new constraint, if `create` includes it",
        "drop_constraint": "a dropped constraint",
        "rename_constraint": "a renamed constraint",
        "validate_constraint": "a constraint is validated",
        "create_type": "a type that a column uses from now on",
        "drop_type": "a dropped type that no column of the target has any more",
        "rename_type": "a type that a column uses is renamed",
        "add_enum_value": "a new value of an enum",
        "rename_enum_value": "a renamed value of an enum",
        "change_domain": "the constraints, NOT NULL or the default of a domain",
        "add_attribute": "a new attribute of a composite type",
        "drop_attribute": "a dropped attribute of a composite type",
        "rename_attribute": "a renamed attribute of a composite type",
        "change_attribute": "an attribute of a composite type gets another type",
    },
    "transport": {
        "auto": "binary if every table of the source qualifies for it, else text",
        "text": "works for every type",
        "binary": "as auto, with a warning in the log if a table does not qualify. Binary costs "
        "less CPU; it needs PostgreSQL 14 and the same built-in types on both sides",
    },
    "metadata": {
        "committed_at": "commit time of the transaction at the source",
        "synced_at": "the time at which streamer wrote the row",
        "lsn": "LSN of the commit at the source",
        "operation": "`insert` or `update`; `copy` for a row that a copy wrote; `delete` or "
        "`truncate` for a marked row",
        "deleted_at": "commit time of the deletion, or of the update that left the `filter`; NULL "
        "in all remaining rows",
    },
    "history": {
        "start": "the time at which the version begins; `kvsz_start` by default",
        "end": "the time at which the version ends; `kvsz_end` by default",
        "deleted": "whether a delete ended the version; `kvsz_deleted` by default",
        "id": "the order of the versions of a key; `kvsz_id` by default",
    },
    "interval": {
        "day": "from midnight to midnight",
        "week": "from Monday to Sunday",
        "month": "a calendar month",
        "year": "a calendar year",
    },
    "on_expired": {
        "drop": "streamer drops the partition with its rows, and deletes rows of that age from the "
        "default partition",
        "detach": "the partition stays as a table of its own; rows of the default partition stay",
    },
    "on_delete": {
        "apply": "the target deletes the rows",
        "mark": "the rows stay, with the commit time in the column `deleted_at`, or in the column "
        "that `metadata` names. An insert of the key restores the row. An update that takes a "
        "row out of the `filter` marks the row, too",
    },
    "on_max_retained_wal": {
        "warn": "streamer logs a warning",
        "spool": "streamer moves the changes to a journal on its own disk, at half of "
        "`max_slot_wal_keep_size` at the latest",
        "drop": "streamer drops the slot; the tables then need a resync",
    },
}
"""The meaning of each word that a setting accepts, by name of the setting."""
