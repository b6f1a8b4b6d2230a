"""The options of a resync: the write mode, and the obstacles to ignore.

The bookkeeping keeps them as JSON until the resync ends. Pure.
"""

import enum
from dataclasses import dataclass
from typing import Any, Self


class Mode(enum.StrEnum):
    """The write mode for rows of a clone."""

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
