"""SQL text and COPY data that write the versions of a history table as sets.

The staging table has a row for each key of a window, with ``op`` and ``at`` of the key's first
change. ``mask`` is set if the statement must read the end of an earlier version. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.copydata import (
    CHUNK_ROWS,
    Copy,
    RowLayout,
    commit_time_value,
    constant,
    encode_led_rows,
    escape_if_needed,
)
from streamer.apply.rows.fold import NotFoldable
from streamer.apply.rows.history_chains import (
    BEGIN_TIME,
    OPEN_TIME,
    Chain,
    Versions,
    is_reinserted,
    new_versions,
)
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.set_statements import OP_DELETE, OP_INSERT, OP_UPDATE
from streamer.compiled import choice
from streamer.decode.pgoutput import DELETE, INSERT, UPDATE, from_datetime
from streamer.decode.tuples import PendingRow
from streamer.mapping.sid_and_history_columns import (
    HISTORY_BEGIN,
    HISTORY_OPEN,
)
from streamer.postgres.quoting import quote_literal

Chains = list[tuple[Any, Chain]]
"""Keys and chains; the number of a chain is the position in the list."""
_OPS: Final = {INSERT: OP_INSERT, UPDATE: OP_UPDATE, DELETE: OP_DELETE}


@dataclass(frozen=True)
class VersionStatements:
    """The statements for the versions of a plan. *statements* serve the plan's plain rows."""

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

        The first row counts the ended versions (``seq``), their keys, and keys of several staged
        rows (``same``). Then comes a row for each staged key whose earlier versions matter:
        ``seq``, and the end of the last version. ``is_open`` marks an end that is open or out of
        range, which sets do not expect.
        """
        plan, statements, stage = self.plan, self.statements, self.statements.stage
        (_, end, deleted), (start, t_end, _) = plan.history.quoted(), plan.history.quoted("t")
        same_key = self.statements.matches_new_key
        doubles = "0"
        if not all(column.target.equality_is_bytewise for column in plan.key):
            keys = ", ".join(self.statements.value(column) for column in plan.key)
            grouped = f"select from pg_temp.{stage} s group by {keys} having count(*) > 1"
            doubles = f"(select count(*) from ({grouped}) d)"
        numbers, taken_numbers, untaken = "", "", ""
        if plan.history_sequence is not None:
            # If no other session draws numbers meanwhile, the numbers are consecutive.
            numbers = f"""
, numbers as (
    select min(n) as first,
           case when max(n) - min(n) + 1 <> count(*) then array_agg(n) end as numbers
    from (select nextval({quote_literal(plan.history_sequence)}) as n
          from generate_series(1, $1::int4)) g)"""
            taken_numbers = (
                ", (select first from numbers) as first, (select numbers from numbers) as numbers"
            )
            untaken = ", null, null"
        return f"""
with closed as (
    update {statements.rows} t set {end} = s.at, {deleted} = s.op = {OP_DELETE}
    from pg_temp.{stage} s where s.op <> {OP_INSERT} and {same_key}
    and {t_end} = {HISTORY_OPEN} and {start} <= s.at returning s.seq){numbers}
select count(*) as seq, count(distinct seq) as keys, {doubles} as same,
       null::timestamptz as last_end, false as is_open{taken_numbers} from closed
union all
select s.seq, 0, 0, max({t_end}) filter (where {t_end} < {HISTORY_OPEN}),
       bool_or(case when s.op = {OP_INSERT} then {t_end} >= {HISTORY_OPEN}
               else {t_end} > {HISTORY_OPEN} end or {t_end} < {HISTORY_BEGIN}){untaken}
