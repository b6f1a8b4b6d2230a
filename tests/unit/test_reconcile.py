"""The fate of a table, from facts of the source and of the bookkeeping: a table of cases."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest

from streamer.errors.error_classes import SourceRejectedError, StreamerError, UnpublishedError
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rule_options import OnTableDropped, TableType
from streamer.mapping.rules import RelationMapping
from streamer.runtime.guards.publication_plan import (
    Case,
    Fate,
    LastPublished,
    MappedTable,
    PublicationPlan,
    SourceState,
)
from streamer.runtime.guards.reconcile import conclude, reconcile
from streamer.source.capture.ddl_capture import message_table
from streamer.source.copy_grants import RoleRights
from streamer.source.replica_identity import RelationIdentity, TableIdentity
from streamer.source.slot_and_publications.publication import (
    Member,
    Publication,
    WantedMembers,
    publication_changes,
)
from tests.unit.build import relation_mapping, source_mapping

SOURCE = source_mapping()
T, U = RelationName("public", "t"), RelationName("public", "u")
COLUMNS = {"id": 1, "v": 2, "secret": 3}
LAST = LastPublished("1.1/7", "key id", 1)
REFUSED = SourceRejectedError("permission denied", hint="grant it")


def identity(
    *key: str, oid: int = 1, name: RelationName = T, leaf: str | None = None, unlogged: bool = False
) -> RelationIdentity:
    """The identity of a table; *leaf*: the key of the partition."""
    root = TableIdentity(oid, name, "d", key)
    leaves = []
    if leaf is not None:
        leaves = [TableIdentity(99, parse_name("public.l"), "d", (leaf,), is_unlogged=unlogged)]
    return RelationIdentity(root, tuple(leaves), leaf is not None, COLUMNS)


KEYED = identity("id")
KEYLESS = identity()


def publication(
    *names: RelationName, inserts: bool = False, fingerprint: str = "7", **member: Any
) -> Publication:
    operations = {"insert", "truncate"} | (set() if inserts else {"update", "delete"})
    return Publication(
        "streamer_shop_ins" if inserts else "streamer_shop",
        "2.1" if inserts else "1.1",
        is_owned=True,
        publishes=frozenset(operations),
        via_root=True,
        members={name: Member(fingerprint, relid=1, **member) for name in names},
    )


PUBLISHED = publication(T)
ABSENT = publication()
INSERTS = publication(T, inserts=True)


@dataclass(frozen=True)
class World:
    """A table, with the source before and after the change of publications."""

    published: Publication = PUBLISHED
    inserts: Publication = field(default_factory=lambda: publication(inserts=True))
    identity: RelationIdentity | None = KEYED
    later_identity: RelationIdentity | None = None
    """The identity after the change of publications; None: as before."""
    oids: frozenset[int] = frozenset({1})
    captures: bool = False
    refused: StreamerError | None = None
    dropped: OnTableDropped = OnTableDropped.STOP
    type: TableType = TableType.CLONE
    excludes: str | None = None
    """A column of a rule with `column_list`."""
    table: dict[str, Any] = field(default_factory=dict)

    @property
    def mapping(self) -> RelationMapping:
        mapping = relation_mapping(table_type=self.type, exclude=[self.excludes or "secret"])
        rule = replace(
            mapping.rule, on_table_dropped=self.dropped, column_list=self.excludes is not None
        )
        return replace(mapping, rule=rule)

    def state(self, now: RelationIdentity | None, *publications: Publication) -> SourceState:
        identities = {} if now is None else {now.name: now}
        by_name = {each.name: each for each in publications}
        return SourceState(by_name, identities, self.oids, 15_00_00, self.captures)

    def run(self) -> tuple[PublicationPlan, PublicationPlan]:
        """Return the plan before the publications change, and the plan afterwards."""
        facts: dict[str, Any] = {"last": LAST, "oid": 1, "seen_oid": 1, "is_in_sync": True}
        table = MappedTable(self.mapping, **facts | self.table)
        plan = reconcile(self.state(self.identity, self.published, self.inserts), [table], SOURCE)
        refused = {} if self.refused is None else {T: self.refused}
        last = replace(table.last, fingerprint=None) if plan.cleared else table.last
        tables = [replace(table, last=last)]
        state = self.state(self.later_identity or self.identity, *self.changed(plan))
        return plan, conclude(plan, state, tables if plan.tables else [], refused, SOURCE)

    def changed(self, plan: PublicationPlan) -> Iterable[Publication]:
        """Return the publications with the members of *plan*, new members with an empty
        fingerprint.
        """
        existing = plan.state.publications
        if self.refused is not None:
            return existing.values()
        changes = publication_changes(SOURCE, plan.wanted, existing, plan.state.version)
        return changes.publications.values()


def table(**facts: Any) -> dict[str, Any]:
    return facts


NEW = table(last=LastPublished(), oid=None, seen_oid=None, is_in_sync=False)
READ = table(is_being_read=True, is_being_copied=True)
ASIDE = table(is_in_sync=False, is_set_aside=True)
WITHOUT_KEY = replace(LAST, identity="none")
LISTED = publication(T, columns=frozenset({"id"}))
"""The list lacks column v."""
GONE = World(published=ABSENT, identity=None, oids=frozenset())
OTHER = World(publication(fingerprint="8"), identity=identity("id", oid=2), oids=frozenset({2}))
"""A new table has the name."""
KEEP, CLOSE = OnTableDropped.KEEP, OnTableDropped.CLOSE
WHILE_COPYING = "copy: the application replaced it during its copy"
SUCCEEDED = "copy: its table was dropped, and another table has the name"
RELISTED = 'its publication did not send column "v"'
CHANGED = "its replica identity has changed"
RETURNED = "copy: it was not published while the mapping lacked the table"

LOST = 'stop identity_lost: table "public.t": has no primary key, so '
REFUSES = (
    f"{LOST}the source refuses the application's UPDATE and DELETE while publication "
    '"streamer_shop" has the table; run at the source: alter table "public"."t" replica identity full'
)
UNPUBLISHED = f"{LOST}its updates and deletes are no longer published; run at the source: "

CASES: dict[str, tuple[World, str, str]] = {
    # The name: the facts, the case before the publications change, and the case afterwards.
    "nothing changed": (World(), "", ""),
    "another key": (World(identity=identity("v")), "", ""),
    "a first look": (World(table=table(last=LastPublished())), "", ""),
    "a fingerprint that streamer was about to read": (
        World(
            published=publication(T, fingerprint="8"),
            table=table(last=replace(LAST, fingerprint=None)),
        ),
        "",
        "",
    ),
    # -- changes may be missing
    "another membership": (
        World(publication(T, fingerprint="8")),
        "stop unpublished",
        "stop unpublished",
    ),
    "an altered publication": (
        World(replace(PUBLISHED, fingerprint="1.2")),
        "stop unpublished",
        "stop unpublished",
    ),
    "no membership": (World(ABSENT), "stop unpublished", "stop unpublished"),
    "a table that is gone": (GONE, "stop table_gone", "stop table_gone"),
    "a table that is gone, and a copy runs": (
        replace(GONE, table=table(is_being_copied=True)),
        WHILE_COPYING,
        f"{WHILE_COPYING}, but table_gone",
    ),
    "a table that a session moved": (
        replace(GONE, dropped=KEEP, oids=frozenset({1})),
        "stop table_gone",
        "stop table_gone",
    ),
    "a renamed table that is still published": (
        replace(GONE, dropped=KEEP, published=publication(U)),
        "stop table_gone",
        "stop table_gone",
    ),
    "a fault is the better reason": (
        World(replace(PUBLISHED, fingerprint="1.2", publishes=frozenset({"insert"}))),
        "stop unpublished",
        'stop unpublished: publication "streamer_shop" does not publish update',
    ),
    "a filter of an administrator": (
        World(publication(T, is_filtered=True)),
        "",
        "stop unpublished",
    ),
    "an unlogged partition": (
        World(identity=identity("id", leaf="id", unlogged=True)),
        "",
        "stop unpublished",
    ),
    "a table that the role may not move": (
        World(
            ABSENT, INSERTS, refused=REFUSED, table=table(last=LastPublished("2.1/7", "none", 1))
        ),
        "",
        "stop source_auth",
    ),
    # -- the mapping lacked the table
    "the mapping has the table again": (
        World(ABSENT, table=table(has_returned=True)),
        RETURNED,
        RETURNED,
    ),
    "the mapping has a table again that is gone": (
        replace(GONE, table=table(has_returned=True)),
        RETURNED,
        f"{RETURNED}, but table_gone",
    ),
    "the mapping has the table again, which the role may not publish": (
        World(ABSENT, refused=REFUSED, table=table(has_returned=True)),
        RETURNED,
        f"{RETURNED}, but source_auth",
    ),
    # -- a new table has the name
    "a replaced table": (OTHER, "replaced", "replaced"),
    "a table that took the name of a renamed one": (
        replace(OTHER, oids=frozenset({1, 2})),
        "stop unpublished",
        "stop unpublished",
    ),
    "a replaced table whose copy runs": (
        replace(OTHER, table=table(is_being_copied=True)),
        WHILE_COPYING,
        WHILE_COPYING,
    ),
    "a replaced table whose copy is over": (
        replace(OTHER, table=table(oid=2)),
        WHILE_COPYING,
        WHILE_COPYING,
    ),
    "a replaced table with a past, whose copy is over": (
        replace(OTHER, table=table(oid=2, has_history=True)),
        "stop unpublished",
        "stop unpublished",
    ),
    "a replaced table that the mapping lacked": (
        replace(OTHER, table=table(has_returned=True)),
        RETURNED,
        RETURNED,
    ),
    "a replaced table that is not in sync": (
        replace(OTHER, table=table(is_in_sync=False)),
        "",
        "",
    ),
    # -- permanently gone, or moved
    "a dropped table": (replace(GONE, dropped=KEEP), "dropped", "dropped"),
    "a dropped table with a past": (replace(GONE, dropped=CLOSE), "dropped", "dropped"),
    "a dropped table of which the target has nothing": (
        replace(GONE, table={**NEW, "is_bare": True}),
        "dropped",
        "dropped",
    ),
    "a missing table that an operator named": (replace(GONE, table=NEW), "", "block table_gone"),
    "a renamed table": (
        World(publication(U), identity=identity("id", name=U), captures=True),
        "renamed public.u",
        "renamed public.u",
    ),
    "a renamed table without the capture": (
        World(publication(U), identity=identity("id", name=U)),
        "stop table_gone",
        "stop table_gone",
    ),
    "unpublished for a time just after the snapshot of a copy": (
        World(publication(T, fingerprint="8"), table=READ),
        "copy: it was unpublished for a time after the snapshot of its copy",
        "copy: it was unpublished for a time after the snapshot of its copy",
    ),
    "dropped just after the snapshot of a copy, which reports that": (
        replace(GONE, table=READ),
        "",
        "block table_gone",
    ),
    # -- replica identities
    "a lost identity": (World(identity=KEYLESS), REFUSES, UNPUBLISHED),
    "a lost identity in a publication that the role may not change": (
        World(identity=KEYLESS, refused=REFUSED),
        REFUSES,
        REFUSES,
    ),
    "a lost identity that is back by now": (
        World(identity=KEYLESS, later_identity=KEYED),
        REFUSES,
        UNPUBLISHED,
    ),
    "an identity that gets lost meanwhile": (
        World(later_identity=KEYLESS),
        "",
        "stop identity_lost",
    ),
    "a gained identity": (
        World(ABSENT, INSERTS, table=table(last=WITHOUT_KEY)),
        "",
        f"copy: {CHANGED}",
    ),
    "a gained identity of a table with a past": (
        World(ABSENT, INSERTS, table=table(last=WITHOUT_KEY, has_history=True)),
        "",
        f"copy at a point: {CHANGED}",
    ),
    "identities of partitions changed": (
        World(identity=identity("v", leaf="v")),
        "",
        f"copy: {CHANGED}",
    ),
    "a partition without an identity": (
        World(identity=identity("id", leaf="v")),
        "stop identity_lost",
        "stop identity_lost",
    ),
    "never an identity": (
        World(ABSENT, INSERTS, KEYLESS, table=table(last=LastPublished("2.1/7", "none", 1))),
        "",
        "",
    ),
    # -- stopped tables
    "a stopped table": (World(table=ASIDE), "", ""),
    "a stopped table that is unpublished": (World(ABSENT, table=ASIDE), "", ""),
    "a stopped table that is gone": (replace(GONE, table=ASIDE), "", ""),
    "a stopped table that is replaced": (replace(OTHER, table=ASIDE), "", ""),
    "a stopped table that is replaced, and may be": (
        replace(OTHER, published=ABSENT, dropped=KEEP, table=ASIDE),
        SUCCEEDED,
        SUCCEEDED,
    ),
    "a stopped table that is replaced by a table that the role may not publish": (
        replace(OTHER, published=ABSENT, dropped=KEEP, refused=REFUSED, table=ASIDE),
        SUCCEEDED,
        f"{SUCCEEDED}, but source_auth",
    ),
    "a stopped table whose name a renamed table left": (
        replace(OTHER, dropped=KEEP, oids=frozenset({1, 2}), table=ASIDE),
        "",
        "",
    ),
    "a stopped table with an identity again": (
        World(ABSENT, INSERTS, table={**ASIDE, "last": WITHOUT_KEY}),
        "",
        "copy: it has a replica identity again",
    ),
    "a stopped table with a gap and an identity again": (
        World(ABSENT, INSERTS, type=TableType.APPEND, table={**ASIDE, "last": WITHOUT_KEY}),
        "",
        "",
    ),
    # -- column lists
    "a list lacks a column": (
        World(LISTED, excludes="secret"),
        f"copy: {RELISTED}",
        f"copy: {RELISTED}",
    ),
    "a list of a table with a past lacks a column": (
        World(LISTED, excludes="secret", table=table(has_history=True)),
        f"copy at a point: {RELISTED} (v)",
        f"copy at a point: {RELISTED} (v)",
    ),
    "a list lacks a column while a first copy runs": (
        World(LISTED, excludes="secret", table=table(is_in_sync=False, is_being_copied=True)),
        f"copy: {RELISTED}",
        f"copy: {RELISTED}",
    ),
    "a list sends too much": (World(PUBLISHED, excludes="secret"), "", ""),
    "a list that the source cannot have": (
        World(PUBLISHED, excludes="id"),
        "",
        "stop unpublished",
    ),
    "a list lacks a column, and the identity is lost": (
        World(LISTED, excludes="secret", identity=KEYLESS, table=table(has_history=True)),
        "stop identity_lost",
        "stop identity_lost",
    ),
    # -- tables before the copy
    "a new table": (World(ABSENT, table=NEW), "", ""),
    "a new table that the role may not publish": (
        World(ABSENT, refused=REFUSED, table=NEW),
        "",
        "block source_auth",
    ),
    "a new table with an unlogged partition": (
        World(ABSENT, identity=identity("id", leaf="id", unlogged=True), table=NEW),
        "",
        "block unpublished",
    ),
}


def text_of(plan: PublicationPlan) -> str:
    case = plan.cases.get(T)
    if case is None:
        return ""
    text = case.fate.value
    if case.name is not None:
        text += f" {case.name}"
    if case.reason:
        text += f": {case.reason}"
    if case.columns is not None:
        text += f" ({', '.join(case.columns)})"
    if case.error is not None:
        text += ", but" if case.fate is Fate.COPY else ""
        text += f" {case.error.code}: {case.error.text}"
    return text


@pytest.mark.parametrize("name", CASES)
def test_each_table_has_its_case(name: str) -> None:
    world, before, after = CASES[name]
    plans = world.run()
    for plan, text in zip(plans, (before, after), strict=True):
        assert text_of(plan).startswith(text)
        assert bool(text_of(plan)) is bool(text)


@pytest.mark.parametrize("name", CASES)
def test_a_second_plan_finds_nothing_more_to_change(name: str) -> None:
    """A table that continues continues by the stored facts, too."""
    world, _, after = CASES[name]
    if after or world.table.get("is_set_aside") or world.refused:
        return
    first, second = world.run()
    last = second.memberships[T]
    published, inserts = world.changed(first)
    again = replace(
        world,
        published=published,
        inserts=inserts,
        table={**world.table, "last": last, "is_in_sync": True, "oid": last.oid},
    )
    assert [text_of(plan) for plan in again.run()] == ["", ""]
    assert again.run()[1].memberships == {T: last}


@pytest.mark.parametrize(
    ("world", "is_published", "memory"),
    [
        # A session that took a stopped table out of a publication does not find the table back.
        (World(ABSENT), False, LAST),
        (World(ABSENT, table=ASIDE), False, LAST),
        (World(publication(T, fingerprint="8")), True, LAST),
        # A new table has the name of the stopped table, whose rule lets the new table follow.
        (
            replace(OTHER, published=ABSENT, dropped=KEEP, table=ASIDE),
            True,
            LastPublished("1.1/", "key id", 2),
        ),
        # To gain an identity helps later.
        (World(identity=KEYLESS), True, replace(LAST, identity="none")),
        (World(identity=KEYLESS, later_identity=KEYED), True, replace(LAST, identity="none")),
        (World(identity=KEYLESS, table=ASIDE), True, replace(LAST, identity="none")),
        (World(ABSENT, table=NEW), True, LastPublished("1.1/", "key id", 1)),
        (World(PUBLISHED, excludes="secret"), True, replace(LAST, fingerprint="1.1/")),
        (World(ABSENT, table=table(has_returned=True)), True, replace(LAST, fingerprint="1.1/")),
    ],
)
def test_a_plan_has_the_members_to_publish_and_the_facts_to_store(
    world: World, is_published: bool, memory: LastPublished
) -> None:
    before, after = world.run()
    assert [member.name for member in before.wanted.identities] == [T] * is_published
    assert after.memberships == {T: memory}


def test_a_table_without_a_usable_identity_is_stored_with_its_remedy() -> None:
    """So each view has the statements, also for a table that never lost an identity."""
    _, after = World(ABSENT, identity=KEYLESS, table=NEW).run()
    remedy = after.memberships[T].identity_remedy
    assert remedy is not None
    (sql,) = remedy.sql
    assert sql.statements == ('alter table "public"."t" replica identity full',)
    _, lost = World(identity=KEYLESS).run()
    error = lost.cases[T].error
    assert error is not None
    assert error.remedy is not None
    assert sql in error.remedy.sql


def test_an_interrupted_table_names_no_statements_that_streamer_runs_itself() -> None:
    """The table is in the publication, and will move to the publication of inserts."""
    plan, _ = World(publication(T, fingerprint="8"), identity=KEYLESS).run()
    error = plan.cases[T].error
    assert error is not None
    assert error.remedy is not None
    assert "was unpublished for a time" in error.text
    assert not error.remedy.sql


def test_streamer_forgets_a_fingerprint_before_it_changes_a_list() -> None:
    """Unless a copy is due: the process may die before the read of the next fingerprint."""
    assert World(PUBLISHED, excludes="secret").run()[0].cleared == {T}
    assert World(LISTED, excludes="secret").run()[0].cleared == set()
    past = World(LISTED, excludes="secret", table=table(has_history=True))
    assert past.run()[0].cleared == {T}


def test_a_lost_publication_ends_the_stream() -> None:
    with pytest.raises(
        UnpublishedError, match='publication "streamer_shop" of source "shop" was dropped by'
    ):
        World(replace(PUBLISHED, fingerprint="8.1")).run()
    assert World(replace(PUBLISHED, fingerprint="8.1"), table=ASIDE).run()[1].cases == {}


@pytest.mark.parametrize("may_create", [True, False])
def test_a_lost_publication_names_the_statements_that_the_role_may_not_run(
    may_create: bool,
) -> None:
    world = World(type=TableType.HISTORY)
    state = replace(world.state(KEYED, publication(inserts=True)), may_create=may_create)
    with pytest.raises(UnpublishedError) as caught:
        reconcile(state, [MappedTable(world.mapping, LAST, oid=1, is_in_sync=True)], SOURCE)
    remedy = caught.value.remedy
    assert remedy is not None
    statements = [statement for sql in remedy.sql for statement in sql.statements]
    if may_create:
        assert statements == []
    else:
        (created,) = statements
        assert created.startswith('create publication "streamer_shop" for table only "public"."t"')
    assert "the past of history and append tables gets a gap; run: " in str(remedy)


def test_a_new_publication_of_an_administrator_lacks_only_its_tables() -> None:
    world = World()
    present = [replace(each, fingerprint="9.9", is_owned=False) for each in (ABSENT, world.inserts)]
    for publications, statements in (
        (present, [ADD]),
        ([replace(present[0], members=PUBLISHED.members), present[1]], []),
    ):
        with pytest.raises(UnpublishedError) as caught:
            reconcile(
                world.state(KEYED, *publications),
                [MappedTable(world.mapping, LAST, oid=1, is_in_sync=True)],
                SOURCE,
            )
        remedy = caught.value.remedy
        assert remedy is not None
        assert [statement for sql in remedy.sql for statement in sql.statements] == statements


@pytest.mark.parametrize(("kind", "gap"), [(TableType.CLONE, ""), (TableType.APPEND, "its past")])
def test_a_table_that_stops_says_why_it_needs_a_copy(kind: TableType, gap: str) -> None:
    case = replace(GONE, type=kind).run()[1].cases[T]
    assert case.error is not None
    assert "create the table again; then run, because changes may be missing" in case.error.text
    assert ("leaves a gap in its past: streamer" in case.error.text) is bool(gap)


ADD = 'alter publication "streamer_shop" add table only "public"."t"'
ADD_KEYLESS = 'alter publication "streamer_shop_ins" add table only "public"."t"'
GRANT = 'grant select on "public"."t" to "reader"'
OWNED = RoleRights("reader", {T: []}, frozenset({T}))
LACKING = RoleRights("reader", {T: [GRANT]})


def run_with(world: World, rights: RoleRights, *publications: Publication) -> MappedTable:
    """Plan twice, and return the table with the error of the first plan.

    The second plan has nothing new to say about the table.
    """
    state = replace(world.state(world.identity, *publications), rights=rights)
    facts: dict[str, Any] = {"last": LAST, "oid": 1, "seen_oid": 1, "is_in_sync": True}
    table = MappedTable(world.mapping, **facts | world.table)
    case = reconcile(state, [table], SOURCE).cases[T]
    assert case.fate is Fate.STOP
    table = replace(table, error=case.error, is_in_sync=False, is_set_aside=True)
    assert T not in reconcile(state, [table], SOURCE).cases
    return table


def sql_of(table: MappedTable) -> list[str]:
    assert table.error is not None
    assert table.error.remedy is not None
    assert table.error.remedy.has("resync")
    return [statement for sql in table.error.remedy.sql for statement in sql.statements]


@pytest.mark.parametrize(
    ("publication", "last", "statements"),
    [
        (ABSENT, LAST, []),
        (replace(ABSENT, is_owned=False), LAST, [ADD, GRANT]),
        (replace(ABSENT, is_owned=False, has_all_tables=True), LAST, [GRANT]),
        (replace(ABSENT, is_owned=False), WITHOUT_KEY, [ADD_KEYLESS, GRANT]),
    ],
)
def test_a_table_that_is_gone_names_the_statements_of_an_administrator(
    publication: Publication, last: LastPublished, statements: list[str]
) -> None:
    inserts = replace(World().inserts, is_owned=publication.is_owned)
    world = replace(GONE, table=table(last=last))
    stopped = run_with(world, LACKING, publication, inserts)
    assert sql_of(stopped) == statements


@pytest.mark.parametrize(
    ("publication", "rights", "statements"),
    [
        (ABSENT, OWNED, []),
        (ABSENT, LACKING, [ADD, GRANT]),
        (replace(ABSENT, is_owned=False), OWNED, [ADD]),
        (PUBLISHED, LACKING, [GRANT]),
        (PUBLISHED, RoleRights("reader", {T: []}), []),
    ],
)
def test_a_table_that_is_back_names_the_remaining_statements(
    publication: Publication, rights: RoleRights, statements: list[str]
) -> None:
    gone = GONE.run()[1].cases[T].error
    world = replace(OTHER, table=table(error=gone, **ASIDE))
    stopped = run_with(world, rights, publication, world.inserts)
    assert sql_of(stopped) == statements
    assert stopped.error is not None
    assert "has a table of this name again" in stopped.error.message


def test_a_name_that_gets_another_table_meanwhile_waits_for_the_next_plan() -> None:
    _, plan = World(later_identity=identity("id", oid=2)).run()
    assert plan.is_incomplete
    assert not plan.cases
    assert not plan.memberships


def test_a_table_of_its_own_that_takes_the_place_of_another_has_a_successor() -> None:
    world = World(captures=True)
    u = MappedTable(
        relation_mapping(source="public.u", target="public.u"),
        LastPublished("1.1/8", "key id", 2),
        oid=2,
        is_in_sync=True,
    )
    t = MappedTable(world.mapping, LAST, oid=1, is_in_sync=True)
    now = replace(PUBLISHED, members={T: Member("8", relid=2)})
    state = replace(world.state(identity("id", oid=2), now, publication(inserts=True)), oids={2})
    plan = reconcile(state, [t, u], SOURCE)
    assert plan.cases == {T: Case(Fate.REPLACED, successor=U), U: Case(Fate.DROPPED)}
    assert plan.is_incomplete
    assert not plan.wanted.identities, "nothing of the former table may be left"
    assert plan.wanted.kept == {"1.1/7", "1.1/8"}


def test_tables_that_exchange_their_names_stay_published() -> None:
    world = World(captures=True)
    tables = [
        MappedTable(
            relation_mapping(source=str(name), target=str(name)),
            LastPublished(f"1.1/{fingerprint}", "key id", oid),
            oid=oid,
            is_in_sync=True,
        )
        for name, fingerprint, oid in ((T, 7, 1), (U, 8, 2))
    ]
    now = replace(PUBLISHED, members={T: Member("8", relid=2), U: Member("7", relid=1)})
    state = world.state(None, now, publication(inserts=True))
    swapped = {T: identity("id", oid=2), U: identity("id", name=U)}
    plan = reconcile(replace(state, identities=swapped, oids={1, 2}), tables, SOURCE)
    assert plan.cases == {T: Case(Fate.RENAMED, name=U), U: Case(Fate.RENAMED, name=T)}
    assert {member.name for member in plan.wanted.identities} == {T, U}
    assert not plan.tables


def test_a_name_that_a_table_had_for_a_while_leaves_with_the_name() -> None:
    """A pattern added the name *U* before the table was called *T* again."""
    world = World(captures=True)
    rest = MappedTable(
        relation_mapping(source="public.u", target="public.u"), LAST, oid=1, is_bare=True
    )
    kept = MappedTable(world.mapping, LAST, oid=1, is_in_sync=True)
    state = world.state(KEYED, PUBLISHED, publication(inserts=True))
    plan = reconcile(state, [kept, rest], SOURCE)
    assert plan.cases == {U: Case(Fate.DROPPED)}
    assert plan.tables == (kept,)


def test_the_changes_of_publications_build_the_set_of_tables_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A set for each member took minutes with 40,000 tables, and the source ended the stream."""
    names = [RelationName("public", f"t{number}") for number in range(50)]
    existing = {each.name: each for each in (publication(*names), publication(inserts=True))}
    build = mock.Mock(side_effect=message_table)
    module = "streamer.source.slot_and_publications.publication"
    monkeypatch.setattr(f"{module}.message_table", build)
    wanted = WantedMembers([identity("id", name=name) for name in names])
    publication_changes(SOURCE, wanted, existing, 15_00_00)
    assert build.call_count == len(existing)
