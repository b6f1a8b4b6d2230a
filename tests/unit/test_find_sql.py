"""The page finds the SQL of a hint as statements to paste, with any names and literals in it."""

import pytest

from streamer.hints import SqlRemedy, find_sql


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (
            'no column "w"; run there: alter table "t" add column "w" int default \'7; or 8\'; or exclude it',
            ("at the target", 'alter table "t" add column "w" int default \'7; or 8\';'),
        ),
        (
            'x; run at the target: alter table "a; or b" alter column "v" type bigint; or set this; while applying',
            ("at the target", 'alter table "a; or b" alter column "v" type bigint;'),
        ),
        (
            "x; run there: alter table a rename column b to c; alter table a add column d int; or exclude",
            (
                "at the target",
                "alter table a rename column b to c;",
                "alter table a add column d int;",
            ),
        ),
        (
            "x; run at the source: alter table t replica identity full, and then resync the table",
            ("at the source", "alter table t replica identity full;"),
        ),
        ("x; run at the source: alter role … bypassrls, or make our role the owner", None),
        (
            "x; run at the target: grant set on parameter p to r (before PostgreSQL 15: alter role r superuser)",
            ("at the target", "grant set on parameter p to r;"),
        ),
        ("run: streamer resync t --database shop", None),
    ],
)
def test_statements_end_where_the_advice_goes_on(
    message: str, found: tuple[str, ...] | None
) -> None:
    expected = None if found is None else SqlRemedy(found[0], found[1:])
    assert find_sql(message) == expected