from pg_temp.{stage} s join {statements.rows} t on {same_key}
where s.mask is not null group by s.seq"""

    def insert_versions(
        self, versions: Versions, chains: Chains, answer: Sequence[Mapping[str, Any]]
    ) -> Copy:
        """Insert the versions that begin with *chains*, if the *answer* of `close` is as expected.

        Raises NotFoldable.
        """
        closed, *earlier = answer
        inserts = [chain[1] for chain in versions.chains.values()].count(INSERT)
        expected = len(chains) - inserts
        if (closed["seq"], closed["keys"], closed["same"]) != (expected, expected, 0):
            raise NotFoldable
        if any(row["is_open"] for row in earlier):
            raise NotFoldable
        ends = {
            row["seq"]: from_datetime(row["last_end"])
            for row in earlier
            if row["last_end"] is not None
        }
        numbers: Sequence[int] | None = None
        if self.plan.history_sequence is not None:
            first = closed["first"]
            numbers = closed["numbers"] or range(first, first + versions.change_count)
        name, chunks = self.plan.target.name, self.encode(chains, ends, numbers)
        return Copy(name.name, self.columns, chunks, self.plan.binary, name.namespace)

    def stage(self, chains: Chains) -> Copy:
        """Stage a row for each of *chains*, with the number of the chain as ``seq``."""
        columns, binary = self.staged_columns, self.plan.binary
        times = _Times(binary)
        chunks = encode_led_rows(
            (
                (self._lead_chains(chains, start, stop, times), [[]] * (stop - start))
                for start, stop in _chunks(chains)
            ),
            RowLayout(0, binary, lead_count=len(columns)),
        )
        return Copy(self.statements.stage, columns, chunks, binary)

    def _lead_chains(self, chains: Chains, start: int, stop: int, times: "_Times") -> list[bytes]:
        binary, compiled = self.plan.binary, choice.compiled
        if compiled is not None:
            leads: list[bytes] = compiled.lead_chains(
                chains, start, stop, self._heads, times, binary=binary
            )
            return leads
        made = []
        for n, (key, chain) in enumerate(chains[start:stop], start):
            matters = chain[1] == INSERT or is_reinserted(chain)
            head = _integer(n, 4, binary) + self._heads[chain[1]][matters] + times[chain[0]]
            values = (key,) if isinstance(key, bytes) else key
            if binary:
                made.append(head + b"".join(values))
            else:
                made.append(head + b"\t".join(map(escape_if_needed, values)))
        return made

    @cached_property
    def _heads(self) -> dict[int, tuple[bytes, bytes]]:
        """``op`` and ``mask`` of a staged row, by the kind of the first change. The second item
        serves chains for which the ends of earlier versions matter.
        """
        binary = self.plan.binary
        suffix = b"" if binary else b"\t"
        masks = [bytes(constant(mask, binary=binary)) + suffix for mask in (None, "e")]
        ops = {
            kind: bytes(constant(op, binary=binary, int_size=2)) + suffix
            for kind, op in _OPS.items()
        }
        return {kind: (op + masks[0], op + masks[1]) for kind, op in ops.items()}

    @cached_property
    def columns(self) -> list[str]:
        """The columns of new versions."""
        names = self.statements.insert_columns
        sid = len(names) - len(self.plan.columns)
        numbered = [self.plan.history.id] if self.plan.history_sequence is not None else []
        return [*names[:sid], *numbered, *self.plan.history.names, *names[sid:]]

    def encode(
        self, chains: Chains, ends: dict[int, int], numbers: Sequence[int] | None
    ) -> Iterator[bytes]:
        """Yield COPY data for the versions that begin with *chains*.

        *ends*: the end of the last earlier version of a key, by the number of the chain.
        *numbers*: the number of a version for each change, for rows in the order of keys. Without
        numbers the rows come in the order of changes, and the target's numbers follow this order.
        """
        plan, binary = self.plan, self.plan.binary
        sid = () if plan.sid is None else (constant(plan.sid, binary=binary),)
        lead_count = len(self.columns) - len(sid) - len(plan.columns)
        layout = RowLayout(len(plan.relation.columns), binary, plan.positions, sid, lead_count)
        if numbers is None:
            return encode_led_rows(self._in_order_of_changes(chains, ends), layout)
        return encode_led_rows(self._in_order_of_keys(chains, ends, numbers), layout)

    def _in_order_of_changes(
        self, chains: Chains, ends: dict[int, int]
    ) -> Iterator[tuple[list[bytes], list[PendingRow]]]:
        times, ended = _Times(self.plan.binary), self._ended
        versions = sorted(
            version
            for n, (_, chain) in enumerate(chains)
            for version in new_versions(chain, ends.get(n))
        )
        for start, stop in _chunks(versions):
            batch = versions[start:stop]
            yield (
                [times[since] + times[until] + ended[end] for _, _, since, until, end in batch],
                [row for _, row, *_ in batch],
            )

    def _in_order_of_keys(
        self, chains: Chains, ends: dict[int, int], numbers: Sequence[int]
    ) -> Iterator[tuple[list[bytes], list[PendingRow]]]:
        binary, compiled, ended = self.plan.binary, choice.compiled, self._ended
        times = _Times(binary)
        for start, stop in _chunks(chains):
            if compiled is not None:
                yield compiled.lead_versions(
                    chains,
                    start,
                    stop,
                    ends,
                    numbers,
                    times,
                    ended,
                    BEGIN_TIME,
                    OPEN_TIME,
                    binary=binary,
                )
                continue
            versions = [
                version
                for n in range(start, stop)
                for version in new_versions(chains[n][1], ends.get(n))
            ]
            leads = [
                _integer(numbers[n], 8, binary) + times[since] + times[until] + ended[end]
                for n, _, since, until, end in versions
            ]
            yield leads, [row for _, row, *_ in versions]

    @cached_property
    def _ended(self) -> tuple[bytes, bytes]:
        return (b"\0\0\0\1\0", b"\0\0\0\1\1") if self.plan.binary else (b"f\t", b"t\t")


def _chunks(items: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of chunks of *items*."""
    for start in range(0, len(items), CHUNK_ROWS):
        yield start, min(start + CHUNK_ROWS, len(items))


class _Times(dict[int, bytes]):
    """A cache of times as COPY data: all changes of a transaction share a time."""

    def __init__(self, binary: bool) -> None:
        super().__init__()
        self._binary, self._suffix = binary, b"" if binary else b"\t"

    def __missing__(self, moment: int) -> bytes:
        item = self[moment] = bytes(commit_time_value(moment, self._binary)) + self._suffix
        return item


def _integer(value: int, size: int, binary: bool) -> bytes:
    """Return an integer of *size* bytes as COPY data; in text a tab follows."""
    if binary:
        return bytes(constant(value, binary=True, int_size=size))
    return b"%d\t" % value
