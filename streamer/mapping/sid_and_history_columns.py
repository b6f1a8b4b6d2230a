"""Names and values of target tables by convention, and PostgreSQL's limits. Pure.

``sid`` distinguishes the sources of a target table. In a history table, `HistoryColumns` contain
the validity of a row version; the default names come from kuvasz-streamer.
"""

from dataclasses import dataclass
from typing import Final

from streamer.postgres.quoting import quote_identifier

SID: Final = "sid"
HISTORY_BEGIN: Final = "'1900-01-01 00:00:00+00'::timestamptz"
"""The start of a version that existed before the first change."""
HISTORY_OPEN: Final = "'9999-01-01 00:00:00+00'::timestamptz"
"""The end of the currently valid version."""
TABLE_COLUMNS_MAX: Final = 1600
"""PostgreSQL's own limit, MaxHeapAttributeNumber."""
STABLE_OIDS_END: Final = 10_000
"""FirstGenbkiObjectId in access/transam.h: lower OIDs are assigned by hand, permanently."""


@dataclass(frozen=True, slots=True)
class HistoryColumns:
    """The names of the columns with the validity of a version, for the rule's `history`.

    ``id``: the identity column that orders the versions of a key. A table of an operator may lack
    this column.
    """

    start: str = "kvsz_start"
    end: str = "kvsz_end"
    deleted: str = "kvsz_deleted"
    id: str = "kvsz_id"

    @property
    def names(self) -> tuple[str, str, str]:
        return self.start, self.end, self.deleted

    @property
    def types(self) -> dict[str, str]:
        """The types that these columns need for versions to be written in sets. With any other
        type, streamer uses exact order.
        """
        time = "timestamp with time zone"
        return {self.start: time, self.end: time, self.deleted: "boolean"}

    def quoted(self, table: str = "") -> tuple[str, str, str]:
        """Return the columns as SQL, of the row *table* if given."""
        prefix = f"{table}." if table else ""
        start, end, deleted = (prefix + quote_identifier(name) for name in self.names)
        return start, end, deleted

    def end_sql(self, at: str, deleted: str | None = None, table: str = "") -> str:
        """Return the assignments that end the version *table* at the time *at*.

        *deleted*: the value of that column, if the assignments set it.
        """
        _, end, mark = self.quoted()
        end = f"{end} = greatest({self.quoted(table)[0]}, {at})"
        return end if deleted is None else f"{end}, {mark} = {deleted}"

    def is_open(self, table: str = "") -> str:
        """Return the condition for the current version of a row."""
        return f"{self.quoted(table)[1]} = {HISTORY_OPEN}"


USUAL_HISTORY: Final = HistoryColumns()
