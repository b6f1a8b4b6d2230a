"""Decides what happens to each table, from facts of the source and of the bookkeeping. Pure.

`run` executes the plan (`streamer.runtime.guards.publications`), and `check` prints the plan. The
plan has a case for each table that does not continue as before:

- *keep*, without a case: no change is missing. A plain table may change its key: the stream shows
  the new key in order.
- *copy*: the table can become ready again, but only after a copy. The table gained a replica
  identity, or identities of partitions changed, whose order is unknown. Or the application dropped
  and re-created the table during its copy, or its column list lacked a column. Or the application
  re-created a stopped table whose `on_table_dropped` is not `stop`.
- *copy at a point*: a copy of a table that keeps its past. The target applies the table's changes
  up to the point of the copy.
- *stop*: changes are missing, or will be. The table waits in state ``error`` for an operator. A
  table whose updates can no longer be published leaves the publication of updates, so that the
  application's own statements work.
- *block*: streamer cannot publish a table that is not ready. Its copy begins as soon as streamer
  can publish the table.
- *renamed*: the source's table has a new name, and the source captures renames.
- *dropped*: the source's table was dropped, and its relation need not stop.
- *replaced*: the source's table was dropped, and a new table has the name. The relation stays
  unchanged until the target contains the last changes of the former table.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from streamer.control.resync_options import after_loss, keeps_deleted_rows
from streamer.errors.error_classes import (
    StreamerError,
    TableGoneError,
    UnpublishedError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Command, Remedy, resync_source, run
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import Initial, OnTableDropped
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.runtime.guards.publication_plan import (
    Case,
    Fate,
    LastPublished,
    MappedTable,
    PublicationPlan,
    SourceState,
)
from streamer.source.copy_grants import select_sql
from streamer.source.replica_identity import NONE, RelationIdentity
from streamer.source.slot_and_publications.column_lists import ColumnLists, column_lists, unlisted
from streamer.source.slot_and_publications.publication import (
    Publication,
    PublicationChanges,
    PublicationFault,
    WantedMembers,
    administrator_steps,
    concerns,
    identity_error,
    interrupted_error,
    member_sql,
    membership_fingerprint,
    name_publications,
    publication_changes,
    publication_faults,
    publishable_filters,
    unlogged_error,
    unpublished_filters,
)


def needs_copy(former: str | None, identity: RelationIdentity) -> bool:
    """Whether a relation whose replica identity was *former* needs a copy.

    Without an identity only inserts were published. Partitions get their new identities one after
    the next. Until the last partition has its new identity, the stream can send old rows that fit
    neither identity.
    """
    if former is None or former == identity.published or not identity.is_usable:
        return False
    return former == NONE or identity.is_partitioned


def renamed(
    fingerprints: Mapping[RelationName, str | None], publications: Iterable[Publication]
) -> dict[RelationName, RelationName]:
    """Return the new names of tables by their former names. New tables may have the former names.

    *fingerprints*: the fingerprints of memberships (`membership_fingerprint`), by the former names.
    """
    members = members_by_fingerprint(publications)
    moves = {
        former: members[fingerprint][0]
        for former, fingerprint in fingerprints.items()
        if fingerprint in members
    }
    return {former: now for former, now in moves.items() if now != former}


MembersByFingerprint = Mapping[str | None, tuple[RelationName, int | None]]


def members_by_fingerprint(publications: Iterable[Publication]) -> MembersByFingerprint:
    """Return the names and OIDs of members, by the fingerprints of their memberships."""
    return {
        f"{publication.fingerprint}/{member.fingerprint}": (name, member.relid)
        for publication in publications
        for name, member in publication.members.items()
    }


def oid_of(last: LastPublished, members: MembersByFingerprint, *, is_in_sync: bool) -> int | None:
    """Return the OID of the table that *last* describes, under any name."""
    if last.fingerprint in members:
        return members[last.fingerprint][1]
    return last.oid if is_in_sync else None


# ---- before the publications change ------------------------------------------------------------


def reconcile(
    state: SourceState, tables: Iterable[MappedTable], source: SourceMapping
) -> PublicationPlan:
    """Return the part of the plan for *tables* that does not depend on changed publications.

    Raises UnpublishedError when a publication in use is gone.
    """
    tables = list(tables)
    _require_publications(state, tables, source)
    departed = _find_departed(state, tables)
    staying = tuple(table for table in tables if table.name not in departed)
    names = [table.name for table in staying if table.name in state.identities]
    identities = {name: state.identities[name] for name in names}
    publications = state.publications.values()
    mappings = [table.mapping for table in staying]
    lists = column_lists(mappings, identities.values(), publications, state.version)
    cases, relisted = dict(departed), set()
    for table in staying:
        identity = identities.get(table.name)
        case = _judge_membership(table, state, identity, source)
        if identity is not None:
            lacking = None
            if case is None or case.fate is Fate.COPY:
                lacking = _find_unlisted(table, identity, publications, lists)
            if lacking is not None:
                relisted.add(table.name)
            if lacking and case is None:
                columns = ", ".join(f'"{name}"' for name in sorted(lacking))
                reason = f"its publication did not send column {columns}"
                case = _copy(table, reason, table.mapping.columns_from(lacking))
            case = _judge_lost_identity(table, case, identity, state, source)
        if case is not None:
            cases[table.name] = case
    fresh = [t.name for t in staying if not (t.is_in_sync or t.is_set_aside or t.is_renewed)]
    members = WantedMembers(
        _find_members(state, staying, cases),
        mappings,
        lists,
        frozenset(fresh),
        frozenset(relisted),
        frozenset(t.last.fingerprint for t in tables if t.last.fingerprint and state.captures),
    )
    changed = _changed_members(source, members, state)
    continuing = {table.name for table in staying if table.is_in_sync} - {
        name for name, case in cases.items() if case.fate is not Fate.COPY_AT_POINT
    }
    is_incomplete = any(case.successor is not None for case in departed.values())
    return PublicationPlan(
        cases,
        staying,
        state,
        members,
        cleared=frozenset(changed & continuing),
        is_incomplete=is_incomplete,
    )


def _changed_members(
    source: SourceMapping, members: WantedMembers, state: SourceState
) -> set[RelationName]:
    """Return the tables in sync whose fingerprints streamer itself changes."""
    filters = publishable_filters(members.mappings, members.identities, state.version)
    unfit = unpublished_filters(members.mappings, filters)
    steady, former = replace(members, fresh=frozenset()), state.publications
    changes = publication_changes(source, steady, former, state.version, filters, unfit)
    differing = _fingerprints(former.values()) ^ _fingerprints(changes.publications.values())
    return {name for name, _ in differing} - members.fresh


def _fingerprints(publications: Iterable[Publication]) -> set[tuple[RelationName, str]]:
    return {(name, m.fingerprint) for p in publications for name, m in p.members.items()}


def _find_members(
    state: SourceState, tables: Iterable[MappedTable], cases: Mapping[RelationName, Case]
) -> list[RelationIdentity]:
    """Return the tables to publish: tables that stay, and renamed tables under their new names.

    A table that a session removed from a publication does not return at once.
    """
    names = dict.fromkeys(case.name for case in cases.values() if case.name is not None)
    for table in tables:
        case = cases.get(table.name)
        fate = None if case is None else case.fate
        is_stopped = fate is Fate.STOP or (table.is_set_aside and fate is not Fate.COPY)
        if not is_stopped or any(
            publication.has(table.name) for publication in state.publications.values()
        ):
            names[table.name] = None
    return [state.identities[name] for name in names if name in state.identities]


def _require_publications(
    state: SourceState, tables: Sequence[MappedTable], source: SourceMapping
) -> None:
    """Refuse to stream without a publication: the slot needs the publication to decode the WAL."""
    oids = {publication.oid for publication in state.publications.values()}
    lost = [
        table
        for table in tables
        if table.is_in_sync
        and table.last.fingerprint is not None
        and table.last.fingerprint.partition(".")[0] not in oids
    ]
    if lost:
        again = resync_source(
            [table.name for table in lost],
            *after_loss(table.mapping.type for table in lost),
            database=source.database,
            sid=source.sid,
        )
        names = _name_lost(state, lost, source)
        were = "were" if len(names) > 1 else "was"
        raise UnpublishedError(
            f'{name_publications(names)} of source "{source.label}" {were} dropped by another '
            "session, so changes may be missing",
            hint=Remedy.of(_advise_creation(state, tables, source), again),
        )


def _name_lost(state: SourceState, lost: Iterable[MappedTable], source: SourceMapping) -> list[str]:
    """Return the publications that are missing, and the former publications of *lost* tables."""
    former = {
        source.publication_inserts if table.last.identity == NONE else source.publication
        for table in lost
    }
    names = source.publication, source.publication_inserts
    return [name for name in names if name in former or name not in state.publications]


def _advise_creation(
    state: SourceState, tables: Iterable[MappedTable], source: SourceMapping
) -> Remedy | None:
    """Return the statements that create the missing publications, unless streamer may run them."""
    if state.may_create and all(p.is_owned for p in state.publications.values()):
        return None
    present = [table for table in tables if table.name in state.identities]
    identities = [state.identities[table.name] for table in present]
    mappings = [table.mapping for table in present]
    lists = column_lists(mappings, identities, state.publications.values(), state.version)
    members = WantedMembers(identities, mappings, lists)
    changes = publication_changes(source, members, state.publications, state.version)
    return Remedy.of(administrator_steps(changes.needed), "; ") if changes.needed else None


def _find_departed(state: SourceState, tables: Sequence[MappedTable]) -> dict[RelationName, Case]:
    """Return the cases of tables that were dropped or renamed."""
    fingerprints = {table.name: table.last.fingerprint for table in tables}
    moves = renamed(fingerprints, state.publications.values()) if state.captures else {}
    cases = {former: Case(Fate.RENAMED, name=now) for former, now in moves.items()}
    for table in tables:
        if table.name in moves:
            if table.is_bare and moves[table.name] in fingerprints:
                # A pattern added a name that the table of another relation had for a while.
                cases[table.name] = Case(Fate.DROPPED)
            continue
        if table.name not in state.identities:
            if table.is_bare or _is_dropped(table, state):
                cases[table.name] = Case(Fate.DROPPED)
        elif _is_replaced(table, state):
            cases[table.name] = Case(Fate.REPLACED)
    for former, now in moves.items():
        if now in cases and cases[now].fate is Fate.REPLACED:
            # The relation of that name copies the table, or stops.
            cases[now] = Case(Fate.REPLACED, successor=former)
            cases[former] = Case(Fate.DROPPED)
    return cases


def _is_dropped(table: MappedTable, state: SourceState) -> bool:
    """Whether `on_table_dropped` ends a missing table: neither its OID nor its membership exists.

    A renamed table still has its OID and its membership.
    """
    if table.mapping.rule.on_table_dropped is OnTableDropped.STOP or table.oid in state.oids:
        return False
    members = {m.fingerprint for p in state.publications.values() for m in p.members.values()}
    return (table.last.fingerprint or "").partition("/")[2] not in members


def _is_replaced(table: MappedTable, state: SourceState) -> bool:
    """Whether the table of a relation in sync was dropped, and a new table has its name."""
    return (
        table.is_in_sync
        and not table.has_returned
        and not table.is_being_copied
        and table.oid not in (None, state.root(table.name))
        and table.oid not in state.oids
    )


def _is_succeeded(table: MappedTable, state: SourceState) -> bool:
    """Whether a new table has the name of a dropped table, whose rule lets the new table follow."""
    if table.mapping.rule.on_table_dropped is OnTableDropped.STOP:
        return False
    former, root = table.last.oid, state.root(table.name)
    return None not in (former, root) and former != root and former not in state.oids


def _judge_membership(
    table: MappedTable,
    state: SourceState,
    identity: RelationIdentity | None,
    source: SourceMapping,
) -> Case | None:
    """Return the case of a relation in sync if the stream may lack its changes; None otherwise.

    A stopped table gets a case if `on_table_dropped` says that a new table replaces it.
    """
    error: StreamerError
    if table.is_set_aside and _is_succeeded(table, state):
        return Case(Fate.COPY, "its table was dropped, and another table has the name")
    if table.was_gone and identity is not None:
        return _judge_return(table, identity, state, source)
    if table.was_unpublished and identity is not None and table.name in state.rights.grants:
        return _judge_removal(table, identity, state, source)
    if not table.is_in_sync or (table.is_being_read and identity is None):
        return None
    if identity is None and table.mapping.rule.is_disjoint:
        return _stop_missing_disjoint(table, state, source)
    if identity is None:
        error = _gone_error(table, state, source)
    else:
        fingerprint = membership_fingerprint(state.publications.values(), identity)
        if table.last.fingerprint in (None, fingerprint) or needs_copy(
            table.last.identity, identity
        ):
            return None
        statements = []
        if table.name in state.rights.grants:  # otherwise the table is published
            statements = _publish_statements(table, identity, state, source)
        error = interrupted_error(table.name, statements)
    if table.has_returned:
        return Case(Fate.COPY, "it was not published while the mapping lacked the table")
    if _is_of_former_table(table, identity) and not table.has_history:
        return Case(Fate.COPY, "the application replaced it during its copy")
    if table.is_being_read:
        return Case(Fate.COPY, "it was unpublished for a time after the snapshot of its copy")
    return stop(table.mapping, error, source)


def _gone_error(table: MappedTable, state: SourceState, source: SourceMapping) -> TableGoneError:
    # The rule would have ended the relation of a dropped table: a session renamed this table.
    is_renamed = table.mapping.rule.on_table_dropped is not OnTableDropped.STOP
    keep = (
        "set `on_table_dropped: keep` in its rule (with a mapping database: `Edit the rule` on "
        "its page)"
    )
    leave_out = "add its name to `exclude_tables`"
    statements = _expect_statements(table, state, source)
    return TableGoneError(
        f'table "{table.name}" no longer exists at the source: a session dropped or renamed it',
        hint=Remedy.of(
            f"if the table is permanently gone, {leave_out if is_renamed else keep}, and "
            "reload the mapping (SIGHUP or `streamer apply`). Otherwise create the table again",
            Remedy.of("; then ", administrator_steps(statements)) if statements else None,
        ),
    )


def _expect_statements(table: MappedTable, state: SourceState, source: SourceMapping) -> list[str]:
    """Return the statements that streamer's role cannot run once *table* is created again.

    If the role owns the publication, the role may also own the new table.
    """
    is_keyless = table.last.identity == NONE
    name = source.publication_inserts if is_keyless else source.publication
    publication = state.publications.get(name)
    if publication is None or publication.is_owned or not state.rights.role:
        return []
    is_copied = table.mapping.rule.initial is not Initial.NONE
    return [
        *([] if publication.has(table.name) else [member_sql(publication, table.name)]),
        *([select_sql(table.name, state.rights.role)] if is_copied else []),
    ]


def _judge_return(
    table: MappedTable, identity: RelationIdentity, state: SourceState, source: SourceMapping
) -> Case | None:
    """Return the case of a missing table that exists again; None if the error does not change.

    The error names the statements that streamer's role cannot run.
    """
    if table.last.identity == NONE and identity.is_usable:
        return None  # the table continues with its new identity
    statements = _publish_statements(table, identity, state, source)
    first = administrator_steps(statements) if statements else None
    case = stop_replaced(table.mapping, source, first)
    return None if case.error == table.error else case


def _judge_removal(
    table: MappedTable, identity: RelationIdentity, state: SourceState, source: SourceMapping
) -> Case | None:
    """Return the case of a stopped table that no publication has; None if the error does not
    change.

    The remedy of an earlier error may remove the table from a publication first.
    """
    statements = _publish_statements(table, identity, state, source)
    case = stop(table.mapping, interrupted_error(table.name, statements), source)
    return None if case.error == table.error else case


def _publish_statements(
    table: MappedTable, identity: RelationIdentity, state: SourceState, source: SourceMapping
) -> list[str]:
    """Return the statements that streamer's role cannot run, and without which *table* is not
    published or not copied.
    """
    publications = state.publications
    lists = column_lists([table.mapping], [identity], publications.values(), state.version)
    members = WantedMembers([identity], [table.mapping], lists)
    statements = publication_changes(source, members, publications, state.version).needed
    if table.name in state.rights.owned and all(p.is_owned for p in publications.values()):
        statements = []
    if table.mapping.rule.initial is not Initial.NONE:
        statements += state.rights.grants.get(table.name, [])
    return statements


def _is_of_former_table(table: MappedTable, identity: RelationIdentity | None) -> bool:
    """Whether the application replaced *table* by a new table during the copy of *table*.

    The copy may have ended by now, and may have read the new table.
    """
    if identity is None:
        return table.is_being_copied
    if table.seen_oid in (None, identity.root.oid):
        return False
    return table.is_being_copied or table.oid == identity.root.oid


def _find_unlisted(
    table: MappedTable,
    identity: RelationIdentity,
    publications: Iterable[Publication],
    lists: ColumnLists,
) -> frozenset[str] | None:
    """Return the columns that a column list lacks; None if no list must change at once.

    A list that lacks columns requires a new copy, even while a copy runs: the stream sent changes
    without the columns.
    """
    if table.is_set_aside or not (table.is_in_sync or table.is_renewed or table.is_being_copied):
        return None  # its copy begins later
    return unlisted(table.mapping, identity, publications, lists)


def _copy(table: MappedTable, reason: str, columns: Iterable[str] | None = None) -> Case:
    """Copy *table*, or only *columns* of the target if the table keeps its past."""
    if table.has_history:
        return Case(Fate.COPY_AT_POINT, reason, columns=None if columns is None else tuple(columns))
    return Case(Fate.COPY, reason)


def _judge_lost_identity(
    table: MappedTable,
    case: Case | None,
    identity: RelationIdentity,
    state: SourceState,
    source: SourceMapping,
) -> Case | None:
    """Stop a table in sync whose updates can no longer be published."""
    is_kept = case is None or case.fate is Fate.COPY_AT_POINT
    has_lost = table.last.identity not in (None, NONE) and not identity.is_usable
    if not (is_kept and has_lost and table.is_in_sync):
        return case
    return _stop_without_identity(table.mapping, identity, state, source)


def _stop_without_identity(
    mapping: RelationMapping, identity: RelationIdentity, state: SourceState, source: SourceMapping
) -> Case:
    then = "; streamer then copies the table again. To continue with inserts only, run: "
    if keeps_deleted_rows(mapping.type):
        then = "; then run: "
    remedy = Remedy.of(state.identity_remedy(identity), then, _resync_command(mapping, source))
    error = identity_error(state.publications.values(), identity, remedy)
    return Case(Fate.STOP, error=ErrorReport.of(error))


# ---- once the publications have changed --------------------------------------------------------


def conclude(
    plan: PublicationPlan,
    state: SourceState,
    tables: Iterable[MappedTable],
    refused: Mapping[RelationName, StreamerError],
    source: SourceMapping,
) -> PublicationPlan:
    """Return *plan* with the cases and memberships that follow from the changed publications.

    *tables*: the current state of the plan's tables. *refused*: why publishing a table failed.
    """
    decided = []
    for table in tables:
        former_oid = plan.state.root(table.name)
        # A name whose table was dropped or renamed since the plan needs a new plan. So does a table
        # that a session took out of the publication meanwhile.
        is_same = former_oid in (None, state.root(table.name))
        if is_same and not _was_interrupted(plan, table, state):
            decided.append(table)
    faults = find_faults(state, decided, plan.wanted.lists, source)
    refused = {**refused, **plan.wanted.lists.refused}
    cases = dict(plan.cases)
    memberships = {}
    for table in decided:
        identity = state.identities.get(table.name)
        case = cases.get(table.name)
        reason = _find_reason(table, state, identity, refused.get(table.name), faults)
        case = _judge_reason(table, case, reason, source)
        if identity is not None:
            case = _judge_identity(plan, table, case, identity, state, source)
            memberships[table.name] = _membership(plan, state, table, case, identity)
        if case is not None:
            cases[table.name] = case
    return replace(
        plan,
        cases=cases,
        memberships=memberships,
        is_incomplete=plan.is_incomplete or len(decided) < len(plan.tables),
    )


def _was_interrupted(plan: PublicationPlan, table: MappedTable, state: SourceState) -> bool:
    """Whether a foreign session has changed the membership of a continuing table since *plan*."""
    identity, is_judged = state.identities.get(table.name), table.name in plan.cases
    if identity is None or is_judged or not table.is_in_sync or table.name in plan.cleared:
        return False
    fingerprint = membership_fingerprint(state.publications.values(), identity)
    return table.last.fingerprint not in (None, fingerprint)


def foresee(plan: PublicationPlan, source: SourceMapping) -> PublicationPlan:
    """Return the outcome of `conclude` for *plan*, if streamer may change its publications."""
    existing, version = plan.state.publications, plan.state.version
    changes = publication_changes(source, plan.wanted, existing, version)
    foreign = {name: p for name, p in existing.items() if not p.is_owned}
    if any(changes.publications[name] != publication for name, publication in foreign.items()):
        changes = planned_changes(plan, source)
    later = replace(plan.state, publications=changes.publications)
    return conclude(plan, later, plan.tables, {}, source)


def planned_changes(plan: PublicationPlan, source: SourceMapping) -> PublicationChanges:
    """Return the statements without which the tables of *plan* are not published."""
    members, state = plan.wanted.with_settings_kept(), plan.state
    return publication_changes(source, members, state.publications, state.version)


def find_faults(
    state: SourceState, tables: Iterable[MappedTable], lists: ColumnLists, source: SourceMapping
) -> list[PublicationFault]:
    """Return the faults of the publications for *tables*."""
    tables = list(tables)
    identities = [state.identities[t.name] for t in tables if t.name in state.identities]
    filtered = {table.name for table in tables if table.mapping.rule.filter is not None}
    return publication_faults(
        source, state.publications, identities, filtered, state.version, lists
    )


def _find_reason(
    table: MappedTable,
    state: SourceState,
    identity: RelationIdentity | None,
    refusal: StreamerError | None,
    faults: Iterable[PublicationFault],
) -> StreamerError | PublicationFault | None:
    """Return the reason why some or all changes of *table* are not published."""
    if identity is None:
        return TableGoneError(
            f'table "{table.name}" does not exist at the source',
            hint="create the table there, or correct or remove its name in `tables`",
        )
    if (error := unlogged_error(identity) or refusal) is not None:
        return error
    concerning = [f for f in faults if concerns(f, state.publications[f.publication], identity)]
    return concerning[-1] if concerning else None


def _judge_reason(
    table: MappedTable,
    case: Case | None,
    reason: StreamerError | PublicationFault | None,
    source: SourceMapping,
) -> Case | None:
    if reason is None:
        return case
    fault = reason if isinstance(reason, PublicationFault) else None
    error = reason.error() if isinstance(reason, PublicationFault) else reason
    if case is not None and case.fate is Fate.COPY:
        return replace(case, error=ErrorReport.of(error), fault=fault)
    if table.is_set_aside:
        return case
    if case is not None and case.fate is Fate.STOP and not isinstance(error, UnpublishedError):
        return case
    # a fault of the publication replaces the error of a table that stops for missing changes
    if table.is_in_sync and not table.is_being_read:
        return replace(stop(table.mapping, error, source), fault=fault)
    return Case(Fate.BLOCK, error=ErrorReport.of(error), fault=fault)


def _judge_identity(
    plan: PublicationPlan,
    table: MappedTable,
    case: Case | None,
    identity: RelationIdentity,
    state: SourceState,
    source: SourceMapping,
) -> Case | None:
    if case is not None and case.has_lost_identity:
        # The application's statements work again if streamer has moved the table. A session may
        # have given the table an identity meanwhile, which does not return the lost changes.
        lost = plan.state.identities[table.name] if identity.is_usable else identity
        return _stop_without_identity(table.mapping, lost, state, source)
    if case is not None and case.fate is not Fate.COPY_AT_POINT:
        return case
    former = table.last.identity
    if table.is_in_sync:
        if needs_copy(former, identity):
            return _copy(table, "its replica identity has changed")
        return _judge_lost_identity(table, case, identity, state, source)
    if table.is_set_aside and former == NONE and identity.is_usable:
        if keeps_deleted_rows(table.mapping.type):
            return case  # an operator decides on the gap
        return Case(Fate.COPY, "it has a replica identity again")
    return case


def _is_followed(table: MappedTable, case: Case | None) -> bool:
    """Whether *table* streams from now on, at once or after a copy."""
    if case is not None and case.fate is Fate.STOP:
        return False
    return not table.is_set_aside or (case is not None and case.fate is Fate.COPY)


def _membership(
    plan: PublicationPlan,
    state: SourceState,
    table: MappedTable,
    case: Case | None,
    identity: RelationIdentity,
) -> LastPublished:
    """Return the facts of *table* to store.

    A stopped table keeps its stored facts. A lost identity is stored as NONE, so that streamer
    detects that the table regains an identity.
    """
    if _is_followed(table, case):
        fingerprint = membership_fingerprint(state.publications.values(), identity)
        remedy = state.identity_remedy(identity)
        return LastPublished(fingerprint, identity.published, identity.root.oid, remedy)
    former = plan.state.identities.get(table.name)
    if (former is None or former.is_usable) and identity.is_usable:
        return table.last
    return replace(table.last, identity=NONE)


# ---- errors ------------------------------------------------------------------------------------


def stop(mapping: RelationMapping, error: StreamerError, source: SourceMapping) -> Case:
    """Return the case of a table that lacks changes because of *error*."""
    first = error.remedy
    gap = ", which leaves a gap in its past" if keeps_deleted_rows(mapping.type) else ""
    reason = f"changes may be missing{gap}"
    then = f"; then run, because {reason}: " if first else f"{reason}, so run: "
    remedy = Remedy.of(first, then, _resync_command(mapping, source))
    report = ErrorReport(f"{error.message}; {remedy}", error.code, remedy)
    return Case(Fate.STOP, error=report)


def _stop_missing_disjoint(table: MappedTable, state: SourceState, source: SourceMapping) -> Case:
    """Return the case of a missing table with `keys: disjoint`.

    A renamed table is a new table under its new name, and a copy of all tables with the target
    removes the former rows.
    """
    former = {table.name: table.last.fingerprint}
    now = renamed(former, state.publications.values()).get(table.name)
    what = "dropped or renamed it" if now is None else f'renamed it to "{now}"'
    error = TableGoneError(f'table "{table.name}" no longer exists at the source: a session {what}')
    first = (
        f'add "{table.name}" to `exclude_tables`, or remove its rule, and reload the mapping '
        "(SIGHUP or `streamer apply`); then "
    )
    ids = {"database": source.database, "sid": source.sid}
    again = "resync a remaining table with this target" if now is None else "run: "
    copy = None if now is None else run("resync", str(now), **ids)
    remedy = Remedy.of(first, again, copy)
    return Case(Fate.STOP, error=ErrorReport(f"{error.message}; {remedy}", error.code, remedy))


def stop_replaced(
    mapping: RelationMapping, source: SourceMapping, first: Remedy | None = None
) -> Case:
    """Return the case of a dropped or renamed table whose name a table has again.

    *first*: what an administrator must run before a resync.
    """
    words = f'table "{mapping.source}", and the source has a table of this name again'
    error = TableGoneError(f"a session dropped or renamed {words}", hint=first)
    return stop(mapping, error, source)


def _resync_command(mapping: RelationMapping, source: SourceMapping) -> Command:
    options = after_loss([mapping.type])
    name = str(mapping.source)
    return run("resync", name, *options, database=source.database, sid=source.sid)
