"""What applying a mapping says about a table whose expressions change."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from streamer.admin.mapping.plan_of_change import columns_alone
from streamer.util.lsn import Lsn
from tests.unit.test_recomputed_columns import COLUMNS, mapping, mark

if TYPE_CHECKING:
    from streamer.bookkeeping.relation_records import RelationRecord
    from streamer.source.catalog import SourceRelation


@pytest.mark.parametrize(
    ("record", "key", "columns"),
    [
        ({}, ("id",), ("email",)),
        ({"expressions": mark("id > 1")}, ("id",), None),
        ({"snapshot_lsn": None}, ("id",), None),
        ({"needs_resync": True}, ("id",), None),
        ({"quarantined": 1}, ("id",), None),
        ({}, (), None),
    ],
)
def test_columns_come_alone_if_the_table_is_in_sync_and_has_a_key(
    record: dict[str, Any], key: tuple[str, ...], columns: tuple[str, ...] | None
) -> None:
    fields = {"snapshot_lsn": Lsn(1), "needs_resync": False, "quarantined": 0, "expressions": None}
    stored = cast("RelationRecord", SimpleNamespace(**fields | record))
    relation = cast("SourceRelation", SimpleNamespace(key=key, column_names=COLUMNS))
    assert columns_alone(stored, mapping(email="md5(email)"), relation) == columns
