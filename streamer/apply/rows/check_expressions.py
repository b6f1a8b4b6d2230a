"""Checks a plan's expressions at the target before use."""

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.errors.error_classes import MappingError, Retry, StreamerError
from streamer.mapping.expressions import Expression, over_row
from streamer.postgres.quoting import quote_identifier
from streamer.target.connection import TargetConnection


async def confirm_expressions(
    connection: TargetConnection, plan: ApplyPlan, source_types: dict[str, str]
) -> None:
    """Raise MappingError for an expression of *plan* that the target rejects, or with a different
    type at the target than at the source.

    *source_types*: the types at the source, by target column. The server only parses: planning
    might evaluate constants.
    """
    mapping = plan.mapping
    if plan.filter is not None:
        row = _typed_row(plan, plan.filter)
        await _describe(connection, plan, "filter", f"select from {row} where ({plan.filter})")
    for column in plan.computed_columns:
        expression = column.expression
        assert expression is not None
        place = f"set {column.name}"
        target_type = await _describe(
            connection, plan, place, f"select ({expression}) from {_typed_row(plan, expression)}"
        )
        await _describe(
            connection,
            plan,
            place,
            f"select {over_row(expression.text, _typed(plan, expression), cast=column.cast)}",
        )
        source_type = source_types.get(column.name)
        if source_type is not None and target_type != source_type:
            raise MappingError(
                f'{place} of table "{mapping.source}" gives {source_type} at the source and '
                f"{target_type} at the target",
                hint=f"cast it: ({expression})::{target_type}",
            )


def _typed(plan: ApplyPlan, expression: Expression) -> list[tuple[str, str]]:
    return [(i.name, f"null::{i.type}") for i in plan.inputs if i.name in expression.names]


def _typed_row(plan: ApplyPlan, expression: Expression) -> str:
    listed = ", ".join(
        f"{value} as {quote_identifier(name)}" for name, value in _typed(plan, expression)
    )
    return f"(select {listed}) streamer_row" if listed else "(select) streamer_row"


async def _describe(connection: TargetConnection, plan: ApplyPlan, place: str, sql: str) -> str:
    try:
        return await connection.describe(sql)
    except StreamerError as exc:
        if exc.retry is Retry.TIMED:
            raise
        raise MappingError(
            f'{place} of table "{plan.mapping.source}" is refused by the target: '
            f"{exc.message.removeprefix('target: ')}",
            hint="correct the expression, or create its types and collations at the target",
        ) from exc
