"""Stages wide rows in several temporary tables, for exact order only.

A staged row holds the new values and, to find a row by all columns, the old values too. The row may
then have more columns than a table can have, or be larger than a page. So rows of more than
`PART_COLUMNS_MAX` values are spread over parts that always fit: `seq` and up to that many values.
The block that applies the rows reads all parts in parallel, by cursors.

A staged value is usually named `s.c_5`. In a part the name is `s.p1.c_5`, where ``s`` is the label
of the block and ``p1`` the record with the part's row. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Final

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.copydata import Copy
from streamer.apply.sql.computed_statements import ComputedStatements, statements_for
from streamer.apply.sql.history_versions import VersionStatements
from streamer.apply.sql.ordered_statements import Statements
from streamer.decode.tuples import Row

PART_COLUMNS_MAX: Final = 120
"""The number of values of 64 bytes that fit a page; PostgreSQL stores wider values out of line."""
CELLS_MAX: Final = 500_000
"""The number of values staged at a time: a bound for memory."""


def statements_in_order(plan: ApplyPlan) -> Statements:
    """Return the statements to apply changes of *plan* in exact order."""
    if plan.staged_count <= PART_COLUMNS_MAX:
        return statements_for(plan)
    return SplitComputedStatements(plan) if plan.has_expressions else SplitStatements(plan)


class PlanStatements:
    """The statements of a plan, with a cache of the texts."""

    def __init__(self, plan: ApplyPlan) -> None:
        self.plan = plan

    @cached_property
    def plain(self) -> Statements:
        """The statements for rows that need no expression."""
        return Statements(self.plan)

    @cached_property
    def sets(self) -> Statements:
        return statements_for(self.plan)

    @cached_property
    def versions(self) -> VersionStatements:
        """The statements that write the versions of a history table as sets."""
        return VersionStatements(self.plain)

    @cached_property
    def in_order(self) -> Statements:
        return statements_in_order(self.plan)


@dataclass(frozen=True, slots=True)
class Part:
    """A temporary table with some values of staged rows: the values from *start* up to, but not
    including, *stop*.
    """

    table: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    start: int
    stop: int

    @property
    def create(self) -> str:
        columns = ", ".join(f"{n} {t}" for n, t in zip(self.columns, self.types, strict=True))
        return f"create temporary table if not exists {self.table} ({columns})"

    def rows(self, staged: Sequence[Row]) -> Iterator[Row]:
        """Return this part's values of *staged* rows, each after ``seq``."""
        return ([row[0], *row[self.start : self.stop]] for row in staged)


@dataclass(frozen=True)
class SplitStatements(Statements):
    """The statements for a plan whose staged rows are spread over `parts`."""

    @property
    def stage(self) -> str:
        return f"streamer_stage_{self.plan.number}_p0"

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All temporary tables; the first contains the fields of a change besides values."""
        values = self.staged
        parts = [
            Part(
                self.stage,
                ("seq", "op", "mask", "at"),
                ("integer", "smallint", "text", "timestamptz"),
                1,
                4,
            )
        ]
        for start in range(0, len(values), PART_COLUMNS_MAX):
            columns = values[start : start + PART_COLUMNS_MAX]
            parts.append(
                Part(
                    f"streamer_stage_{self.plan.number}_p{len(parts)}",
                    ("seq", *(name for name, _ in columns)),
                    ("integer", *(kind for _, kind in columns)),
                    4 + start,
                    4 + start + len(columns),
                )
            )
        return tuple(parts)

    @cached_property
    def _part_of(self) -> dict[str, int]:
        return {
            name: number
            for number, part in enumerate(self.parts)
            for name in part.columns
            if name != "seq"
        }

    @property
    def _find_existing(self) -> str:
        """Return no text, because the parts of a staged row are out of scope after the loop."""
        return ""

    @property
    def rows_max(self) -> int:
        return max(1, CELLS_MAX // self.parts[-1].stop)

    def batches(self, rows: Iterable[Row]) -> Iterator[tuple[int, Iterable[Row]]]:
        rows, first = iter(rows), 0
        while batch := list(islice(rows, self.rows_max)):
            yield first, batch
            first += len(batch)

    def copies(self, rows: Iterable[Row], first: int = 0) -> Iterator[Copy]:
        staged = list(rows)
        for part in self.parts:
            yield self._copy(part.table, list(part.columns), part.rows(staged), first)

    def name(self, staged: str) -> str:
        return f"p{self._part_of[staged]}.{staged}"

    @cached_property
    def create_stage(self) -> str:
        return "; ".join(part.create for part in self.parts)

    @property
    def delete_stage(self) -> str:
        return "; ".join(f"delete from pg_temp.{part.table}" for part in self.parts)

    @property
    def truncate_stage(self) -> str:
        return "truncate " + self._all_tables

    @property
    def drop_stage(self) -> str:
        return "drop table if exists " + self._all_tables

    @property
    def _all_tables(self) -> str:
        return ", ".join(f"pg_temp.{part.table}" for part in self.parts)

    def _each_staged(self, change: str) -> str:
        parts = range(1, len(self.parts))
        cursors = "".join(
            f"p{n}_cursor cursor for select * from pg_temp.{self.parts[n].table} order by seq; "
            for n in parts
        )
        return f"""declare {cursors}
    begin
        {" ".join(f"open p{n}_cursor;" for n in parts)}
        <<streamer_changes>>
        for s in select * from pg_temp.{self.stage} order by seq loop
            <<s>>
            declare {" ".join(f"p{n} record;" for n in parts)}
            begin
                {" ".join(f"fetch p{n}_cursor into p{n};" for n in parts)}
                {change}
            end;
        end loop;
        {" ".join(f"close p{n}_cursor;" for n in parts)}
    end;"""


@dataclass(frozen=True)
class SplitComputedStatements(SplitStatements, ComputedStatements):
    """`SplitStatements` for a plan with expressions."""
