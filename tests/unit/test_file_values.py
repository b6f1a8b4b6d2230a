"""The values of a configuration file on the page: as written, and without secrets."""

from pathlib import Path
from typing import Any

import yaml

from streamer.admin.mapping.export_and_import import export_mapping
from streamer.admin.mapping.file_values import read_file_values

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


def test_an_export_has_a_variable_in_place_of_each_key_of_the_file() -> None:
    empty: dict[str, Any] = {"databases": [], "urls": [], "tables": [], "settings": {}}
    text, variables = export_mapping(empty, {}, yaml.safe_load(FILE))
    assert "hidden" not in text
    assert variables == ["TARGET_PASSWORD", "HASH_KEYS_PEOPLE_KEY", "HASH_KEYS_SHOPS_KEY"]
    assert yaml.safe_load(text)["hash_keys"]["others"] == {"key": "${PATH}"}
