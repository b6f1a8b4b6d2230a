"""The receiver of spans: windows that the target applied, and copied parts."""

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

Facts = Mapping[str, int | str]
"""The attributes of a span, by name."""


class Spans(Protocol):
    """Receives ended spans."""

    def add_window(self, worker: str, seconds: float, facts: Facts) -> None:
        """Add a window that *worker* has just finished after *seconds*."""

    def add_part(self, began_at: datetime, ended_at: datetime, facts: Facts) -> None:
        """Add a copied part of a table."""
