"""Names and literals keep their meaning in SQL text."""

import pytest

from streamer.postgres.quoting import (
    quote_columns,
    quote_identifier,
    quote_literal,
    quote_qualified,
    without_line_breaks,
)


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("orders", '"orders"'),
        ("select", '"select"'),
        ("Mixed Case", '"Mixed Case"'),
        ('a"b', '"a""b"'),
        ('"', '""""'),
        ("a.b", '"a.b"'),
        ('"; drop table t; --', '"""; drop table t; --"'),
    ],
)
def test_an_identifier_is_always_quoted(name: str, quoted: str) -> None:
    assert quote_identifier(name) == quoted


def test_a_qualified_name_is_quoted_in_parts() -> None:
    assert quote_qualified("my.schema", 'my"table') == '"my.schema"."my""table"'


def test_columns_are_separated_by_commas() -> None:
    assert quote_columns(["a", "b,c"]) == '"a", "b,c"'
    assert quote_columns([]) == ""


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("eu", "'eu'"),
        ("", "''"),
        ("it's", "'it''s'"),
        ("a\\b", " E'a\\\\b'"),
        ("\\'", " E'\\\\'''"),
        ("$streamer$", "'$streamer$'"),
    ],
)
def test_a_literal_means_the_same_with_and_without_standard_strings(
    value: str, quoted: str
) -> None:
    assert quote_literal(value) == quoted


def test_nul_which_postgresql_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="identifier"):
        quote_identifier("a\0b")
    with pytest.raises(ValueError, match="string constant"):
        quote_literal("a\0b")


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ('drop table "a\nb\\c"."d"', 'drop table U&"a\\000Ab\\\\c"."d"'),
        ("select 'x\ny\\', 'z'", "select E'x\\x0ay\\\\', 'z'"),
        ("select  E'a\\'\rb', 'it''s'", "select  E'a\\'\\x0db', 'it''s'"),
        ("as $function$ 'a\n' $function$", "as $function$ 'a\n' $function$"),
        ("create table t (\n  a int\n)", "create table t (\n  a int\n)"),
    ],
)
def test_no_name_and_no_constant_breaks_a_line_of_a_statement(sql: str, expected: str) -> None:
    assert without_line_breaks(sql) == expected
