"""Errors of servers that answer and have no connection left for streamer's role."""

from streamer.errors.error_classes import SourceConnectionError, TargetConnectionError


class SourceConnectionLimitError(SourceConnectionError):
    """The source refuses a session, because role, database or server has too many connections."""

    code = "source_connection_limit"
    advice = "Raise the limit that the message names, or end idle sessions at the source."


class TargetConnectionLimitError(TargetConnectionError):
    """The target refuses a session, because role, database or server has too many connections."""

    code = "target_connection_limit"
    advice = "Raise the limit that the message names, or end idle sessions at the target."
