"""streamer omits a query about no table, which costs a server as much as a query about a table."""

from typing import Any, cast

import pytest

from streamer.source import catalog as source_catalog
from streamer.source import guarded_identities
from streamer.source.tables import attached_partitions
from streamer.target import catalog as target_catalog

NO_CONNECTION = cast("Any", object())


@pytest.mark.parametrize(
    "ask",
    [
        attached_partitions.read_leaves,
        guarded_identities.read_identities,
        source_catalog.read_relations,
        target_catalog.read_relations,
    ],
)
async def test_no_question_is_asked_about_no_table(ask: Any) -> None:
    assert await ask(NO_CONNECTION, []) == {}
