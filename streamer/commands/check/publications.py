"""Problems of a source's publications, judged as `run` judges them. Pure."""

from collections.abc import Iterable

from streamer.commands.check.findings import (
    Finding,
    Place,
    at_source,
    error,
    in_words,
    info,
    run_here,
    some_of,
    warning,
)
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.hints import command
from streamer.mapping.resync import after_loss
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier
from streamer.report.problems import Severity
from streamer.source.catalog import SourceRelation
from streamer.source.column_lists import LISTS_SINCE, ColumnLists, column_lists, sent_columns
from streamer.source.publication import (
    PublicationChanges,
    PublicationFault,
    interrupted_error,
    membership_fingerprint,
    moves_to_updates,
    publication_changes,
    publication_faults,
)
from streamer.source.replica_identity import RelationIdentity


def check_publications(facts: SourceFacts, target: TargetFacts | None) -> Iterable[Finding]:
    """Whether the wanted tables are published, or streamer can publish them."""
    place, source, server = Place(facts.label), facts.source, facts.server
    assert server is not None
    if server.version < 13_00_00:
        for mapping, relation in facts.mapped():
            if relation.is_partitioned:
                problem = "is partitioned, and PostgreSQL 12 cannot publish that"
                fix = in_words("remove it from `tables`, or upgrade that server")
                yield error(Place(facts.label, str(mapping.source)), problem, fix)
    lists = _lists(facts)
    changes = publication_changes(
        source, _identities(facts), facts.publications, server.version, lists=lists
    )
    if changes.needed:
        obstacles = _publishing_obstacles(facts, changes)
        if obstacles:
            problem = f'role "{server.role}" cannot publish the tables: {"; ".join(obstacles)}'
            yield error(place, problem, at_source(*changes.needed, words="as an administrator"))
        elif server.in_recovery:
            problem = "the tables are not published"
            yield error(place, problem, at_source(*changes.needed, words="on the primary"))
    yield from _check_surplus(facts, changes)
    yield from _check_faults(facts, target, lists)
    yield from _check_all_tables(facts)
    yield from _check_excluded(facts, lists)
    if target is not None:
        yield from _check_marks(facts, target)


def moving_sql(facts: SourceFacts, mapping: RelationMapping, relation: SourceRelation) -> list[str]:
    """Return the statements that publish updates of a table once its identity allows that.

    None if `run` may run these itself. The statements of `check_publications` go before.
    """
    source, server, lists = facts.source, facts.server, _lists(facts)
    assert server is not None
    changes = publication_changes(
        source, _identities(facts), facts.publications, server.version, lists=lists
    )
    is_able = relation.owned and all(each.is_owned for each in facts.publications.values())
    is_able = is_able and not server.in_recovery and not _publishing_obstacles(facts, changes)
    # A column list goes by the identity, so the next check knows the list.
    if is_able or mapping.rule.column_list:
        return []
    return moves_to_updates(source, relation.name, facts.publications)


def _lists(facts: SourceFacts) -> ColumnLists:
    assert facts.server is not None
    publications = facts.publications.values()
    return column_lists(facts.mappings, _identities(facts), publications, facts.server.version)


def _identities(facts: SourceFacts) -> list[RelationIdentity]:
    return [relation.identity for relation in facts.relations.values()]


def _publishing_obstacles(facts: SourceFacts, changes: PublicationChanges) -> list[str]:
    """Return the privileges that the role lacks for *changes*."""
    server, usage = facts.server, facts.usage
    assert server is not None
    assert usage is not None
    obstacles = []
    present = facts.publications
    names = (facts.source.publication, facts.source.publication_inserts)
    if not usage.may_create and any(name not in present for name in names):
        obstacles.append(f'it lacks CREATE on database "{server.database}"')
    wanted = {relation.name: relation for relation in facts.relations.values()}
    published = set()
    for name, publication in present.items():
        usable = name == facts.source.publication
        its = {r.name for r in wanted.values() if r.has_usable_identity is usable}
        published |= {name for name in its if publication.has(name)}
        altered = f"alter publication {quote_identifier(name)} "
        if not publication.is_owned and any(sql.startswith(altered) for sql in changes.needed):
            obstacles.append(f'it does not own publication "{name}"')
    missing = sorted(wanted.keys() - published)
    if foreign := [str(name) for name in missing if not wanted[name].owned]:
        obstacles.append(f"it does not own {some_of(foreign)}")
    namespaces = {name.namespace for name in missing if wanted[name].owned}
    if hidden := sorted(namespaces - facts.usable_namespaces):
        obstacles.append(f"it may not use schema {some_of(hidden)}")
    return obstacles


