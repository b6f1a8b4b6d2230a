"""SQL text and COPY data that write the versions of a history table as sets.

The staging table has a row for each key of a window. ``op`` and ``at`` are those of its first
change. ``mask`` is set if the ends of earlier versions matter. Pure.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

from streamer.apply.plan import ApplyPlan
from streamer.apply.sql.copydata import RowLayout, commit_time_value, constant, encode_led_rows
from streamer.apply.sql.statements import OP_DELETE, OP_INSERT, OP_UPDATE, Statements
from streamer.apply.versions import Chain, Version, comes_again
from streamer.decode.pgoutput import DELETE, INSERT, UPDATE
from streamer.decode.tuples import Row, Value
from streamer.target.conventions import HISTORY_BEGIN, HISTORY_COLUMNS, HISTORY_OPEN

_BYTES_TELL: Final = frozenset({16, 20, 21, 23, 26, 1082, 1114, 1184, 2950})
"""OIDs of types of which two values are equal only if their bytes are: bool, int8, int2, int4, oid,
date, timestamp, timestamptz and uuid. A numeric is not among them: 1.0 equals 1.00.
"""
_pack_sized: Final = struct.Struct(">ii").pack
_OPS: Final = {INSERT: OP_INSERT, UPDATE: OP_UPDATE, DELETE: OP_DELETE}


@dataclass(frozen=True)
class VersionStatements:
    """The statements for the versions of one plan; *statements* are those for its plain rows."""

    statements: Statements

    @property
    def plan(self) -> ApplyPlan:
        return self.statements.plan

    @cached_property
    def staged_columns(self) -> list[str]:
        keys = [self.statements.new(column) for column in self.plan.key]
        return ["seq", "op", "mask", "at", *keys]

    @cached_property
    def close(self) -> str:
        """End the open versions of staged keys.

        The first row has the number of ended versions (``seq``), of their keys, and of staged keys
        that equal another (``same``). A row follows for each staged key with earlier versions that
        matter: its ``seq``, and where the last of them ended. ``is_open`` marks an end that sets do
        not expect, because it is open or out of range.
        """
        plan, stage = self.plan, self.statements.stage
        same = self.statements.matches_new_key
        doubles = "0"
        if any(column.target.base_oid not in _BYTES_TELL for column in plan.key):
            keys = ", ".join(self.statements.value(column) for column in plan.key)
            grouped = f"select from pg_temp.{stage} s group by {keys} having count(*) > 1"
            doubles = f"(select count(*) from ({grouped}) d)"
        return f"""
with closed as (
    update {plan.table} t set kvsz_end = s.at, kvsz_deleted = s.op = {OP_DELETE}
    from pg_temp.{stage} s where s.op <> {OP_INSERT} and {same}
    and t.kvsz_end = {HISTORY_OPEN} and t.kvsz_start <= s.at returning s.seq)
select count(*) as seq, count(distinct seq) as keys, {doubles} as same,
       null::timestamptz as last_end, false as is_open from closed
union all
select s.seq, 0, 0, max(t.kvsz_end) filter (where t.kvsz_end < {HISTORY_OPEN}),
       bool_or(case when s.op = {OP_INSERT} then t.kvsz_end >= {HISTORY_OPEN}
               else t.kvsz_end > {HISTORY_OPEN} end or t.kvsz_end < {HISTORY_BEGIN})
from pg_temp.{stage} s join {plan.table} t on {same} where s.mask is not null group by s.seq"""

    def staged_rows(self, chains: Iterable[tuple[Any, Chain]]) -> Iterator[Row]:
        """Yield the rows to stage; their ``seq`` is the number of the chain."""
        binary = self.plan.binary
        null = constant(None, binary=binary)
        flag = constant("e", binary=binary)
        ops = {kind: constant(op, binary=binary, int_size=2) for kind, op in _OPS.items()}
        is_single = len(self.plan.key) == 1
        time, number = _Times(binary), _integer(binary)
        for n, (key, chain) in enumerate(chains):
            kind = chain[1]
            matters = kind == INSERT or comes_again(chain)
            start = [number(n), ops[kind], flag if matters else null, time[chain[0]]]
            yield [*start, key] if is_single else [*start, *key]

    @cached_property
    def columns(self) -> list[str]:
        """The columns of new versions."""
        names = self.statements.insert_columns
        sid = len(names) - len(self.plan.columns)
        return [*names[:sid], *HISTORY_COLUMNS, *names[sid:]]

    def encode(self, versions: Iterable[Version]) -> Iterator[bytes]:
        """Yield COPY data for new versions."""
        plan, binary = self.plan, self.plan.binary
        sid = () if plan.sid is None else (constant(plan.sid, binary=binary),)
        layout = RowLayout(
            len(plan.relation.columns), binary, plan.positions, sid, len(HISTORY_COLUMNS)
        )
        time = _Times(binary, b"" if binary else b"\t")
        ended = [_boolean(False, binary), _boolean(True, binary)]
        rows = (
            (time[since] + time[until] + ended[is_deleted], row)
            for _, row, since, until, is_deleted in versions
        )
        return encode_led_rows(rows, layout)


class _Times(dict[int, bytes]):
    """Times as items of a row, each made once: a transaction has one for all of its changes."""

    def __init__(self, binary: bool, behind: bytes = b"") -> None:
        super().__init__()
        self._binary, self._behind = binary, behind

    def __missing__(self, moment: int) -> bytes:
        item = self[moment] = bytes(commit_time_value(moment, self._binary)) + self._behind
        return item


def _integer(binary: bool) -> Callable[[int], Value]:
    """Return a function that turns an int4 into an item of a row."""
    return partial(_pack_sized, 4) if binary else (lambda value: b"%d" % value)


def _boolean(value: bool, binary: bool) -> bytes:
    if binary:
        return b"\0\0\0\1" + bytes([value])
    return b"t\t" if value else b"f\t"
