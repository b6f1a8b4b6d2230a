"""The task that creates definitions at the target."""

from typing import Any

import pytest

from streamer.observability.metrics import Metrics
from streamer.schema_changes import definition_builder
from streamer.schema_changes.definition_builder import DefinitionBuilder


async def test_it_connects_to_the_target_only_while_definitions_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bookkeeping:
        async def fetch(self, sql: str, *parameters: Any) -> list[Any]:
            return []

    def connect(*arguments: Any) -> None:
        raise AssertionError("a connection without work")

    monkeypatch.setattr(definition_builder, "target_connection", connect)
    parts: Any = (None, Bookkeeping(), None, Metrics())
    await DefinitionBuilder(*parts)._create(reads_given_up=True)
