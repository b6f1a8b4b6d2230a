"""The JSON schema for editors accepts every valid file, and finds the slips of a user."""

import re
from pathlib import Path
from typing import Final

import jsonschema_rs
import pytest
import yaml

from streamer.config.json_schema import schema_of_file
from tests.support.invoking import invoke

ROOT: Final = Path(__file__).parents[2]
VALIDATOR: Final = jsonschema_rs.validator_for(schema_of_file())
WHOLE: Final = """
target: {{url: "postgresql://loader@warehouse/dw"}}
sources:
  - database: shop
    urls: [{{url: "postgresql://streamer@shop/shop"{url}}}]
    tables: {{orders: {table}}}
    {source}
{general}
"""


def faults(text: str) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


def written(**parts: str) -> str:
    return WHOLE.format(**({"url": "", "table": "{}", "source": "", "general": ""} | parts))


def complete_files() -> list[str]:
    """Return the files of the documentation that name a target."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = [
        block
        for page in pages
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        if all(re.search(rf"^\s*{key}:", block, re.MULTILINE) for key in ("target", "tables"))
    ]
    assert len(blocks) >= 2
    return [(ROOT / "config.example.yaml").read_text(), *blocks]


@pytest.mark.parametrize("text", complete_files())
def test_the_files_of_the_documentation_are_valid(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    "parts",
    [
        {"source": "ddl: off"},
        {"source": "max_retained_wal: 10GB"},
        {"source": "max_retained_wal: 1048576"},
        {"source": "on_ddl: stop"},
        {"source": "on_ddl: {drop_column: stop}"},
        {"table": "null"},
        {"table": "{set: {email: md5(email), name: {hmac: name, key: people}}}"},
        {"url": ", password_command: [aws, rds, token]"},
        {"url": ", password_command: aws rds token"},
        {"general": "workers: ${WORKERS}"},
        {"general": "sync: {spark_settings: {spark.executor.cores: 2, spark.ui.enabled: false}}"},
    ],
)
def test_every_form_of_a_setting_is_valid(parts: dict[str, str]) -> None:
    assert faults(written(**parts)) == []


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"general": "worker: 4"}, "worker"),
        ({"general": "workers: 0"}, "0"),
        ({"general": "on_error: halt"}, "halt"),
        ({"source": "max_retained_wal: 10 gigabytes"}, "10 gigabytes"),
        ({"table": "{type: histroy}"}, "histroy"),
        ({"source": "on_ddl: {drop_colum: stop}"}, "drop_colum"),
        ({"general": "sync: {spark_settings: {executor.cores: 2}}"}, "executor.cores"),
    ],
)
def test_a_slip_is_a_fault(parts: dict[str, str], named: str) -> None:
    assert any(named in message for message in faults(written(**parts)))


def test_a_file_without_a_target_is_valid_because_the_environment_can_name_the_target() -> None:
    assert faults("workers: 2") == []


def test_the_help_of_a_setting_has_the_meaning_of_each_word() -> None:
    help_text = schema_of_file()["$defs"]["TableSettings"]["properties"]["on_delete"]["description"]
    assert "\n- mark: the rows stay" in help_text


def test_the_command_prints_the_schema() -> None:
    assert yaml.safe_load(invoke("config", "schema").stdout) == schema_of_file()
