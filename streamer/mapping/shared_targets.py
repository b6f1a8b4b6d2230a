"""Finds sources that would write the same rows of a target table, for rules, `check` and `run`.
Pure.

The column ``sid`` of a table distinguishes rows of several sources.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streamer.mapping.relation_names import RelationName


@dataclass(frozen=True, slots=True)
class Clash:
    """Sources, by their labels, that would write the same rows."""

    labels: tuple[str, ...]
    message: str
    hint: str = "give their urls different sids, or one of the tables another `target`"


def find_clashes(
    target: RelationName, writers: Iterable[tuple[str, str | None]], *, lacks_sid: bool = False
) -> Iterator[Clash]:
    """Yield the sources that would write the same rows of *target*. Pure.

    *writers*: the label of each source, with the sid that the source writes there, if any.
    *lacks_sid*: the table exists, and has no column for a sid.
    """
    by_sid: dict[str | None, set[str]] = defaultdict(set)
    for label, sid in writers:
        by_sid[None if lacks_sid else sid].add(label)
    reason = ", because it has no column sid" if lacks_sid else ""
    for labels in by_sid.values():
        if len(labels) > 1:
            listed = tuple(sorted(labels))
            yield Clash(
                listed,
                f"several sources would write the same rows of target table {target}: "
                f"{' and '.join(listed)}{reason}",
            )
