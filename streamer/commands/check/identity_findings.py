"""Replica identities that prevent updates and deletes, and the statements that give better ones.

Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from streamer.commands.check.findings import (
    Finding,
    Fix,
    Place,
    at_source,
    from_error,
    in_words,
    warning,
)
from streamer.errors.command_lines import some_of
from streamer.errors.error_classes import IdentityLostError
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.report.problems import Severity
from streamer.source.catalog import SourceRelation
from streamer.source.identity_advice import (
    Candidates,
    IdentityAdvice,
    advise_identity,
    advise_key,
)
from streamer.source.slot_and_publications.publication import unlogged_error


@dataclass(frozen=True, slots=True)
class TableMembership:
    """How the publications hold a table without a usable identity."""

    moves: Sequence[str] = ()
    """The statements that publish updates once the table has an identity, if streamer lacks the
    privilege. Run these statements last: the source refuses updates of a published table without
    an identity.
    """
    refusal: IdentityLostError | None = None
    """The error of the application's updates, while a publication has the table."""
    is_stuck: bool = False
    """streamer may not remove the table from that publication."""
    is_reported: bool = False
    """Another finding reports that the table lost its identity."""


def check_identity(
    place: Place,
    mapping: RelationMapping,
    relation: SourceRelation,
    candidates: Candidates,
    membership: TableMembership,
) -> Iterable[Finding]:
    """Whether the source publishes updates and deletes of a table and of all its partitions."""
    if (unlogged := unlogged_error(relation.identity)) is not None:
        yield from_error(place, unlogged)
    if foreign := relation.identity.foreign:
        problem = (
            "has partitions that are foreign tables, whose changes are not in the WAL: "
            f"{some_of(foreign)}"
        )
        words = "detach them, and map the tables of their own servers as tables of another source"
        yield warning(place, problem, in_words(words))
    if relation.has_usable_identity or membership.is_reported:
        return
    fix = _fix(advise_identity(relation.identity, candidates), membership.moves)
    if membership.refusal is not None:
        finding = replace(from_error(place, membership.refusal), fix=fix)
        yield finding if membership.is_stuck else replace(finding, severity=Severity.WARNING)
        return
    lost = "updates" if mapping.type is TableType.APPEND else "updates and deletes"
    yield warning(place, f"{relation.identity.obstacle}, so {lost} are not replicated", fix)


def key_fix(relation: SourceRelation, candidates: Candidates) -> Fix:
    """Return the fix that gives a table a key in place of whole rows."""
    if (advice := advise_key(relation.identity, candidates)) is not None:
        return _fix(advice)
    return in_words(
        "add a primary key at the source; for a clone without `filter`, a unique index on NOT NULL "
        "columns of the target is enough"
    )


def _fix(advice: IdentityAdvice, moves: Sequence[str] = ()) -> Fix:
    statements = advice.statements
    if not statements:
        return in_words(advice.words or "")
    further = moves if advice.is_complete else ()
    return at_source(*statements, *further, words=advice.words)
