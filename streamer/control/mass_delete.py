"""A source transaction that deletes more rows of a table than the rule allows, and the operator's
decision.

The bookkeeping stores the decision as JSON, from the pause of the table on. Pure.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from streamer.util.lsn import Lsn


@dataclass(frozen=True, slots=True)
class MassDelete:
    """The rows that a source transaction removes from a table.

    ``lsn``: the position of the commit record. ``commit_time``: the commit time at the source, in
    ISO 8601. ``skips``: whether an operator wants to skip the deletes; None before a decision.
    """

    xid: int
    lsn: Lsn
    commit_time: str
    deleted_rows: int
    truncates: int
    skips: bool | None = None

    @property
    def is_decided(self) -> bool:
        return self.skips is not None

    def decide(self, *, skips: bool) -> Self:
        return replace(self, skips=skips)

    def exceeds(self, limit: int | None) -> bool:
        """Return whether the transaction removes more than *limit* rows; None allows any number."""
        return limit is not None and (self.deleted_rows > limit or self.truncates > 0)

    def __str__(self) -> str:
        removes = [f"deletes {self.deleted_rows} rows"] if self.deleted_rows else []
        removes += ["truncates the table"] if self.truncates else []
        return (
            f"transaction {self.xid}, committed {self.commit_time} at {self.lsn}, "
            f"{' and '.join(removes)}"
        )

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"lsn": str(self.lsn)}
        if self.skips is None:
            del fields["skips"]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(**(fields | {"lsn": Lsn.parse(fields["lsn"])}))

    @classmethod
    def stored(cls, text: str | None) -> Self | None:
        """Return the mass delete from a column of the bookkeeping."""
        return None if text is None else cls.from_json(json.loads(text))
