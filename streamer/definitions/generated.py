"""Generated and identity columns, as the target has them. Pure."""

from collections.abc import Mapping
from typing import Final

from streamer.definitions.names import UnclearExpressionError, rename_columns, uses_column
from streamer.errors import TargetSchemaError
from streamer.mapping.names import RelationName

IDENTITIES: Final = {"a": "always", "d": "by default"}


def identity_of(identity: str, *, is_key: bool) -> str:
    """Return the identity of a target's column, as `IDENTITIES` has them.

    No UPDATE can write a column that is GENERATED ALWAYS. A changed key is deleted and inserted.
    """
    return identity if is_key else "d"


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
