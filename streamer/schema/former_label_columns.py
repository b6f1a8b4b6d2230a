"""The columns in which former labels of enums may still arrive. Pure.

See `streamer.decode.former_labels` for the reason.
"""

from collections.abc import Iterable, Mapping

from streamer.schema.indexes_constraints_types import DefinedType
from streamer.schema.source_definition import SourceDefinition

FormerColumns = Mapping[str, tuple[bool, Mapping[str, str]]]
"""For each column, whether its type is an array, and the present labels by former label."""


def follow_labels(
    stored: Mapping[str, Mapping[str, str]],
    renamed: Mapping[int, Mapping[str, str]],
    types: Iterable[DefinedType],
) -> dict[str, dict[str, str]]:
    """Return the former labels after some were *renamed*, by the OIDs of types.

    *stored*: the earlier former labels. *types*: the present types.
    """
    labels = {oid: dict(names) for oid, names in stored.items()}
    for oid, changes in renamed.items():
        names = labels.setdefault(str(oid), {})
        for former, now in names.items():
            names[former] = changes.get(now, now)
        names.update(changes)
    for kind in types:
        for _, label in kind.labels:
            labels.get(str(kind.oid), {}).pop(label, None)
    return {oid: names for oid, names in labels.items() if names}


def former_columns(
    definition: SourceDefinition, labels: Mapping[str, Mapping[str, str]]
) -> FormerColumns:
    """Return the columns of *definition* whose types have former labels."""
    by_type = {}
    for kind in definition.types or ():
        if names := labels.get(str(kind.oid)):
            by_type[kind.quoted] = (False, names)
            by_type[f"{kind.quoted}[]"] = (True, names)
    return {c.name: by_type[c.type] for c in definition.columns if c.type in by_type}
