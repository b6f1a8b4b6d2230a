"""The error about a target that is a standby, for `check` and `run`. Pure."""

from streamer.errors.error_classes import TargetReadOnlyError
from streamer.errors.remedies import Remedy, at_target


def standby_error() -> TargetReadOnlyError:
    """Return the error of a target that accepts no writes."""
    return TargetReadOnlyError(
        "target: the server is a standby and accepts no writes",
        hint=Remedy.of(
            "promote it with ",
            at_target("select pg_promote()"),
            ", or point target.url at the primary",
        ),
    )
