"""The errors of failed connection attempts at the target. Pure."""

from typing import Final

from streamer.errors.connection_limits import TargetConnectionLimitError
from streamer.errors.error_classes import (
    StreamerError,
    TargetConnectionError,
    TargetError,
    TargetRejectedError,
)
from streamer.postgres.session_refusals import RefusalKind, SessionLogin, find_refusal

_BY_REFUSAL: Final[dict[RefusalKind, type[TargetError]]] = {
    RefusalKind.LOGIN: TargetRejectedError,
    RefusalKind.LIMIT: TargetConnectionLimitError,
    RefusalKind.STATE: TargetConnectionError,
}


def failed_login(
    error: StreamerError, text: str, state: str | None, login: SessionLogin
) -> StreamerError:
    """Return the error of an attempt that failed with *error*. If the server refused the session by
    *text*, the error has a remedy.
    """
    if (refusal := find_refusal(text, state)) is not None:
        return _BY_REFUSAL[refusal.kind](error.message, hint=refusal.remedy(text, login))
    if isinstance(error, TargetConnectionError | TargetRejectedError):
        return error
    # The server accepts no connections now, and no table is at fault.
    return TargetConnectionError(error.message, hint=error.remedy)
