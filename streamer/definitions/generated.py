"""Expressions of generated columns, over the columns of the target. Pure."""

from collections.abc import Mapping

from streamer.definitions.names import UnclearExpressionError, rename_columns, uses_column
from streamer.errors import TargetSchemaError
from streamer.mapping.rules import RelationName


def generation_expression(
    text: str,
    column: str,
    names: Mapping[str, str | None],
    *,
    source: RelationName,
    target: RelationName,
) -> str:
    """Return *text*, the expression of a generated *column* of table *source*, for its target.

    *names*: the target's names of all columns of the source; None for one that the target does not
    get. Raises TargetSchemaError if the expression uses such a column.
    """
    named = f'column "{column}" of source table "{source}" is generated'
    hint = f'exclude "{column}", or create it in target table "{target}" yourself'
    try:
        for each, there in names.items():
            if there is None and uses_column(text, each):
                raise TargetSchemaError(
                    f'{named} from "{each}", which target table "{target}" does not get', hint=hint
                )
        return rename_columns(text, {each: name for each, name in names.items() if name})
    except UnclearExpressionError as exc:
        raise TargetSchemaError(
            f"{named}, and its expression is unclear: {exc}", hint=hint
        ) from None
