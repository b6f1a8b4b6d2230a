"""Every reader of rows refuses a tuple that is wider or narrower than the table."""

import pytest

from streamer.apply.lanes.copied_range import CopiedRange
from streamer.apply.rows.fold import Fold, read_changes
from streamer.apply.rows.history_chains import Versions
from streamer.control.chunked_copy import ChunkedCopy
from streamer.errors.error_classes import ProtocolError
from streamer.mapping.rule_options import TableType
from tests.property import encode
from tests.support.implementations import implementation
from tests.unit.build import apply_plan

__all__ = ["implementation"]

RELID = 16385
ROW = [b"1", b"2", b"3"]
KEY = [b"1", None, None]
OTHERS = {"narrower": ROW[:2], "wider": [*ROW, b"4"], "without columns": []}


def messages(row: list[bytes], binary: bool) -> dict[str, bytes]:
    key: list[encode.Cell] = [*row[:1], *([None] * (len(row) - 1))]
    return {
        "insert": encode.insert(RELID, row, binary=binary),
        "update": encode.update(RELID, row, binary=binary),
        "update of a key": encode.update(RELID, row, key=KEY, binary=binary),
        "update from a key": encode.update(RELID, ROW, key=key, binary=binary),
        "delete": encode.delete(RELID, key=key, binary=binary),
    }


CHANGES = list(messages(ROW, binary=False))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("binary", [False, True])
def test_it_is_refused(other: str, change: str, binary: bool) -> None:
    payload = messages(OTHERS[other], binary)[change]
    plan = apply_plan(["a", "b", "c"], ["a"], binary=binary)
    with pytest.raises(ProtocolError):
        Fold(plan).add([payload])
    with pytest.raises(ProtocolError):
        list(read_changes(plan, [payload]))
    history = apply_plan(["a", "b", "c"], ["a"], table_type=TableType.HISTORY, binary=binary)
    with pytest.raises(ProtocolError):
        Versions(history).add([payload], [0], [1])


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("binary", [False, True])
def test_it_is_refused_without_a_key(other: str, binary: bool) -> None:
    payload = encode.insert(RELID, OTHERS[other], binary=binary)
    plan = apply_plan(["a", "b", "c"], binary=binary)
    with pytest.raises(ProtocolError):
        Fold(plan).add([payload])


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("change", CHANGES)
def test_it_is_refused_during_a_copy_in_chunks(other: str, change: str) -> None:
    relation = apply_plan(["a", "b", "c"], ["a"]).relation
    copied = ChunkedCopy(("a",), ("integer",), ("5",), "", 1, 10, 20, target_oid=1)
    with pytest.raises(ProtocolError):
        CopiedRange(copied, relation).effect_of(messages(OTHERS[other], binary=False)[change])
