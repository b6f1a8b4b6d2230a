"""Names: every name that PostgreSQL can store survives printing and parsing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import (
    RelationName,
    RelationPattern,
    parse_name,
    parse_relation,
)
from streamer.mapping.rules import source_object_name
from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.util.lsn import Lsn

hostile = st.lists(
    st.sampled_from(['"', ".", "*", "'", "\\", " ", "a", "é", "\n", "$", "-", ";"]), min_size=1
).map("".join)
stored = st.one_of(st.text(min_size=1), hostile).filter(
    lambda name: "\0" not in name and 0 < len(name.encode()) <= 63
)
names = st.builds(RelationName, stored, stored)


@given(names)
def test_a_relation_name_is_read_back(name: RelationName) -> None:
    assert parse_name(str(name)) == name


@given(names)
def test_a_written_name_is_an_exact_rule_for_that_relation_alone(name: RelationName) -> None:
    pattern = parse_relation(str(name), "public")
    assert not pattern.is_pattern
    assert pattern.matches(name)
    assert not pattern.matches(RelationName(name.namespace, name.name + "x"))
    assert not pattern.matches(RelationName(name.namespace + "x", name.name))


@given(st.one_of(st.text(max_size=20), hostile))
def test_any_text_is_a_rule_or_a_mapping_error(text: str) -> None:
    try:
        pattern = parse_relation(text, "public")
    except MappingError:
        return
    assert pattern.name
    assert parse_relation(str(pattern), "other") == pattern


@given(st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=5).map("".join), stored)
def test_a_pattern_matches_names_with_any_text_for_its_stars(wanted: str, name: str) -> None:
    pattern = RelationPattern("public", wanted, name_is_pattern=True)
    letters = [".*" if letter == "*" else letter for letter in wanted]
    expected = re.fullmatch("".join(letters), name, re.DOTALL) is not None
    assert pattern.matches(RelationName("public", name)) == expected
    stood_for = RelationName("public", wanted.replace("*", name))
    assert pattern.matches(stood_for)
    assert not pattern.matches(RelationName("Public", stood_for.name))


@given(st.text(), st.one_of(st.none(), st.text()), st.sampled_from(["", "_ins"]))
def test_a_name_on_a_source_is_one_that_a_slot_may_have(
    database: str, sid: str | None, suffix: str
) -> None:
    name = source_object_name(database, sid, suffix)
    assert re.fullmatch("[a-z0-9_]{1,63}", name)
    assert name.startswith("streamer_")
    assert name.endswith(suffix)
    assert name == source_object_name(database, sid, suffix)


@given(st.text(st.characters(codec="ascii"), min_size=60), st.integers(0, 59))
def test_long_names_that_differ_anywhere_stay_apart(database: str, place: int) -> None:
    changed = "#" if database[place] != "#" else "%"
    other = database[:place] + changed + database[place + 1 :]
    assert source_object_name(database, "s") != source_object_name(other, "s")


# ---- quoting -----------------------------------------------------------------------------------


def scan_identifier(sql: str) -> str:
    """Read a quoted identifier as scan.l does, up to the end of the text."""
    assert sql[0] == sql[-1] == '"'
    inside = sql[1:-1]
    assert '"' not in inside.replace('""', "")
    return inside.replace('""', '"')


def scan_literal(sql: str) -> str:
    """Read a string constant as scan.l does, with standard_conforming_strings on or off."""
    text = sql.lstrip(" ")
    has_escapes = text.startswith("E")
    text = text.removeprefix("E")
    assert text[0] == text[-1] == "'"
    value, position = "", 1
    while position < len(text) - 1:
        letter = text[position]
        if letter == "'" or (letter == "\\" and has_escapes):
            position += 1
            assert text[position] == letter, "only doubled"
            assert position < len(text) - 1, "the constant would not end"
        else:
            assert letter != "\\", "means different things"
        value += letter
        position += 1
    return value


@given(st.one_of(st.text(), hostile))
def test_a_quoted_identifier_is_read_back(name: str) -> None:
    if "\0" in name:
        with pytest.raises(ValueError, match="NUL"):
            quote_identifier(name)
    else:
        assert scan_identifier(quote_identifier(name)) == name


@given(st.one_of(st.text(), hostile))
def test_a_quoted_literal_is_read_back(value: str) -> None:
    if "\0" in value:
        with pytest.raises(ValueError, match="NUL"):
            quote_literal(value)
    else:
        assert scan_literal(quote_literal(value)) == value


# ---- positions ---------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1))
def test_a_position_is_printed_as_postgresql_does_and_read_back(number: int) -> None:
    lsn = Lsn(number)
    assert Lsn.parse(str(lsn)) == lsn
    assert Lsn.parse(str(lsn).lower()) == lsn
    assert re.fullmatch("[0-9A-F]{1,8}/[0-9A-F]{1,8}", str(lsn))


@given(st.one_of(st.text(max_size=12), st.text("0123456789abcdefABCDEFxX_+-/ \n", max_size=12)))
def test_only_positions_that_postgresql_accepts_are_positions(text: str) -> None:
    if re.fullmatch(r"[0-9a-fA-F]{1,8}/[0-9a-fA-F]{1,8}", text):
        high, low = text.split("/")
        assert Lsn.parse(text) == int(high + low.zfill(8), 16)
    else:
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            Lsn.parse(text)
