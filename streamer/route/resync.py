"""What an operator may ask of a resync: how rows are written, which of them, and despite what.

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
    """``where``: the part of the rows that is meant, as a condition on the source's columns.

    ``force``: leave out columns that the target lacks.
    """

    mode: Mode = Mode.RELOAD
    where: str | None = None
    force: bool = False

    def to_json(self) -> dict[str, Any]:
        options: dict[str, Any] = {"mode": self.mode.value}
        if self.where is not None:
            options["where"] = self.where
        if self.force:
            options["force"] = True
        return options

    @classmethod
    def from_json(cls, options: dict[str, Any] | None) -> Self:
        options = options or {}
        return cls(
            Mode(options.get("mode", Mode.RELOAD)),
            options.get("where"),
            bool(options.get("force", False)),
        )
