"""Aliases of a YAML file: a small file yields few values, and no value that contains itself."""

import time
from pathlib import Path

import pytest

from streamer.config import yaml_file
from streamer.config.yaml_file import parse_document
from streamer.errors.error_classes import SettingsError

PATH = Path("config.yaml")
NESTED = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


def test_nested_aliases_end_soon() -> None:
    assert len(NESTED) < 600
    began = time.monotonic()
    with pytest.raises(SettingsError, match="aliases stand for over 300000 values"):
        parse_document(PATH, NESTED, replace=False)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "&a\na: *a", "- &a [[*a]]"])
def test_an_alias_inside_its_own_value_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"line \d.*an alias in this value"):
        parse_document(PATH, text, replace=False, list_key="sources")


def test_a_deeply_nested_file_is_refused() -> None:
    with pytest.raises(SettingsError, match="nested too deeply"):
        parse_document(PATH, "a: " + "[" * 5000)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 4301,
        "2026-13-45",
        "!!bool x",
        "!!timestamp x",
        "!!float x",
        "!!python/name:os.system x",
    ],
    ids=lambda text: text[:20],
)
def test_a_value_that_its_type_cannot_hold_is_named_with_its_line(text: str) -> None:
    with pytest.raises(SettingsError, match=r"config.yaml, line 2: b: this value cannot be read"):
        parse_document(PATH, f"a: 1\nb: {text}")


def test_an_alias_may_occur_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_file, "_ALIAS_VALUES_MAX", 100)
    text = "a: &a {x: 1, y: [2, 3]}\nb: [*a, *a, *a]\nc: {d: *a}"
    value = {"x": 1, "y": [2, 3]}
    assert parse_document(PATH, text).values == {"a": value, "b": [value] * 3, "c": {"d": value}}
    # The limit is for aliases, and not for the values of a large file.
    large = "a: [" + ", ".join("1" for _ in range(1000)) + "]"
    assert len(parse_document(PATH, large).values["a"]) == 1000
