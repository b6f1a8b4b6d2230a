"""What can go wrong, and what each failure asks of whoever runs the failing part.

An error class says what happened; its ``code`` is its name in status, metrics and the API; its
``retry`` says whether trying again can help; its ``hint`` says what to do. Where it happened is
added on the way up with ``add_note``. Messages never hold connection strings or passwords.
"""

import enum
from collections.abc import Collection
from typing import ClassVar


class Retry(enum.Enum):
    """What to do with the part that failed this way."""

    TIMED = "timed"  # transient: again after a back-off
    MANUAL = "manual"  # somebody must change something first
    NEVER = "never"  # a defect or something unsupported: trying again cannot help


class StreamerError(Exception):
    """The streamer failed in a way it has no better name for."""

    code: ClassVar[str] = "internal"
    retry: ClassVar[Retry] = Retry.NEVER
    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.change_number: int | None = None
        """Which of the changes that were written together is at fault, where that is known."""
        self.share_number: int | None = None
        """The same, in source transactions."""
        self.key: str | None = None
        """The row at fault, as ``Key (id)=(5)``, where the change tells it."""
        self.staged_column: int | None = None
        """The number of the staged value at fault, where a COPY tells it."""
        self.column: str | None = None
        """The target's column at fault, where the server names it."""
        self.constraint: str | None = None
        """The constraint that is violated, likewise."""
        self.subject: object = None
        """The relation it is about, where that is known."""
        self.lsn: str | None = None
        """The commit of the source transaction it is about, likewise."""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class DefectError(StreamerError):
    """A defect of this program, met in the work for one table or source.

    It stops these; the log has the traceback.
    """

    retry = Retry.MANUAL


class ConfigurationError(StreamerError):
    """What the configuration asks for cannot be done."""

    code = "configuration"
    exit_code = 2


class SettingsError(ConfigurationError):
    """A setting is missing, unknown or of a wrong type."""

    code = "settings"


class MappingError(ConfigurationError):
    """A rule names no relation, or two rules claim one."""

    code = "mapping"
    retry = Retry.MANUAL


class SourceError(StreamerError):
    """The publishing side failed in a way that we have no better name for.

    Some of that passes: decoding an in-progress transaction that is rolled back meanwhile can fail
    with "could not map filenumber".
    """

    code = "source"
    retry = Retry.MANUAL


class SourceConfigurationError(SourceError):
    """The configuration of this source lacks a variable or a password; others are not concerned."""

    code = "source_configuration"
    exit_code = 2


class SourceConnectionError(SourceError):
    """The source cannot be reached, or the connection to it was lost."""

    code = "source_down"
    retry = Retry.TIMED
    exit_code = 3


class SourceRejectedError(SourceError):
    """The source refuses us: authentication, pg_hba.conf, or a missing privilege."""

    code = "source_auth"
    retry = Retry.MANUAL
    exit_code = 3


class SourceContentionError(SourceError):
    """A session at the source holds a lock that we need: SQLSTATE 55P03."""

    code = "source_busy"
    retry = Retry.TIMED


class SourceUnreadyError(SourceError):
    """The source is not set up for logical replication."""

    code = "source_settings"
    retry = Retry.MANUAL


class SourceLimitError(SourceError):
    """The source cannot send a row: as a message it would be larger than PostgreSQL allows."""

    code = "source_limit"
    retry = Retry.MANUAL


class SlotInUseError(SourceError):
    """Another process streams from our slot."""

    code = "slot_in_use"
    retry = Retry.TIMED


class SlotWaitError(SourceError):
    """A transaction at the source would not end, and a slot cannot be made before."""

    code = "slot_wait"
    retry = Retry.MANUAL


class SlotMissingError(SourceError):
    """The replication slot is gone, so changes may have been missed."""

    code = "slot_missing"
    retry = Retry.MANUAL


class SlotInvalidatedError(SourceError):
    """The replication slot was invalidated: WAL that we still need is gone."""

    code = "slot_invalidated"
    retry = Retry.MANUAL


class SourceDivergedError(SourceError):
    """Source, slot and target do not belong to the same history; going on would leave a hole."""

    code = "diverged"
    retry = Retry.MANUAL


class SourceTakenError(SourceError):
    """The slot or a publication under our names belongs to another installation."""

    code = "source_taken"
    retry = Retry.MANUAL


class ProtocolError(StreamerError):
    """A replication message is truncated, unknown or out of order."""

    code = "protocol"


class IdentityError(ProtocolError):
    """A change does not say which row it is about in the way its table's definition promises."""

    code = "identity"
    retry = Retry.MANUAL


class TransportError(StreamerError):
    """What came in binary cannot be applied as it came; the source has to send it as text."""

    code = "transport"
    retry = Retry.TIMED


class TargetError(StreamerError):
    """The target failed in a way that we have no better name for. Some of that passes: "tuple
    concurrently updated".
    """

    code = "target"
    retry = Retry.MANUAL


class TargetConnectionError(TargetError):
    """The target cannot be reached, or the connection was lost."""

    code = "target_down"
    retry = Retry.TIMED
    exit_code = 3


