"""Finds sources that would write the same rows of a target table, for rules, `check` and `run`.
Pure.

The column ``sid`` of a table distinguishes rows of several sources.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import RelationName

Clashes = Mapping[RelationName, MappingError]
"""New tables that cannot join, because they would write rows of another source."""
NO_CLASHES: Final[Clashes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Clash:
    """Sources, by their labels, that would write the same rows.

    ``sid``: the sid of these rows, if the table distinguishes sids.
    """

    labels: tuple[str, ...]
    message: str
    sid: str | None = None
    hint: str = (
        "give their urls different sids, or one of the tables another `target`. If no two "
        "of the tables contain the same key, write `keys: disjoint` for each"
    )


def new_table_error(table: RelationName, clash: Clash) -> MappingError:
    """Return why the new *table* cannot join the tables of its source. Pure."""
    return MappingError(f'new table "{table}" cannot join: {clash.message}', hint=clash.hint)


class TableWriter(NamedTuple):
    """A source that writes to a table: its label, and the sid of the rows there, if any."""

    label: str
    sid: str | None
    is_disjoint: bool = False
    """Only keys distinguish this writer's rows from the rows of its peers."""


def find_clashes(
    target: RelationName, writers: Iterable[TableWriter], *, lacks_sid: bool = False
) -> Iterator[Clash]:
    """Yield the sources that would write the same rows of *target*. Pure.

    *lacks_sid*: the table exists, and has no column for a sid.
    """
    by_sid: dict[str | None, list[TableWriter]] = defaultdict(list)
    for writer in writers:
        by_sid[None if lacks_sid else writer.sid].append(writer)
    reason = ", because it has no column sid" if lacks_sid else ""
    for sid, several in by_sid.items():
        labels = {writer.label for writer in several}
        if len(labels) > 1 and not all(writer.is_disjoint for writer in several):
            listed = tuple(sorted(labels))
            yield Clash(
                listed,
                f"several sources would write the same rows of target table {target}: "
                f"{' and '.join(listed)}{reason}",
                sid,
            )
