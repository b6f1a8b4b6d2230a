"""The waits of copies that begin by themselves, so that no operator needs to act. Pure."""

from typing import Final

from streamer.error_reports import TableWait

TURN: Final = "its turn: "


def turn(reason: str) -> TableWait:
    """Return the wait of a copy that begins by itself: no operator needs to act."""
    return TableWait(f"{TURN}{reason}", is_turn=True)


STARTING_SPARK: Final = turn("Spark starts")
