"""Waits of copies that end without an operator. Pure."""

from typing import Final

from streamer.errors.error_reports import TableWait

AUTOMATIC_WAIT: Final = "its turn: "


def automatic_wait(reason: str) -> TableWait:
    """Return the wait of a copy for *reason*, which ends without an operator."""
    return TableWait(f"{AUTOMATIC_WAIT}{reason}", is_automatic=True)


STARTING_SPARK: Final = automatic_wait("Spark starts")
