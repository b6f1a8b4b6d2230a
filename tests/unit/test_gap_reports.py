"""Which columns of the source differ from the columns from which a copy filled a table."""

from streamer.copy.gap_reports import replaced_columns


def test_a_column_that_the_target_does_not_get_is_never_a_replaced_column() -> None:
    now = {"a": 1, "b": 2, "c": 5}
    assert replaced_columns({"a": 1, "b": -2, "c": 3}, now) == ["c"]
    assert replaced_columns({"a": 1, "b": 2}, now) == []
