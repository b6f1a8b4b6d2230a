"""The former names of labels of enums: which columns may still bring them. Pure.

See `streamer.decode.former_labels` for the reason why they come.
"""

from collections.abc import Iterable, Mapping

from streamer.mapping.definition import SourceDefinition
from streamer.mapping.objects import DefinedType

FormerColumns = Mapping[str, tuple[bool, Mapping[str, str]]]
"""By column: whether it is an array, and the present names of labels by their former ones."""


def follow_labels(
    known: Mapping[str, Mapping[str, str]],
    renamed: Mapping[int, Mapping[str, str]],
    types: Iterable[DefinedType],
) -> dict[str, dict[str, str]]:
    """Return the former labels after some were *renamed*, by the OIDs of their types.

    *known*: those before. *types*: as they are now.
    """
    labels = {oid: dict(its) for oid, its in known.items()}
    for oid, changes in renamed.items():
        its = labels.setdefault(str(oid), {})
        for former, now in its.items():
            its[former] = changes.get(now, now)
        its.update(changes)
    for each in types:
        for _, label in each.labels:
            labels.get(str(each.oid), {}).pop(label, None)
    return {oid: its for oid, its in labels.items() if its}


def former_columns(
    definition: SourceDefinition, labels: Mapping[str, Mapping[str, str]]
) -> FormerColumns:
    """Return the columns of *definition* with the former labels of their types."""
    by_type = {}
    for each in definition.types or ():
        if its := labels.get(str(each.oid)):
            by_type[each.quoted] = (False, its)
            by_type[f"{each.quoted}[]"] = (True, its)
    return {c.name: by_type[c.type] for c in definition.columns if c.type in by_type}
