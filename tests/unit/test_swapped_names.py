"""Columns that swapped names, from RELATION and two reads of a catalog."""

import pytest

from streamer.apply.write.planner import swapped_names
from streamer.schema.source_definition import DefinedColumn

KNOWN = {"id": 1, "v": -2, "w": 3}


@pytest.mark.parametrize(
    ("names", "now", "swapped"),
    [
        pytest.param("id v w", "id v w", "", id="as ever"),
        pytest.param("id w v", "id w v", "w v", id="swapped"),
        pytest.param("id w v", "id v w", "w v", id="swapped for a time"),
        pytest.param("id w v", "id - w v", "", id="dropped and added again"),
        pytest.param("id w v", "id - w", "", id="added again, and dropped since"),
        pytest.param("id w v", "id w", "w", id="swapped, and one dropped since"),
        pytest.param("id x v", "id x v", "", id="a new name makes room"),
        pytest.param("v id w", "id v w", "v id", id="a key swapped for a time"),
    ],
)
def test_names_in_another_order(names: str, now: str, swapped: str) -> None:
    present = {
        name: DefinedColumn(number, name, "text")
        for number, name in enumerate(now.split(), 1)
        if name != "-"
    }
    assert swapped_names(names.split(), KNOWN, present) == swapped.split()
