"""What applying a mapping says about its tables."""

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from streamer.admin.mapping.plan_of_change import _plan_table, columns_alone
from streamer.commands.check.source_findings import copied
from streamer.commands.check.target_facts import TargetFacts
from streamer.control.table_state import ALL_ROWS
from streamer.mapping.rule_options import Initial
from streamer.util.lsn import Lsn
from tests.unit.test_recomputed_columns import COLUMNS, mapping, mark
from tests.unit.test_request_outcomes import record
from tests.unit.test_source_findings import facts_of
from tests.unit.test_target_findings import NO_BOOKKEEPING, SERVER

if TYPE_CHECKING:
    from streamer.bookkeeping.relation_records import RelationRecord
    from streamer.source.catalog import SourceRelation


@pytest.mark.parametrize(
    ("facts", "key", "columns"),
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
    facts: dict[str, Any], key: tuple[str, ...], columns: tuple[str, ...] | None
) -> None:
    fields = {"snapshot_lsn": Lsn(1), "needs_resync": False, "quarantined": 0, "expressions": None}
    stored = cast("RelationRecord", SimpleNamespace(**fields | facts))
    relation = cast("SourceRelation", SimpleNamespace(key=key, column_names=COLUMNS))
    assert columns_alone(stored, mapping(email="md5(email)"), relation) == columns


@pytest.mark.parametrize(
    ("initial", "stored", "action"),
    [
        (Initial.COPY, None, "copy"),
        (Initial.KEEP, None, "copy"),
        (Initial.NONE, None, "stream"),
        (Initial.COPY, {"state": "copying"}, "copy"),
        (Initial.NONE, {"state": "init"}, "stream"),
        (Initial.NONE, {"state": "init", "declared": True}, "copy"),
        (Initial.COPY, {"state": "ready", "snapshot_lsn": Lsn(1)}, "keep"),
        (Initial.COPY, {"state": "error", "needs_resync": True}, "keep"),
        (Initial.NONE, {"state": "ready", "snapshot_lsn": Lsn(1), "type": "append"}, "change"),
    ],
)
def test_a_plan_copies_the_tables_that_run_copies_by_itself(
    initial: Initial, stored: dict[str, Any] | None, action: str
) -> None:
    facts, target = facts_of(), TargetFacts(SERVER, NO_BOOKKEEPING)
    (table,) = facts.mappings
    table = replace(table, rule=replace(table.rule, initial=initial))
    facts.mappings = [table]
    if stored is not None:
        names = {"target": str(table.target), "type": table.type.value, "resync": ALL_ROWS}
        target.relations[facts.source.label, str(table.source)] = record(**names | stored)
    assert _plan_table(facts, target, table, None).action == action
    assert [mapping.source for mapping in copied(facts, target)] == (
        [table.source] if action == "copy" else []
    )
