"""The number of key ranges that a comparison reads, and their bounds. Pure."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from streamer.postgres.key_ranges import Key, KeyRange

RANGE_ROWS: Final = 50_000
"""The number of rows of a first range, which a server reads in a few tenths of a second."""
RANGES_MAX: Final = 4096
"""The number of ranges of a table. Larger tables have larger ranges, so that the driver's memory
does not grow.
"""
PART_ROWS: Final = 2000
"""The number of rows of a part. A statement computes the sums of all parts of a range, so a range
that differs need not be read again.
"""
PARTS_MAX: Final = 64
"""The maximum number of parts of a range."""
FETCH_ROWS: Final = 5000
"""Tasks cut a differing part until each side has at most this number of rows, and then fetch the
rows. Cuts from a sample yield parts of up to about twice the planned size.
"""
SAMPLED_ROWS: Final = 50
SAMPLED_PAGES: Final = 16
"""The number of rows and pages in the sample for each range: sizes are accurate to a quarter."""
SAMPLED_PART_PAGES: Final = 2
"""The number of pages in the sample for each part."""
TID_RANGES_MIN: Final = 14_00_00
"""From this version on a server can read a range of pages without reading the whole table."""
PAGES_BYTES: Final = 64 * 1024 * 1024
"""The size of the pages that a statement reads: about a second for a server."""
LISTED_BYTES: Final = 16 * 1024 * 1024
"""The size of the pages for a statement that lists the ctids of rows."""
CUTS_MAX: Final = 8
"""The maximum depth of cuts: at 64 parts each, more than any table needs."""
BUCKET_ROWS: Final = 1000
BUCKETS_MAX: Final = 65_536
PACE_SECONDS: Final = 5.0
"""The approximate time to read a range under a limit on the rate."""
WHOLE_SECONDS_MAX: Final = 300.0
"""The maximum time to which a limit on the rate may extend a statement that reads a whole table.
The server keeps its snapshot meanwhile, so VACUUM removes no dead rows.
"""


class CutRange(NamedTuple):
    """A range, and the keys that cut the range into parts."""

    range: KeyRange
    cuts: tuple[Key, ...] = ()


def cut_ranges(keys: Sequence[Key], parts: int) -> list[CutRange]:
    """Cut all keys into ranges of *parts* parts each, at *keys*, which are in order."""
    cut: list[CutRange] = []
    lower: Key | None = None
    for start in range(0, len(keys) + 1, parts):
        inner = keys[start : start + parts]
        upper = inner[-1] if len(inner) == parts else None
        if upper is None or upper != lower:
            cuts = tuple(key for key in inner if key not in (lower, upper))
            cut.append(CutRange(KeyRange(lower, upper), cuts))
            lower = upper
    return cut


def split_range(unit: KeyRange, keys: Iterable[Key]) -> list[KeyRange]:
    """Cut a range at *keys*, which are in order and inside the range."""
    bounds = [unit.lower, *keys, unit.upper]
    cut = [bounds[0]]
    for bound in bounds[1:-1]:
        if bound != cut[-1]:
            cut.append(bound)
    cut.append(bounds[-1])
    return [KeyRange(lower, upper) for lower, upper in pairwise(cut)]


def count_ranges(rows: int, rows_per_second: float | None) -> int:
    """Return the number of first ranges of a table of about *rows*.

    *rows_per_second*: the limit of a task.
    """
    size = RANGE_ROWS
    if rows_per_second is not None:
        size = max(1, min(size, round(rows_per_second * PACE_SECONDS)))
    return max(1, min(-(-rows // size), RANGES_MAX))


def sampled_percent(rows: int, pages: int, ranges: int, parts: int) -> float:
    """Return the percentage of a table's pages to sample, so that *ranges* of *parts* parts each
    have about the same size.

    Rows of a page mostly have neighbouring keys, so a page may show no more than a single row.
    """
    by_rows = SAMPLED_ROWS * ranges / max(1, rows)
    by_pages = max(SAMPLED_PAGES, SAMPLED_PART_PAGES * parts) * ranges / max(1, pages)
    return min(100.0, 100.0 * max(by_rows, by_pages))


def count_page_parts(
    pages: int, size_bytes: int, rows: int, rate: float | None, *, lists_places: bool = False
) -> int:
    """Return the number of parts in which to read a table that is read page by page.

    *size_bytes*: the size, including values outside of the pages. *rate*: the maximum of rows per
    second. *lists_places*: see `Pages`.
    """
    count = -(-size_bytes // (LISTED_BYTES if lists_places else PAGES_BYTES))
    if rate is not None:
        count = max(count, round(rows / (rate * PACE_SECONDS)))
    return max(1, min(count, pages, RANGES_MAX))


def count_page_readers(sizes_bytes: Iterable[int], jobs: int) -> tuple[int, int]:
    """Return the number of concurrent statements for each table that is read page by page.

    The second number counts the statements of all tables beyond the first of each table.

    *sizes_bytes*: the sizes of the tables that are read page by page.
    """
    large = sum(size > PAGES_BYTES for size in sizes_bytes)
    count = max(1, jobs // max(1, large))
    return count, large * (count - 1)


def count_parts(rows: int) -> int:
    """Return the number of parts for a range of about *rows*."""
    return max(1, min(-(-rows // PART_ROWS), PARTS_MAX))


def whole_rate(rows_per_second: float | None, buckets: int) -> float | None:
    """Return the rate for a table that a statement reads entirely, with *buckets*."""
    if rows_per_second is None:
        return None
    return max(rows_per_second, buckets * BUCKET_ROWS / WHOLE_SECONDS_MAX)


def count_buckets(rows: int) -> int:
    """Return the number of buckets for a table of about *rows*: a power of two."""
    count = max(1, min(-(-rows // BUCKET_ROWS), BUCKETS_MAX))
    return 1 << (count - 1).bit_length()


def join_buckets(count: int, numbers: Iterable[int], numbers_max: int) -> tuple[int, list[int]]:
    """Return at most *numbers_max* larger buckets that contain all rows of the buckets *numbers*.

    *count*: the number of all buckets, a power of two. A bucket is the last bits of a hash.
    """
    joined = set(numbers)
    while len(joined) > numbers_max and count > 1:
        count //= 2
        joined = {number & (count - 1) for number in joined}
    return count, sorted(joined)
