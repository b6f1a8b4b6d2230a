"""The errors that the page shows, with equal errors as one entry."""

from datetime import UTC, datetime, timedelta

from streamer.admin.live.past_errors import ERRORS_MAX, PastError, PastErrors

BEGIN = datetime(2026, 1, 2, tzinfo=UTC)


def error(second: int, text: str, table: str | None = None) -> PastError:
    return PastError(BEGIN + timedelta(seconds=second), "shop", table, text)


def test_retries_of_an_error_are_one_entry_with_their_number_and_the_last_time() -> None:
    errors = PastErrors()
    for second in range(3):
        errors.add(error(second, "refused"))
        errors.add(error(second, "no column", table="public.t"))
    errors.add(error(9, "no column", table="public.u"))
    listed = [(e.table, e.text, e.count, e.at) for e in errors.of("shop")]
    assert listed == [
        ("public.u", "no column", 1, BEGIN + timedelta(seconds=9)),
        ("public.t", "no column", 3, BEGIN + timedelta(seconds=2)),
        (None, "refused", 3, BEGIN + timedelta(seconds=2)),
    ]
    assert [e.table for e in errors.of("shop", "public.t")] == ["public.t"]
    assert list(errors.of("web")) == []


def test_the_oldest_errors_leave() -> None:
    errors = PastErrors()
    for number in range(ERRORS_MAX + 1):
        errors.add(error(number, f"error {number}"))
    assert [e.text for e in errors.of("shop")][-1] == "error 1"


def test_the_occurrences_of_an_error_at_other_positions_are_one_entry() -> None:
    errors = PastErrors()
    text = "{}; in transaction {}, committed at 0/{}; pid {} has waited for {} s"
    for second, figures in enumerate([("no", 7, "A1", 12, 1.5), ("no", 81, "FF00", 9, 20)]):
        errors.add(error(second, text.format(*figures)))
    # Another row is another error.
    for key in (5, 6):
        errors.add(error(2, f"duplicate key: Key (id)=({key})"))
    kept = [(each.text, each.count) for each in errors.of("shop")]
    assert kept == [
        ("duplicate key: Key (id)=(6)", 1),
        ("duplicate key: Key (id)=(5)", 1),
        (text.format("no", 81, "FF00", 9, 20), 2),
    ]
