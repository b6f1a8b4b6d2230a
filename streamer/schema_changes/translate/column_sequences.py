"""The sequence of a target's column, which follows that of the source's column. Pure.

The target's sequence keeps its value. So streamer alters in place a sequence that moves to a second
column, or gets a new type or name. A new sequence is planned
(`streamer.schema.render_definitions`).
"""

from dataclasses import replace

from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.schema.render_definitions import other_name
from streamer.schema.source_definition import DefinedColumn, DefinedSequence
from streamer.schema_changes.translate.generated_columns import GeneratedFacts


def find_sequence(
    table: RelationName, name: str, wanted: DefinedSequence | None, facts: GeneratedFacts
) -> DefinedSequence | None:
    """Return the sequence that column *name* of the target has, or is to get from a second column,
    where the source's column has *wanted*.
    """
    if wanted is None:
        return None
    names = (wanted.name, other_name(wanted.name, table))
    own = facts.sequences.get(name)
    if own is not None and own.name in names:
        return own
    others = (each for each in facts.sequences.values() if each.name in names)
    return next(others, own if own is not None and own.is_owned else None)


def follow_sequence(
    table: RelationName,
    name: str,
    before: DefinedColumn,
    column: DefinedColumn,
    facts: GeneratedFacts,
) -> list[str]:
    """Return the statements that make the sequence of column *name* of the target that of *column*,
    as far as the target has one.
    """
    wanted, former = column.sequence, before.sequence
    there = find_sequence(table, name, wanted, facts)
    if wanted is None or there is None or wanted == former:
        return []
    if bool(column.identity) != (name in facts.identities):
        return []
    its = there.quoted
    statements = []
    options, kind = wanted.options, wanted.type
    if (there.type, there.options) != (kind, options):
        cycle = "" if options.endswith(" cycle") else " no cycle"
        statements.append(f"alter sequence {its} as {kind} {options}{cycle}")
    owns = there.is_owned and facts.sequences.get(name) == there
    if wanted.is_owned != owns and not column.identity:
        owner = f"{quote_qualified(table.namespace, table.name)}.{quote_identifier(name)}"
        end = owner if wanted.is_owned else "none"
        statements.append(f"alter sequence {its} owned by {end}")
    if there.name not in (wanted.name, other_name(wanted.name, table)):
        statements.append(f"alter sequence {its} rename to {quote_identifier(wanted.name)}")
    return statements


def lost_sequence(
    table: RelationName,
    name: str,
    before: DefinedColumn,
    column: DefinedColumn,
    facts: GeneratedFacts,
) -> DefinedSequence | None:
    """Return the sequence that column *name* of the target owns, and the source's no longer."""
    former, own = before.sequence, facts.sequences.get(name)
    is_serial = former is not None and former.is_owned and not before.identity
    is_gone = column.sequence is None or bool(column.identity)
    if not is_serial or not is_gone or own is None or not own.is_owned:
        return None
    return own if find_sequence(table, name, former, facts) == own else None


def with_sequence(
    name: str, there: DefinedSequence, column: DefinedColumn, facts: GeneratedFacts
) -> GeneratedFacts:
    """Return *facts* after `follow_sequence`: a sequence has one owner."""
    is_owned = column.sequence is not None and column.sequence.is_owned
    others = {
        each: replace(sequence, is_owned=False)
        if is_owned and sequence.quoted == there.quoted
        else sequence
        for each, sequence in facts.sequences.items()
    }
    return replace(facts, sequences={**others, name: replace(there, is_owned=is_owned)})
