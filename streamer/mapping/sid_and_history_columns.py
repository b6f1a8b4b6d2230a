"""Names and values of target tables by convention, and PostgreSQL's limits. Pure.

``sid`` distinguishes the sources of a target table. In a history table, the ``kvsz_`` columns
contain the validity of a row version, as kuvasz-streamer defines it.
"""

from typing import Final

SID: Final = "sid"
HISTORY_ID: Final = "kvsz_id"
"""Orders the versions of a key; streamer makes it an identity column."""
HISTORY_COLUMNS: Final = ("kvsz_start", "kvsz_end", "kvsz_deleted")
HISTORY_TYPES: Final = {
    "kvsz_start": "timestamp with time zone",
    "kvsz_end": "timestamp with time zone",
    "kvsz_deleted": "boolean",
}
"""Types of these columns with which sets write versions; different types require exact order."""
HISTORY_BEGIN: Final = "'1900-01-01 00:00:00+00'::timestamptz"
"""``kvsz_start`` of a version that existed before the first change."""
HISTORY_OPEN: Final = "'9999-01-01 00:00:00+00'::timestamptz"
"""``kvsz_end`` of the currently valid version."""
TABLE_COLUMNS_MAX: Final = 1600
"""PostgreSQL's own limit, MaxHeapAttributeNumber."""
STABLE_OIDS_END: Final = 10_000
"""FirstGenbkiObjectId in access/transam.h: lower OIDs are assigned by hand, permanently."""
