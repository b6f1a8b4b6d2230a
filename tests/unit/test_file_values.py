"""The values of a configuration file on the page: as written, and without secrets."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from streamer.admin.mapping.export_and_import import export_mapping
from streamer.admin.mapping.file_values import read_file_values
from streamer.admin.mapping.written_settings import read_written

FILE = """
target: {url: "postgresql://loader:hidden-1@db/dw"}
hash_keys:
  people: {key: "hidden-2-hidden-2-hidden-2-hidden-2"}
  shops: {key: "${HOME}/a-key-of-at-least-32-characters"}
  others: {key: "${PATH}"}
admin: {token: hidden-3}
sources:
- database: shop
  urls:
  - {url: "postgresql://u:${HOME}@h/shop", sid: eu}
  - {url: "host=h password=hidden-4", sid: us}
  tables: {t: , "log.*": {type: append, set: {email: {hmac: email, key: people}}}}
"""
SHOWN = """
target: {url: "postgresql://loader:***@db/dw"}
hash_keys: {people: {key: "***"}, shops: {key: "***"}, others: {key: "${PATH}"}}
admin: {token: "***"}
sources:
- database: shop
  urls:
  - {url: "postgresql://u:${HOME}@h/shop", sid: eu}
  - {url: "host=h password=***", sid: us}
  tables: {t: , "log.*": {type: append, set: {email: {hmac: email, key: people}}}}
"""


def test_the_page_shows_what_the_file_sets_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    shown = read_file_values(path)
    assert "hidden" not in shown
    assert yaml.safe_load(shown) == yaml.safe_load(SHOWN)


EMPTY: dict[str, Any] = {"databases": [], "urls": [], "tables": [], "settings": {}}
SECRETS = """
notify: {webhook: "https://hooks/hidden-5", key: hidden-6}
opentelemetry: {endpoint: "http://h", headers: {authorization: "Bearer hidden-7", url: "a hidden-8"}}
"""  # fmt: skip


def test_an_export_has_a_variable_in_place_of_each_secret_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FILE + SECRETS)
    text, variables = export_mapping(EMPTY, {}, read_written(path))
    assert "hidden" not in text
    assert variables == [
        *("TARGET_PASSWORD", "HASH_KEYS_PEOPLE_KEY", "HASH_KEYS_SHOPS_KEY"),
        *("NOTIFY_WEBHOOK", "NOTIFY_KEY"),
        *("OPENTELEMETRY_HEADERS_AUTHORIZATION", "OPENTELEMETRY_HEADERS_URL"),
    ]
    exported = yaml.safe_load(text)
    assert exported["hash_keys"]["others"] == {"key": "${PATH}"}
    assert exported["notify"] == {"webhook": "${NOTIFY_WEBHOOK}", "key": "${NOTIFY_KEY}"}
    assert "hidden" not in read_file_values(path)


@pytest.mark.parametrize(
    ("written", "shown", "exported"),
    [
        ("{url: '${SCHEME}://u:hidden@h/db'}", {"url": "***"}, {"url": "${TARGET_URL}"}),
        ("{url: '${BASE}?password=hidden'}", {"url": "***"}, {"url": "${TARGET_URL}"}),
        ("{url: 'postgresql://u${COLON}hidden@h/db'}", {"url": "***"}, {"url": "${TARGET_URL}"}),
        (
            "{url: 'postgresql://u:hidden@${HOST}/db'}",
            {"url": "postgresql://u:***@${HOST}/db"},
            {"url": "postgresql://u:${TARGET_PASSWORD}@${HOST}/db"},
        ),
        (
            "{url: 'host=h', password_command: [curl, hidden]}",
            {"url": "host=h", "password_command": "***"},
            {"url": "host=h", "password_command": "${TARGET_PASSWORD_COMMAND}"},
        ),
    ],
)
def test_a_secret_beside_variables_and_the_arguments_of_a_command_are_hidden(
    written: str,
    shown: dict[str, str],
    exported: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"SCHEME": "postgresql", "BASE": "postgresql://u@h/db", "COLON": ":", "HOST": "h"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "config.yaml"
    path.write_text(f"target: {written}\nsources: []\n")
    assert yaml.safe_load(read_file_values(path))["target"] == shown
    text, _ = export_mapping(EMPTY, {}, read_written(path))
    assert yaml.safe_load(text)["target"] == exported