class TargetMovedError(TargetConnectionError):
    """A connection reached another server than the one on which the source's lock is held.

    ``claims``: the claims that could not be proven there, where that is known.
    """

    code = "target_moved"

    def __init__(self, message: str, *, claims: Collection[object] = ()) -> None:
        super().__init__(message)
        self.claims = claims


class TargetRejectedError(TargetError):
    """The target refuses us: authentication, pg_hba.conf, or a missing privilege."""

    code = "target_auth"
    retry = Retry.MANUAL
    exit_code = 3


class TargetContentionError(TargetError):
    """The target is busy, locked or short of resources: SQLSTATE 40001, 40P01, 55P03, 53…"""

    code = "target_busy"
    retry = Retry.TIMED


class TargetReadOnlyError(TargetError):
    """The target answers but accepts no writes, because it is a standby."""

    code = "target_read_only"
    retry = Retry.TIMED
    exit_code = 3


class TargetFencedError(TargetError):
    """The progress stored in the target is not the one this process stored: it lost the source's
    lock to another process, or the target lost commits.

    ``relations``: the relations it is about, where that is known.
    """

    code = "fenced"
    retry = Retry.TIMED

    def __init__(
        self, message: str, *, hint: str | None = None, relations: Collection[object] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.relations = relations


class TargetSchemaError(TargetError):
    """A target relation or column is missing, or its type differs."""

    code = "target_schema"
    retry = Retry.MANUAL


class ValueConversionError(TargetError):
    """A value that the target's type cannot hold."""

    code = "value"
    retry = Retry.MANUAL


class TextEncodingError(ValueConversionError):
    """Text that is not valid UTF-8. A source whose encoding is SQL_ASCII may hold it."""


class RowTooLargeError(ValueConversionError):
    """A row takes more memory at the target than PostgreSQL allows; see ``change_number``."""

    def __init__(self, change_number: int, size: int) -> None:
        super().__init__(
            f"target: a row of {size} bytes is larger than COPY can take, which is 1 GB with "
            "every tab, newline, carriage return and backslash of a text counted twice",
            hint="make the value smaller at the source, or exclude its column",
        )
        self.change_number = change_number


class ConflictError(TargetError):
    """The target refuses a row: a constraint is violated, or the row to change is not there.

    ``kind`` is PostgreSQL's word where it has one (conflict.c): insert_exists, update_missing, ….
    """

    code = "conflict"
    retry = Retry.MANUAL

    def __init__(self, message: str, *, kind: str = "constraint", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class SyncError(StreamerError):
    """Copying a table failed."""

    code = "sync"
    retry = Retry.MANUAL


class SnapshotExpiredError(SyncError):
    """The exported snapshot is gone; the copy must begin again with a new one."""

    code = "snapshot"
    retry = Retry.TIMED


class SyncAgainError(SyncError):
    """A table was altered, rewritten or locked meanwhile; its copy begins again."""

    code = "sync_again"
    retry = Retry.TIMED


class SparkJobError(SyncError):
    """The Spark job ended without finishing its work."""

    code = "spark"
    retry = Retry.TIMED


class SpoolError(StreamerError):
    """Held changes cannot be kept on disk."""

    code = "spool"
    retry = Retry.TIMED


class JournalError(StreamerError):
    """The journal of a source is damaged, or belongs to another one."""

    code = "journal"
    retry = Retry.MANUAL


class StoreError(ConfigurationError):
    """The mapping database cannot be used, or one of its passwords cannot be read."""

    code = "store"


class AdminError(StreamerError):
    """The API refuses what it was asked for. ``status`` is that of the HTTP answer."""

    code = "admin"
    retry = Retry.MANUAL
    exit_code = 1
    status: ClassVar[int] = 400


class InvalidError(AdminError):
    """A field is missing, unknown or of a wrong value."""

    code = "invalid"
    exit_code = 2
    status = 422


class AdminConnectionError(AdminError):
    """The process that was to be asked does not answer."""

    code = "admin_down"
    exit_code = 3
    status = 503


class UnauthenticatedError(AdminError):
    """Nobody is logged in, or the token or password is wrong."""

    code = "unauthenticated"
    exit_code = 3
    status = 401


class ForbiddenError(AdminError):
    """Whoever asks may not do that, or the request comes from another site."""

    code = "forbidden"
    exit_code = 3
    status = 403


class NotFoundError(AdminError):
    """There is nothing of that name or number."""

    code = "not_found"
    status = 404


class TakenError(AdminError):
    """Something of that name is there already."""

    code = "taken"
    status = 409


class ReadOnlyError(AdminError):
    """The mapping is in a file, and is changed there."""

    code = "read_only"
    status = 409


class UnreadyError(AdminError):
    """What is asked for cannot be done as things are."""

    code = "unready"
    status = 409


class ThrottledError(AdminError):
    """Too many wrong tokens or passwords."""

    code = "throttled"
    status = 429

    def __init__(self, message: str, *, seconds: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.seconds = seconds
