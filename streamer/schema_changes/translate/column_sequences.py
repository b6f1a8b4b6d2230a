"""The sequence of a target column follows the sequence of the source column. Pure.

The target's sequence keeps its value. So streamer alters the sequence in place when its column,
type or name changes. A new sequence is planned (`streamer.schema.render_definitions`).
"""

from dataclasses import replace

from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.schema.render_definitions import other_name
from streamer.schema.source_definition import DefinedColumn, DefinedSequence
from streamer.schema_changes.translate.generated_columns import GeneratedFacts


def find_sequence(
    table: RelationName, name: str, new: DefinedSequence | None, facts: GeneratedFacts
) -> DefinedSequence | None:
    """Return the target's sequence for column *name*, whose source column has the sequence *new*.
    The sequence may still belong to a different column of the target.
    """
    if new is None:
        return None
    names = (new.name, other_name(new.name, table))
    present = facts.sequences.get(name)
    if present is not None and present.name in names:
        return present
    namesakes = (sequence for sequence in facts.sequences.values() if sequence.name in names)
    return next(namesakes, present if present is not None and present.is_owned else None)


def follow_sequence(
    table: RelationName,
    name: str,
    old: DefinedColumn,
    column: DefinedColumn,
    facts: GeneratedFacts,
) -> list[str]:
    """Return the statements that adapt the sequence of target column *name* to source *column*."""
    new, former = column.sequence, old.sequence
    present = find_sequence(table, name, new, facts)
    if new is None or present is None or new == former:
        return []
    if bool(column.identity) != (name in facts.identities):
        return []
    quoted = present.quoted
    statements = []
    options, kind = new.options, new.type
    if (present.type, present.options) != (kind, options):
        cycle = "" if options.endswith(" cycle") else " no cycle"
        statements.append(f"alter sequence {quoted} as {kind} {options}{cycle}")
    owns = present.is_owned and facts.sequences.get(name) == present
    if new.is_owned != owns and not column.identity:
        owner = f"{quote_qualified(table.namespace, table.name)}.{quote_identifier(name)}"
        end = owner if new.is_owned else "none"
        statements.append(f"alter sequence {quoted} owned by {end}")
    if present.name not in (new.name, other_name(new.name, table)):
        statements.append(f"alter sequence {quoted} rename to {quote_identifier(new.name)}")
    return statements


def lost_sequence(
    table: RelationName,
    name: str,
    old: DefinedColumn,
    column: DefinedColumn,
    facts: GeneratedFacts,
) -> DefinedSequence | None:
    """Return the sequence that target column *name* owns and that the source column has lost."""
    former, present = old.sequence, facts.sequences.get(name)
    is_serial = former is not None and former.is_owned and not old.identity
    is_gone = column.sequence is None or bool(column.identity)
    if not is_serial or not is_gone or present is None or not present.is_owned:
        return None
    return present if find_sequence(table, name, former, facts) == present else None


def with_sequence(
    name: str, present: DefinedSequence, column: DefinedColumn, facts: GeneratedFacts
) -> GeneratedFacts:
    """Return *facts* after `follow_sequence`, in which the sequence has a single owner."""
    is_owned = column.sequence is not None and column.sequence.is_owned
    changed = {
        column_name: replace(sequence, is_owned=False)
        if is_owned and sequence.quoted == present.quoted
        else sequence
        for column_name, sequence in facts.sequences.items()
    }
    return replace(facts, sequences={**changed, name: replace(present, is_owned=is_owned)})
