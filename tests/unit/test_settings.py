"""What the configuration refuses, and that it says where."""

from pathlib import Path

import pytest

from streamer.config import static
from streamer.errors import SettingsError

CONFIG = """\
target: {url: "postgresql://nowhere/dw"}
on_error: %(on_error)s
sources:
- database: shop
  urls: [{url: "postgresql://nowhere/shop"}]
  tables:
    t:
      on_error: %(table)s
      initial: none
"""


def write(path: Path, on_error: str = "stop", table: str = "stop", more: str = "") -> Path:
    file = path / "config.yaml"
    file.write_text(CONFIG % {"on_error": on_error, "table": table} + more)
    return file


@pytest.mark.parametrize(
    ("on_error", "table", "expected"),
    [
        ("quarantine", "null", "quarantine"),
        ("quarantine", "stop", "stop"),
        ("stop", "quarantine", "quarantine"),
    ],
)
def test_a_table_goes_by_its_own_on_error_or_by_that_of_all(
    tmp_path: Path, on_error: str, table: str, expected: str
) -> None:
    _, mapping = static.load(write(tmp_path, on_error, table))

    assert mapping.sources[0].rules[0].on_error == expected


def test_another_word_is_refused_with_what_may_stand_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"line 2: on_error: .*'stop'"):
        static.load(write(tmp_path, on_error="skip"))


def test_what_can_be_done_is_taken(tmp_path: Path) -> None:
    _, mapping = static.load(write(tmp_path))

    assert [rule.on_error for rule in mapping.sources[0].rules] == ["stop"]


@pytest.mark.parametrize(
    ("more", "transport"),
    [("", "text"), ("  transport: text\n", "text"), ("  transport: binary\n", "binary")],
)
def test_transport_is_text_unless_binary_is_asked_for(
    tmp_path: Path, more: str, transport: str
) -> None:
    _, mapping = static.load(write(tmp_path, more=more))

    assert mapping.sources[0].transport == transport
