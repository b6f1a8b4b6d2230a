"""SQL by which the server refuses a plan after a change of the target's definition.

A plan stores facts about the target, and the staging table uses the target's types. If an operator
alters a column later, staging would round values to the former type. If an operator drops an index,
a key may match several rows. A trigger added later would see only some of the changes. Pure.
"""

from dataclasses import dataclass
from functools import cached_property

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.mapping.rule_options import TableType
from streamer.postgres.quoting import do_block, quote_literal
from streamer.schema.target_relation import TargetColumn


@dataclass(frozen=True)
class PlannedFacts:
    """Statements about the table that *plan* writes. ``name``: the name of a prepared statement."""

    plan: ApplyPlan
    name: str

    @cached_property
    def _columns(self) -> list[TargetColumn]:
        columns = [column.target for column in self.plan.columns]
        if self.plan.type is TableType.HISTORY:
            columns += [self.plan.target.columns[name] for name in self.plan.history.names]
            if self.plan.history_sequence is not None:
                columns.append(self.plan.target.columns[self.plan.history.id])
        return columns

    @cached_property
    def prepare(self) -> str:
        """SQL that prepares the statement of the facts in a session, and executes `lock_sql`."""
        target = self.plan.target
        names = ", ".join(quote_literal(column.name) for column in self._columns)
        types = ", ".join(quote_literal(column.type_facts) for column in self._columns)
        query = (
            f"prepare {self.name} as select from {target.rows} where streamer.fits_plan("
            f"{quote_literal(self.plan.table)}, {quote_literal(target.facts)}, "
            f"array[{names}]::text[], array[{types}]::text[])"
        )
        name = quote_literal(self.name)
        return do_block(f"""
begin
    if not exists (select from pg_catalog.pg_prepared_statements where name = {name}) then
        execute {quote_literal(query)};
    end if;
    execute {quote_literal(self.lock_sql)};
end""")

    @property
    def lock_sql(self) -> str:
        """SQL that locks the facts until the transaction ends, or fails if the facts have changed.

        EXECUTE locks the table. After a change of the definition, the server plans the statement
        again. Planning calls the function, which fails if the facts have changed. Without a change,
        EXECUTE costs a tenth of a catalog query.
        """
        return f"execute {self.name}"

    @property
    def deallocate(self) -> str:
        return f"deallocate {self.name}"
