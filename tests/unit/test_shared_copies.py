"""The way of a table's rows into a target table that several tables share."""

import pytest

from streamer.copy.shared_copies import Entry, Sharer, choose_entry, name_others

OWN = 1


def sharer(letters: str, number: int) -> Sharer:
    """``r``: has rows; ``a``: awaits a copy; ``q``: a request is queued."""
    return Sharer(number, "r" in letters, "a" in letters, "q" in letters)


@pytest.mark.parametrize(
    ("own", "others", "entry"),
    [
        ("a", [], Entry.INSERT),
        ("a", [""], Entry.INSERT),
        ("a", ["r"], Entry.INSERT),
        ("a", ["a", "a"], Entry.INSERT),
        ("ra", [], Entry.REPLACE_ALL),
        ("ra", ["ra", "a"], Entry.REPLACE_ALL),
        ("a", ["ra"], Entry.REPLACE_ALL),
        ("a", ["ra", "r"], Entry.INSERT),
        ("ra", ["rq", "ra"], Entry.WAIT),
        ("ra", ["r", "ra"], Entry.REFUSE),
        ("ra", ["rq", "r"], Entry.REFUSE),
    ],
)
def test_former_rows_leave_only_when_no_table_writes(
    own: str, others: list[str], entry: Entry
) -> None:
    sharers = [sharer(own, OWN), *(sharer(other, 2 + n) for n, other in enumerate(others))]
    assert choose_entry(OWN, sharers) is entry


def test_many_tables_are_not_all_named() -> None:
    labels = {number: ("shop", f"public.t{number}") for number in range(8)}
    assert name_others(labels).endswith('"public.t4" of source "shop" or one of 3 more tables')
    assert name_others({}) == "a row of the target"
