"""A reload of the configuration changes all of it, or none."""

from pathlib import Path
from typing import Any, cast

import pytest

from streamer.cli import run_command
from streamer.config import static_mapping
from streamer.config.settings import Settings
from streamer.errors.error_classes import MappingError, SourceConnectionError, StreamerError
from streamer.mapping.rules import Mapping
from streamer.postgres.secret import Secret

CONFIG = """
target: {url: postgresql://x@localhost/dw}
notify: {webhook: "http://localhost/hook"}
sources: [{database: shop, urls: [{url: postgresql://x@localhost/eu}], tables: {t: }}]
"""


class Process:
    """Stands for the engine and the admin of a process; ``refusal``: the error of its mapping."""

    def __init__(self, mapping: Mapping, refusal: StreamerError | None) -> None:
        self.mapping = mapping
        self.refusal = refusal
        self.adopted: list[Settings] = []

    async def reload(self, settings: Settings, mapping: Mapping) -> None:
        if self.refusal is not None:
            raise self.refusal

    def adopt(self, settings: Settings) -> None:
        self.adopted.append(settings)

    async def renew_passwords(self, target: Secret) -> None:
        pass


@pytest.mark.parametrize(
    ("refusal", "is_adopted"),
    [(None, True), (MappingError("clash"), False), (SourceConnectionError("away"), True)],
)
async def test_settings_are_adopted_with_the_mapping(
    refusal: StreamerError | None, is_adopted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    settings, mapping = static_mapping.load(path)
    process = Process(mapping, refusal)
    successes: list[None] = []
    await run_command._reload(
        cast("Any", process),
        cast("Any", process),
        settings,
        path,
        lambda: static_mapping.load(path),
        lambda: successes.append(None),
    )
    assert bool(process.adopted) is bool(successes) is is_adopted
