"""Whether sequences of the target will follow the sequences of a source. Pure."""

from collections.abc import Iterable

from streamer.commands.check.findings import (
    Finding,
    Place,
    at_source,
    at_target,
    in_words,
    info,
    quote_relation,
    warning,
)
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.errors.command_lines import some_of
from streamer.mapping.sequence_places import value_ahead
from streamer.source.tables.source_sequences import create_sql


def check_sequences(facts: SourceFacts, target: TargetFacts | None) -> Iterable[Finding]:
    """Name the sequences whose values streamer does not copy, with the reason."""
    if not facts.source.sequences:
        mapped = {mapping.source for mapping in facts.mappings}
        owned = [str(s.name) for s in facts.sequences if s.owner and s.owner[0] in mapped]
        if owned:
            yield info(
                Place(facts.label),
                "sequences are not replicated; at the target they keep their values: "
                f"{some_of(owned)}",
                in_words(
                    "set `sequences: true`, or set them at the target before other programs "
                    "write to these tables"
                ),
            )
        return
    for sequence in facts.sequences:
        place = Place(facts.label, str(sequence.name))
        home = facts.sequence_places.get(sequence.name)
        if home is None or target is None:
            continue
        if sequence.grants:
            yield warning(place, "the role may not read this sequence", at_source(*sequence.grants))
        counterpart = target.sequences.get((facts.label, sequence.name))
        if counterpart is None:
            if home.column is None:
                yield warning(
                    place,
                    f"the target has no sequence {quote_relation(home.name)}, so no values are "
                    "copied",
                    at_target(create_sql(sequence, home.name)),
                )
            elif home.name in target.tables:
                yield info(
                    place,
                    f"the target has no sequence for column {home}, so no values are copied",
                    in_words("make that column an identity column if programs will insert there"),
                )
        elif counterpart.grants:
            problem = f'the role may not set the target\'s sequence "{counterpart.name}"'
            yield warning(place, problem, at_target(*counterpart.grants))
        elif counterpart.range is not None and sequence.last_value is not None:
            try:
                value_ahead(sequence.last_value, sequence.increment, 0, counterpart.range)
            except ValueError as exc:
                yield warning(
                    place,
                    f'the target\'s sequence "{counterpart.name}" cannot follow: {exc}',
                    in_words("give it the source's type, increment and limits: ALTER SEQUENCE"),
                )
