"""Compiled code gives the results of pure Python, and refuses hostile bytes without reading past
them.
"""

import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.copydata import RowLayout, encode_rows
from streamer.apply.rows.fold import Fold, NotFoldable
from streamer.apply.rows.history_chains import Versions
from streamer.apply.sql.history_versions import VersionStatements
from streamer.apply.sql.ordered_statements import Statements
from streamer.compiled import choice
from streamer.decode.tuples import NULL, NULL_BINARY, PendingRow
from streamer.errors.error_classes import IdentityError, ProtocolError
from streamer.mapping.rule_options import TableType
from tests.property import encode
from tests.support.compiled import compiled, needs_compiled
from tests.unit.build import apply_plan

RELID = 16385
COLUMNS = ("a", "b", "c")

pytestmark = needs_compiled


def with_implementation(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(choice, "compiled", module)


cells = st.one_of(st.none(), st.sampled_from([b"1", b"2", b"", b"a\tb", b"\\N", b"\r\n"]))
keys = st.sampled_from([b"1", b"2", b"3"])


old_rows = st.tuples(keys, st.sampled_from([b"1", None]), st.just(b"x"))


@st.composite
def messages(draw: st.DrawFn, binary: bool, identity: str = "d") -> bytes:
    row = [draw(keys), draw(cells), draw(cells)]
    kind = draw(st.sampled_from("IUDMX"))
    key: encode.Cell = draw(keys) if kind == "M" else row[0]
    sent: encode.OldTuple = {"key": [key, None, None]}
    if identity == "f":
        # Few different rows, so that an old row often equals the pending row.
        row = [*draw(old_rows)]
        sent = {"old": [key if kind == "M" else row[0], *draw(old_rows)[1:]]}
    insert = encode.insert(RELID, row, binary=binary)
    if kind == "I":
        return insert
    if kind in "UM":
        changed: list[encode.Cell] = [*row]
        if identity == "f" and draw(st.booleans()):
            changed[draw(st.integers(0, 2))] = encode.TOAST
        elif identity == "d" and kind == "U":
            sent = {}
        return encode.update(RELID, changed, **sent, binary=binary)
    message = encode.delete(RELID, **sent, binary=binary)
    if kind == "D":
        return message
    # As a broken or hostile peer may send: cut off, prolonged, or with a byte changed.
    update = encode.update(RELID, row, **sent, binary=binary)
    damaged = bytearray(draw(st.sampled_from([message, insert, update])))
    if draw(st.booleans()) and len(damaged) > 6:
        damaged[draw(st.integers(5, len(damaged) - 1))] = draw(st.integers(0, 255))
    return bytes(damaged[: draw(st.integers(6, len(damaged)))]) + draw(st.binary(max_size=2))


def outcome(payloads: list[bytes], plan: ApplyPlan, *, module: Any) -> Any:
    """The result of folding and encoding, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        with_implementation(module, patch)
        fold = Fold(replace(plan))  # a copy without the cached folder
        try:
            fold.add(list(payloads))
        except (NotFoldable, ProtocolError, IdentityError) as exc:
            return type(exc), str(exc)
        layout = RowLayout(len(COLUMNS), plan.binary, (2, 0, 1))

        def written(rows: dict[Any, PendingRow]) -> list[tuple[Any, bytes]]:
            return [(key, b"".join(encode_rows([row], layout))) for key, row in rows.items()]

        return (
            list(fold.deletes),
            written(fold.updates),
            written(fold.inserts),
            written({key: row for key, (_, row) in fold.moves.items()}),
            fold.counts,
            fold.truncate,
        )


@pytest.mark.parametrize("table_type", [TableType.CLONE, TableType.APPEND])
@pytest.mark.parametrize("identity", ["d", "f"])
@pytest.mark.parametrize("binary", [False, True])
@given(data=st.data())
def test_folding_and_writing_give_the_same(
    binary: bool, identity: str, table_type: TableType, data: st.DataObject
) -> None:
    payloads = data.draw(st.lists(messages(binary, identity), max_size=12))
    plan = apply_plan(COLUMNS, ("a",), identity=identity, binary=binary, table_type=table_type)
    assert outcome(payloads, plan, module=compiled) == outcome(payloads, plan, module=None)


@pytest.mark.parametrize("binary", [False, True])
def test_compiled_code_folds_whole_old_rows_alone(binary: bool) -> None:
    """The fold leaves no message to pure Python, which costs three times as much."""
    first: list[encode.Cell] = [b"1", b"b", b"c"]
    second: list[encode.Cell] = [b"1", None, b"d"]
    payloads = [
        encode.insert(RELID, first, binary=binary),
        encode.update(RELID, second, old=first, binary=binary),
        encode.update(RELID, [b"2", encode.TOAST, b"z"], old=[b"2", b"y", b""], binary=binary),
        encode.update(RELID, [b"2", b"y", b""], old=[b"2", b"y", b"z"], binary=binary),
        encode.delete(RELID, old=second, binary=binary),
        encode.delete(RELID, old=[b"3", None, None], binary=binary),
    ]
    assert compiled is not None
    folder = compiled.RowFolder(
        3, (0,), binary=binary, is_append=False, is_full=True, takes_updates=True
    )
    inserts: dict[Any, bytes] = {}
    updates: dict[Any, bytes] = {}
    deletes: dict[Any, None] = {}
    assert folder.fold(payloads, 0, inserts, updates, deletes, {}, [0, 0, 0]) == len(payloads)
    assert (len(inserts), len(updates), len(deletes)) == (0, 1, 1)


@given(
    st.integers(0, 5),
    st.binary(max_size=60),
    st.booleans(),
)
@example(1, struct.pack(">cIcHcI", b"I", RELID, b"N", 1, b"t", 0xFFFFFFFF), False)
@example(1, struct.pack(">cIcHcI", b"I", RELID, b"N", 1, b"t", 0x7FFFFFFF), False)
@example(1, struct.pack(">cIcH", b"I", RELID, b"N", 0xFFFF), False)
def test_no_bytes_become_a_row_that_the_message_lacks(
    count: int, tail: bytes, binary: bool
) -> None:
    assert compiled is not None
    payload = tail if tail[:1] in (b"I", b"U", b"D") else b"I\0\0\0\1N" + tail
    folder = compiled.RowFolder(
        count,
        (0,) if count else (),
        binary=binary,
        is_append=False,
        is_full=False,
        takes_updates=True,
    )
    kept: dict[Any, bytes] = {}
    counts = [0, 0, 0]
    done = folder.fold([payload], 0, kept, {}, {}, {}, counts)
    null = NULL_BINARY if binary else NULL
    encoder = compiled.RowEncoder(count, tuple(range(count)), binary=binary, null=null)
    if done and kept:
        assert isinstance(encoder.encode(b"", list(kept.values())), bytes)
    elif not done:
        assert counts == [0, 0, 0]


def test_positions_outside_a_row_are_refused() -> None:
    assert compiled is not None
    for positions in ((3,), (-1,), (0, 7)):
        with pytest.raises(ValueError, match="outside the row"):
            compiled.RowEncoder(3, positions, binary=False, null=NULL)
    for count in (-1, 1665):
        with pytest.raises(ValueError, match="too many columns"):
            compiled.RowEncoder(count, (), binary=False, null=NULL)


def history(key: tuple[str, ...], *, binary: bool) -> VersionStatements:
    """Statements for a history table whose versions streamer numbers."""
    plan = apply_plan(COLUMNS, key, table_type=TableType.HISTORY, binary=binary)
    target = replace(plan.target, numbering={"kvsz_id": "public.s"})
    return VersionStatements(Statements(replace(plan, target=target)))


def chained(payloads: list[bytes], *, binary: bool, module: Any) -> Any:
    """The chains of the messages with COPY data for them, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        with_implementation(module, patch)
        statements = history(("a",), binary=binary)
        versions = Versions(statements.plan)
        layout = RowLayout(len(COLUMNS), binary, (2, 0, 1))
        try:
            for times in ([7, 9], [-8, -8]):
                stops = [len(payloads) // 2, len(payloads)]
                versions.add(list(payloads), times, stops)
        except (NotFoldable, ProtocolError, IdentityError) as exc:
            return type(exc), str(exc)
        chains = {
            key: [
                (*chain[n : n + 3], b"".join(encode_rows([chain[n + 3]], layout)))
                for n in range(0, len(chain), 4)
            ]
            for key, chain in versions.chains.items()
        }
        ordered = versions.in_order_of_keys()
        numbers = [100 * n for n in range(versions.change_count)]
        written = [
            statements.stage(ordered).chunks,
            statements.encode(ordered, {0: 9, 2: -(2**50)}, numbers),
            statements.encode(ordered, {}, range(2**40, 2**40 + len(numbers))),
        ]
        return chains, versions.counts, [b"".join(data) for data in written]


@pytest.mark.parametrize("binary", [False, True])
@given(data=st.data())
def test_compiled_chains_are_those_of_pure_python(binary: bool, data: st.DataObject) -> None:
    payloads = data.draw(st.lists(messages(binary), max_size=6))
    pure = chained(payloads, binary=binary, module=None)
    assert chained(payloads, binary=binary, module=compiled) == pure


@pytest.mark.parametrize("binary", [False, True])
def test_compiled_code_stages_keys_of_several_columns_like_pure_python(binary: bool) -> None:
    payload = encode.insert(RELID, [b"a\tb", b"\\N", b"c"], binary=binary)
    staged = []
    for module in (None, compiled):
        with pytest.MonkeyPatch.context() as patch:
            with_implementation(module, patch)
            statements = history(("a", "b"), binary=binary)
            versions = Versions(statements.plan)
            versions.add([payload], [7], [1])
            staged.append(b"".join(statements.stage(versions.in_order_of_keys()).chunks))
    assert staged[0] == staged[1]
    assert binary or staged[0].endswith(b"\ta\\tb\t\\\\N\n")