def _check_surplus(facts: SourceFacts, changes: PublicationChanges) -> Iterable[Finding]:
    """Members that the mapping lacks and that `run` may not remove.

    Beside a rule that matches no table they follow from it: one of them may have the right name.
    """
    if any(finding.severity is Severity.ERROR for finding in facts.mapping_findings):
        return
    if not changes.surplus or all(each.is_owned for each in facts.publications.values()):
        return
    yield warning(
        Place(facts.label),
        "its publications have tables that do not belong there: "
        f"{some_of(map(str, sorted(changes.strangers)))}",
        at_source(*changes.surplus, words="as an administrator"),
    )


def _check_faults(
    facts: SourceFacts, target: TargetFacts | None, lists: ColumnLists
) -> Iterable[Finding]:
    """A publication that an administrator created and that omits columns or rows."""
    assert facts.server is not None
    filtered = {m.source for m in facts.mappings if m.rule.filter is not None}
    faults = publication_faults(
        facts.source, facts.publications, _identities(facts), filtered, facts.server.version, lists
    )
    for fault in faults:
        fix = at_source(*fault.sql)
        if fault.relation is None:
            yield error(
                Place(facts.label, f'publication "{fault.publication}"'), fault.problem, fix
            )
            continue
        make = warning if _is_mended(facts, target, fault) else error
        problem = f'publication "{fault.publication}" {fault.problem}'
        yield make(Place(facts.label, str(fault.relation)), problem, fix)


def _check_excluded(facts: SourceFacts, lists: ColumnLists) -> Iterable[Finding]:
    """Whether excluded columns leave the source."""
    assert facts.server is not None
    for mapping, relation in facts.mapped():
        place, rule = Place(facts.label, str(mapping.source)), mapping.rule
        if (refused := lists.refused.get(mapping.source)) is not None:
            yield error(place, refused.message, in_words(refused.hint or ""))
            continue
        delivered = set(relation.column_names) - relation.identity.generated
        excluded = rule.exclude.intersection(delivered)
        if not excluded:
            continue
        sent = excluded & sent_columns(mapping, relation.identity)
        if rule.column_list and sent:
            problem = (
                f"{some_of(sorted(sent))} leaves the source although it is excluded, because "
                "`filter` or `set` uses it"
            )
            yield warning(place, problem)
        elif rule.column_list:
            yield info(place, f"{some_of(sorted(excluded))} does not leave the source")
        else:
            is_able = facts.server.version >= LISTS_SINCE
            more = "`column_list: true`" if is_able else "PostgreSQL 15"
            problem = f"excluded {some_of(sorted(excluded))} leaves the source, but is not written"
            yield info(place, f"{problem}; {more} can keep it there")


def _is_mended(facts: SourceFacts, target: TargetFacts | None, fault: PublicationFault) -> bool:
    """Whether `run` makes the wanted member of the table: it is copied anyway, or has a list."""
    mapping = next(m for m in facts.mappings if m.source == fault.relation)
    is_copied = target is None or target.needs_copy(facts.source, mapping)
    is_changed = is_copied or mapping.rule.column_list
    return is_changed and facts.publications[fault.publication].is_owned


def _check_all_tables(facts: SourceFacts) -> Iterable[Finding]:
    """Tables that a publication of everything cannot leave out, or that may become unlogged
    there.
    """
    publication = facts.publications.get(facts.source.publication)
    if publication is None:
        return
    if publication.has_all_tables or publication.namespaces:
        yield warning(
            Place(facts.label, f'publication "{publication.name}"'),
            "names no tables, so PostgreSQL lets their owners run ALTER TABLE … SET UNLOGGED. "
            "Changes of an unlogged table are not in the WAL, so such a table needs a resync",
            in_words("re-create the publication with a list of tables"),
        )
    for identity in _identities(facts):
        if identity.is_usable or identity.name in publication.members:
            continue
        if publication.has(identity.name) and "update" in publication.publishes:
            yield warning(
                Place(facts.label, str(identity.name)),
                f'publication "{publication.name}" names no tables and publishes updates of this '
                "one, so the application's own UPDATE and DELETE of it fail",
                in_words("re-create the publication with a list of tables"),
            )


def _check_marks(facts: SourceFacts, target: TargetFacts) -> Iterable[Finding]:
    """Tables in sync that were temporarily unpublished."""
    for mapping, relation in facts.mapped():
        record = target.record(facts.source, mapping)
        if record is None or target.needs_copy(facts.source, mapping):
            continue
        mark = membership_fingerprint(facts.publications.values(), relation.identity)
        if record.publication_mark not in (None, mark):
            table, source = str(mapping.source), facts.source
            options = after_loss([mapping.type])
            resync = command("resync", table, *options, database=source.database, sid=source.sid)
            yield error(
                Place(facts.label, table),
                f"{interrupted_error(mapping.source).message}, so changes may be missing",
                run_here(resync),
            )
