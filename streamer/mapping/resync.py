"""What an operator may ask of a resync: how rows are written, and despite what.

Kept as JSON in the bookkeeping until the resync is done. Pure.
"""

import enum
from dataclasses import dataclass
from typing import Any, Self


class Mode(enum.StrEnum):
    """How rows of a clone are written again."""

    RELOAD = "reload"
    """All of them."""
    DIFF = "diff"
    """Those that differ."""


@dataclass(frozen=True, slots=True)
class Resync:
    """``force``: leave out columns that the target lacks."""

    mode: Mode = Mode.RELOAD
    force: bool = False

    def to_json(self) -> dict[str, Any]:
        options: dict[str, Any] = {"mode": self.mode.value}
        if self.force:
            options["force"] = True
        return options

    @classmethod
    def from_json(cls, options: dict[str, Any] | None) -> Self:
        options = options or {}
        return cls(
            Mode(options.get("mode", Mode.RELOAD)),
            bool(options.get("force", False)),
        )
