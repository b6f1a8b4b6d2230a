"""The errors that streamer raises on purpose, with the reaction that each needs.

The class names the failure. ``code`` is the name in bookkeeping, log, status, metrics and the API,
and decides the runbook. ``retry`` says whether a new attempt of the supervisor can succeed.
``remedy`` of an instance contains the commands and SQL to run. Callers add the place with
``add_note``. Messages never contain connection strings or passwords.

``make reference`` writes code, first sentence of the docstring, ``advice`` and ``runbook`` of each
class to ``docs/reference/error-codes.md``.
"""

import enum
from collections.abc import Collection
from typing import ClassVar, Final

from streamer.errors.remedies import Remedy

RUNBOOKS: Final = "/help/runbooks"
GUIDES: Final = "/help/guides"
"""The paths of runbooks and guides on the page of a running process."""


class Retry(enum.Enum):
    """The supervisor's reaction to an error."""

    TIMED = "timed"  # transient: retry after a back-off
    MANUAL = "manual"  # an operator must change something first
    NEVER = "never"  # a defect or an unsupported feature: a retry cannot help


class StreamerError(Exception):
    """A defect of streamer."""

    code: ClassVar[str] = "internal"
    retry: ClassVar[Retry] = Retry.NEVER
    exit_code: ClassVar[int] = 4
    advice: ClassVar[str] = "Report the error, with the output of `--log-level debug`."
    """The operator's next step, for the reference."""
    runbook: ClassVar[str] = "defect"
    """The page of ``docs/runbooks/`` about this error, without ``.md``; one for each code."""

    def __init__(self, message: str, *, hint: str | Remedy | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = Remedy.given(hint)
        """The operator's next step, if known."""
        self.change_number: int | None = None
        """Number of the change at fault among the changes of a statement, if known."""
        self.transaction_number: int | None = None
        """Number of the source transaction at fault, if known."""
        self.key: str | None = None
        """Key of the row at fault, as ``Key (id)=(5)``, if the change contains the key."""
        self.staged_column: int | None = None
        """Number of the staged value at fault, if COPY reports it."""
        self.column: str | None = None
        """Target column at fault, if the server names it."""
        self.constraint: str | None = None
        """Violated constraint, if the server names it."""
        self.subject: object = None
        """The relation with the error, if known."""
        self.conflict: object = None
        """The conflict with a row of the target, if the error is a conflict."""
        self.lsn: str | None = None
        """Commit LSN of the source transaction with the error, if known."""

    @property
    def hint(self) -> str | None:
        """The remedy as text."""
        return None if self.remedy is None else str(self.remedy)

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of a log line: the code, and the address of the runbook on the page."""
        return {"code": self.code, "runbook": f"{RUNBOOKS}/{self.runbook}"}


class DefectError(StreamerError):
    """A defect of streamer in the work for one table or source.

    The defect stops that table or source; the log shows the traceback.
    """

    retry = Retry.MANUAL


class ConfigurationError(StreamerError):
    """The configuration is invalid."""

    code = "configuration"
    runbook = "configuration-rejected"
    exit_code = 2
    advice = "Change the setting that the message names."


class SettingsError(ConfigurationError):
    """A setting is missing, unknown or of a wrong type, or an address is unusable."""

    code = "settings"
    advice = "Correct the key that the message names, with file and line."


class MappingError(ConfigurationError):
    """A rule matches no table, two rules claim the same table, or two sources would write the same
    rows.
    """

    code = "mapping"
    retry = Retry.MANUAL
    advice = "Correct `tables`, `sid` or `target`."


class SourceError(StreamerError):
    """The source failed with an error that streamer does not classify."""

    code = "source"
    runbook = "source-unreachable"
    retry = Retry.MANUAL
    advice = "Read the message; the server's log has more."


class SourceConfigurationError(SourceError):
    """An environment variable or stored password of a source is missing; remaining sources run."""

    code = "source_configuration"
    exit_code = 2
    advice = "Set the variable that the message names, then send SIGHUP or restart `run`."


class SourceConnectionError(SourceError):
    """The source is unreachable, or the connection to it was lost."""

    code = "source_down"
    retry = Retry.TIMED
    exit_code = 3
    advice = "Check that the server runs and accepts connections."


class SourceStandbyError(SourceConnectionError):
    """The source is a standby, and the slot is on the standby's primary."""

    code = "source_standby"
    advice = (
        "Promote the standby, or list all hosts in the url, with `target_session_attrs=read-write`."
    )
    runbook = "failover"


class StandbyWaitError(SourceError):
    """The source sends a change only after the standbys of `synchronized_standby_slots` have it."""

    code = "standby_wait"
    retry = Retry.TIMED
    advice = "Start the standby, or take its slot out of `synchronized_standby_slots`."
    runbook = "failover"


class SourceElsewhereError(SourceConnectionError):
    """A command reached a server that `run` does not use."""

    code = "source_elsewhere"
    advice = "Stop an old primary, or correct the hosts of the url."
    runbook = "failover"


class SourceOldPrimaryError(SourceConnectionError):
    """The server is the old primary of a source that failed over, or a copy of the old primary.

    A copy from the old primary would lose the commits of the new primary, so no hint offers a
    resync.
    """

    code = "old_primary"
    advice = "Stop the old primary, and start the new one."
    runbook = "failover"


class SourceDatabaseError(SourceError):
    """The url of a source leads to the wrong database of the server.

    Neither a copy nor a new slot helps, so the hint names only the url.
    """

    code = "source_database"
    exit_code = 3
    advice = "Correct the url: the urls of two sources may be swapped."


class SourcePasswordError(SourceConnectionError):
    """The password of a source cannot be read from its file or command, or the source rejects it.

    The next attempt reads the password again, so the error ends once both sides have the new
    password.
    """

    code = "source_password"
    advice = "Correct `password_file` or `password_command`, or the role's password."


class SourceRejectedError(SourceError):
    """The source rejects the role: authentication, pg_hba.conf or a missing privilege."""

    code = "source_auth"
    retry = Retry.MANUAL
    exit_code = 3
    advice = "Correct the password or `pg_hba.conf`, or run the SQL in the message."


class SourceContentionError(SourceError):
    """Sessions at the source held a lock for ten seconds, changed a definition meanwhile, or ran
    too many transactions for a snapshot.
    """

    code = "source_busy"
    retry = Retry.TIMED
    advice = "End the session, or wait; `streamer status` names its pid, role and age."


class SourceUnreadyError(SourceError):
    """The source is not set up for logical replication, or has no free slots."""

    code = "source_settings"
    retry = Retry.MANUAL
    advice = "Change the setting in the message; `wal_level` needs a restart of the server."


class SourceLimitError(SourceError):
    """A row exceeds the 1 GB that PostgreSQL allows for one replication message."""

    code = "source_limit"
    runbook = "row-too-large"
    retry = Retry.MANUAL
    advice = (
        "Make the row smaller, or exclude its column; "
        "then run the `streamer resync` in the message."
    )


class SlotInUseError(SourceError):
    """Another process streams from the slot."""

    code = "slot_in_use"
    runbook = "second-installation"
    retry = Retry.TIMED
    advice = "Stop that process."


class NoReplicaError(SourceError):
    """No replica runs the source: all replicas run as many sources as `--max-sources` allows."""

    code = "no_replica"
    runbook = "no-replica"
    retry = Retry.TIMED
    advice = "Start another replica, or raise `--max-sources`."


class SlotWaitError(SourceError):
    """A transaction at the source has been open for a quarter of an hour, and a new slot waits for
    its end.
    """

    code = "slot_wait"
    retry = Retry.MANUAL
    advice = "End the transaction; the message names its pid. A copy then needs `streamer resume`."


class SlotMissingError(SourceError):
    """The replication slot is missing, so changes may be lost."""

    code = "slot_missing"
    retry = Retry.MANUAL
    advice = "Resync the tables that the message names."
    runbook = "slot-lost"


class SlotInvalidatedError(SourceError):
    """The source invalidated the replication slot, because it removed WAL that streamer still
    needs.
    """

    code = "slot_invalidated"
    retry = Retry.MANUAL
    advice = "Resync the tables that the message names."
    runbook = "slot-lost"


class SourceDivergedError(SourceError):
    """Source, slot and target do not share a history; streaming would lose changes."""

    code = "diverged"
    retry = Retry.MANUAL
    advice = "Resync the tables that the message names."
    runbook = "restored"


class SourceTakenError(SourceError):
    """A slot or a publication with the name of this source belongs to another installation, or a
    foreign program has read from the slot.
    """

    code = "source_taken"
    runbook = "second-installation"
    retry = Retry.MANUAL
    advice = "Rename `database` in the configuration, or run `streamer run --take-over`."


class ProtocolError(StreamerError):
    """A replication message is truncated, unknown or out of order."""

    code = "protocol"
    advice = "Report a defect, with the message."


class TableGoneError(SourceError):
    """The source lacks a mapped table, or has another table under that name."""

    code = "table_gone"
    runbook = "table-gone"
    advice = "Create the table, or correct `tables`; then run `streamer resync`."


class UnpublishedError(SourceError):
    """A table was unpublished for a time, or its publication omits changes or is gone."""

    code = "unpublished"
    runbook = "table-gone"
    advice = "Run the SQL in the message, then `streamer resync`."


class IdentityLostError(SourceError):
    """A table lost its replica identity: the source refuses its updates and deletes, or no longer
    publishes them.
    """

    code = "identity_lost"
    runbook = "table-gone"
    advice = "Run the SQL in the message; the table is then copied again."


class GapError(SourceError):
    """The target lacks rows or values that no change contains, as after a partition was
    attached.
    """

    code = "gap"
    runbook = "gap"
    advice = "Run the `streamer resync` in the message."


class IdentityError(ProtocolError):
    """A change does not identify its row in the way that the table's replica identity promises."""

    code = "identity"
    runbook = "table-in-error"
    retry = Retry.MANUAL
    advice = (
        "Give the partition the replica identity of its root table at the source, then run "
        "`streamer resync`."
    )


class TransportError(StreamerError):
    """A value that arrived in binary format does not fit the target column."""

    code = "transport"
    retry = Retry.TIMED
    advice = "None: the source restarts in text format, and the log names the column."


class TargetError(StreamerError):
    """The target failed with an error that streamer does not classify, or its bookkeeping is newer
    than this program.
    """

    code = "target"
    runbook = "target-away"
    retry = Retry.MANUAL
    advice = "Read the message; upgrade streamer if the bookkeeping is newer."


class TargetConnectionError(TargetError):
    """The target is unreachable, or the connection to it was lost."""

    code = "target_down"
    retry = Retry.TIMED
    exit_code = 3
    advice = "Check that the server runs and accepts connections."


class TargetMovedError(TargetConnectionError):
    """A connection reached a server that does not hold the source's lock, as during a failover of
    the target.

    ``fences``: the fencing tokens that are invalid on that server, if known.
    """

    code = "target_moved"
    advice = (
        "None: the source restarts. If the error persists, the url reaches several primaries: "
        "stop the old one."
    )
    runbook = "failover"

    def __init__(self, message: str, *, fences: Collection[object] = ()) -> None:
        super().__init__(message)
        self.fences = fences


class TargetPasswordError(TargetConnectionError):
    """The password of the target cannot be read from its file or command, or the target rejects it.

    The next attempt reads the password again.
    """

    code = "target_password"
    advice = "Correct `password_file` or `password_command`, or the role's password."


class TargetRejectedError(TargetError):
    """The target rejects the role: authentication, pg_hba.conf or a missing privilege."""

    code = "target_auth"
    retry = Retry.MANUAL
    exit_code = 3
    advice = (
        "Correct the password or `pg_hba.conf`, grant the privilege, or make the role the owner."
    )


class TargetPrivilegeError(TargetRejectedError):
    """The role lacks a privilege at the target."""


class TargetContentionError(TargetError):
    """The target is short of a resource: a lock, a deadlock, disk space or connections."""

    code = "target_busy"
    retry = Retry.TIMED
    advice = "If the error persists, find the session that holds the lock, or free disk space."


class TargetReadOnlyError(TargetError):
    """The target is a standby and accepts no writes."""

    code = "target_read_only"
    retry = Retry.TIMED
    exit_code = 3
    advice = "Promote the standby, or point `target.url` at the primary."
    runbook = "failover"


class TargetFencedError(TargetError):
    """The target's stored progress differs from the progress that this process stored.

    Another process holds the source's lock, or the target was restored or lost commits.
    ``relations``: the affected relations, if known.
    """

    code = "fenced"
    retry = Retry.TIMED
    advice = "None: the source restarts; the next attempt names the tables to resync, if any."
    runbook = "restored"

    def __init__(
        self, message: str, *, hint: str | Remedy | None = None, relations: Collection[object] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.relations = relations


SOURCE_LOCK_LOST: Final = (TargetMovedError, TargetFencedError)
"""Errors after which an attempt must not write: the source's lock is lost, or the stored progress
differs. Only a new attempt can lock the source again.
"""


class TargetSchemaError(TargetError):
    """A target table or column is missing, or its type does not fit."""

    code = "target_schema"
    retry = Retry.MANUAL
    advice = "Run the ALTER TABLE in the message, then `streamer resume`."
    runbook = "table-in-error"


class SharedTargetError(TargetSchemaError):
    """A change of a source would alter a type that peer sources still use."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="make this change at the remaining sources, too")


class ColumnsRenamedError(TargetSchemaError):
    """Columns of a source table swapped names, so values may be in wrong columns."""

    code = "columns_renamed"
    advice = "Run the `streamer resync` in the message."


class DefinitionStopError(TargetError):
    """A change of a table's definition at the source waits for an operator's decision."""

    code = "definition"
    retry = Retry.MANUAL
    advice = "Run `streamer ddl apply` or `streamer ddl skip`, as in the message."
    runbook = "definition-waits"


class TableRenamedError(TargetError):
    """A session renamed a table, and no rule maps the new name to the former target."""

    code = "renamed"
    retry = Retry.MANUAL
    advice = "Write the table's new name in `tables`, as in the message."
    runbook = "table-renamed"


class ValueConversionError(TargetError):
    """The target's type cannot hold a value."""

    code = "value"
    retry = Retry.MANUAL
    advice = "Change the target's column; see [large values](limits.md#large-values)."
    runbook = "table-in-error"


class TextEncodingError(ValueConversionError):
    """Text is not valid UTF-8; a source with the encoding SQL_ASCII can contain such text."""

    code = "text_encoding"
    advice = "Correct the text at the source, then run `streamer resync`."
    runbook = "invalid-utf8"


class UntranslatableTextError(TextEncodingError):
    """Text with a character that has no equivalent in UTF-8; see ``change_number``."""

    sqlstate = "22P05"  # untranslatable_character

    def __init__(self, change_number: int, encoding: str, character: bytes) -> None:
        shown = " ".join(f"0x{byte:02x}" for byte in character)
        super().__init__(
            f'source: character with byte sequence {shown} in encoding "{encoding}" has no '
            'equivalent in encoding "UTF8"'
        )
        self.change_number = change_number


class RowTooLargeError(ValueConversionError):
    """A row needs more memory at the target than PostgreSQL allows.

    ``change_number``: the number of the row's change.
    """

    code = "row_too_large"
    advice = (
        "Make the value smaller at the source, or exclude its column; then run `streamer resync`."
    )
    runbook = "row-too-large"

    def __init__(self, change_number: int, size: int) -> None:
        super().__init__(
            f"target: a row of {size} bytes exceeds COPY's limit of 1 GB; tabs, newlines, carriage "
            "returns and backslashes of a text count twice",
            hint="make the value smaller at the source, or exclude its column",
        )
        self.change_number = change_number


class ConflictError(TargetError):
    """A constraint of the target rejects a row, or a row to change is missing and cannot be
    created.

    ``kind`` is PostgreSQL's term, if any (conflict.c): insert_exists, update_missing, ….
    """

    code = "conflict"
    retry = Retry.MANUAL
    advice = "Correct the row or the constraint at the target, then run `streamer resume`."
    runbook = "table-in-error"

    def __init__(
        self, message: str, *, kind: str = "constraint", hint: str | Remedy | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class MassDeleteError(StreamerError):
    """A source transaction deletes more rows than `max_deleted_rows` allows, or truncates the
    table. The table waits before this transaction.
    """

    code = "mass_delete"
    runbook = "mass-delete"
    retry = Retry.MANUAL
    advice = "Apply the transaction, or leave its deletes out, with the commands in the message."


class SharedTableError(StreamerError):
    """Source tables share a target table by `keys: disjoint`, so streamer cannot find the rows of a
    single source table at the target.
    """

    code = "shared_table"
    runbook = "table-in-error"
    retry = Retry.MANUAL
    advice = "Follow the message; a resync copies all tables with this target again."


class SyncError(StreamerError):
    """A table cannot be copied."""

    code = "sync"
    retry = Retry.MANUAL
    advice = "Follow the message, then run `streamer resume`."
    runbook = "copy-does-not-finish"


class SnapshotExpiredError(SyncError):
    """The snapshot of a copy is gone."""

    code = "snapshot"
    retry = Retry.TIMED
    advice = "None: the copy starts again."


class SyncAgainError(SyncError):
    """A table was altered, rewritten or locked during its copy."""

    code = "sync_again"
    retry = Retry.TIMED
    advice = "None: the copy of that table starts again."


class SparkJobError(SyncError):
    """The Spark process ended, or its job failed."""

    code = "spark"
    retry = Retry.TIMED
    advice = "If the error persists, check Java, memory and `sync.spark_master`."


class ComparisonError(StreamerError):
    """A table cannot be compared."""

    code = "compare"
    retry = Retry.MANUAL
    advice = "Follow the message, then run `streamer compare` again."
    runbook = "tables-differ"


class ScriptError(StreamerError):
    """A script of `streamer execute` failed, or the target waits for a script."""

    code = "script"
    retry = Retry.MANUAL
    advice = "Correct the cause that the message names; the script runs again within seconds."
    runbook = "script-fails"


class CutoverError(StreamerError):
    """A step of `streamer cutover` failed."""

    code = "cutover"
    exit_code = 1
    retry = Retry.MANUAL
    advice = "Follow the message, then run `streamer cutover` again, or with --undo."
    runbook = "cutover-stops"


class SpoolError(StreamerError):
    """streamer cannot write held changes to disk."""

    code = "spool"
    runbook = "target-away"
    retry = Retry.TIMED
    advice = "Free disk space, or set `spool.directory`."


class JournalError(StreamerError):
    """The journal of a source is damaged, or does not belong to the source."""

    code = "journal"
    retry = Retry.MANUAL
    advice = "Resync the tables that the message names."
    runbook = "target-away"


class StoreError(ConfigurationError):
    """The mapping database is unusable, newer than this program, or its key does not decrypt the
    passwords.
    """

    code = "store"
    advice = "Follow the message."
    runbook = "mapping-lost"


class AdminError(StreamerError):
    """The API rejects the request for a reason without a code of its own.

    ``status``: the HTTP status of the answer.
    """

    code = "admin"
    runbook = "request-rejected"
    retry = Retry.MANUAL
    exit_code = 1
    status: ClassVar[int] = 400
    advice = "Read the message."


class InvalidError(AdminError):
    """A field is missing, unknown or has a wrong value."""

    code = "invalid"
    exit_code = 2
    status = 422
    advice = "Correct the field that the message names."


class AdminConnectionError(AdminError):
    """The process that the command asks does not answer."""

    code = "admin_down"
    exit_code = 3
    status = 503
    advice = "Check that `streamer run` is running at the address of `--url`."


class UnauthenticatedError(AdminError):
    """The request has no login, or the token or password is wrong."""

    code = "unauthenticated"
    exit_code = 3
    status = 401
    advice = "Set STREAMER_ADMIN__TOKEN, or log in."


class ForbiddenError(AdminError):
    """The role of the user allows no changes, or the request comes from another site."""

    code = "forbidden"
    exit_code = 3
    status = 403
    advice = "Use `admin.token` or a user with the role `admin`."


class NotFoundError(AdminError):
    """No object has that name or number."""

    code = "not_found"
    status = 404
    advice = "List the objects first."


class TakenError(AdminError):
    """An object with that name exists already."""

    code = "taken"
    status = 409
    advice = "Choose a free name, or change the existing object."


class ReadOnlyError(AdminError):
    """The mapping is in a file, so the API cannot change it."""

    code = "read_only"
    status = 409
    advice = "Edit the file and send SIGHUP."


class UnreadyError(AdminError):
    """The present state does not allow the request."""

    code = "unready"
    status = 409
    advice = "Follow the message."


class ThrottledError(AdminError):
    """Too many wrong tokens or passwords."""

    code = "throttled"
    status = 429
    advice = "Wait for the seconds in the header `Retry-After`."

    def __init__(self, message: str, *, seconds: int, hint: str | Remedy | None = None) -> None:
        super().__init__(message, hint=hint)
        self.seconds = seconds
