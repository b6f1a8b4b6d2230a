"""Waits of copies that end without an operator. Pure."""

from typing import Final

from streamer.errors.error_reports import TableWait

TURN: Final = "its turn: "


def turn(reason: str) -> TableWait:
    """Return the wait of a copy for *reason*, which ends without an operator."""
    return TableWait(f"{TURN}{reason}", is_turn=True)


STARTING_SPARK: Final = turn("Spark starts")
