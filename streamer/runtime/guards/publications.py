"""The publications of a source: reads the facts about publications, and executes the plan.

The bookkeeping stores how every ready relation was published: the fingerprint of its membership,
its replica identity, and the OID of its table. At every start, and whenever the guard finds changed
facts in the catalogs, `streamer.runtime.guards.reconcile` makes a plan.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_columns import set_published
from streamer.bookkeeping.relation_records import RelationRecord, read_bare
from streamer.bookkeeping.relation_states import demand_copy, demand_copy_at_point, require_resync
from streamer.control.resync_options import Resync
from streamer.control.table_state import Need, TableState
from streamer.errors.error_classes import IdentityLostError, SourceContentionError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.runtime.guards.publication_plan import (
    Case,
    Fate,
    LastPublished,
    MappedTable,
    PublicationPlan,
    SourceState,
)
from streamer.runtime.guards.reconcile import (
    conclude,
    members_by_fingerprint,
    oid_of,
    reconcile,
    renamed,
)
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, translating
from streamer.source.copy_grants import RoleRights, read_role_rights
from streamer.source.guarded_identities import (
    read_candidates,
    read_identities,
    read_present_oids,
)
from streamer.source.replica_identity import NONE, RelationIdentity
from streamer.source.slot_and_publications.publication import (
    Publication,
    ensure_publications,
    may_create_publications,
    read_publications,
)
from streamer.util.failpoints import failpoint

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import MappedRelation


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The stored consequences for relations. Relations without a case continue."""

    cases: "Mapping[MappedRelation, Case]"
    is_incomplete: bool = False
    """Some tables are left to the next check."""
    contention: SourceContentionError | None = None
    """A session blocked the change of publications; the next check decides on these tables."""


async def read_state(
    plain: Connection,
    source: SourceMapping,
    version: int,
    tables: Iterable[MappedTable],
    *,
    captures: bool,
) -> SourceState:
    """Read the facts of *source* that decide about *tables*."""
    tables = list(tables)
    # All facts of one moment, because tables may swap their names.
    async with plain.transaction():
        await plain.execute("set transaction isolation level repeatable read, read only")
        publications = await read_publications(plain, source, version)
        fingerprints = {table.name: table.last.fingerprint for table in tables}
        moves = renamed(fingerprints, publications.values()) if captures else {}
        identities = await read_identities(plain, dict.fromkeys([*fingerprints, *moves.values()]))
        oids = {identity.root.oid for identity in identities.values()}
        oids |= {m.relid for p in publications.values() for m in p.members.values() if m.relid}
        stored = {oid for table in tables for oid in (table.oid, table.last.oid) if oid} - oids
        if stored:
            oids |= await read_present_oids(plain, stored)
        unusable = [identity for identity in identities.values() if not identity.is_usable]
        candidates = await read_candidates(plain, unusable)
        may_create = await may_create_publications(plain, source, publications, identities.values())
        rights = await _read_rights(plain, tables, identities, publications.values())
    return SourceState(
        publications, identities, oids, version, captures, candidates, may_create, rights
    )


async def _read_rights(
    plain: Connection,
    tables: Iterable[MappedTable],
    identities: Mapping[RelationName, RelationIdentity],
    publications: Iterable[Publication],
) -> RoleRights:
    """Return the rights of streamer's role, if a table is gone, back or no longer published."""
    tables, publications = list(tables), list(publications)
    read = [
        table.name
        for table in tables
        if table.name in identities and (table.was_gone or _is_removed(table, publications))
    ]
    if not read and all(t.is_set_aside or t.name in identities for t in tables):
        return RoleRights()
    return await read_role_rights(plain, [identities[name].root.oid for name in read])


def _is_removed(table: MappedTable, publications: Iterable[Publication]) -> bool:
    is_expected = table.is_in_sync or table.was_unpublished
    return is_expected and not any(publication.has(table.name) for publication in publications)


def last_published(record: RelationRecord) -> LastPublished:
    """Return how the table of *record* was published when streamer last saw the table.

    A table that stopped for its lost identity has no identity: streamer stores the error first, and
    may die before it stores the identity.
    """
    last = LastPublished(
        record.publication_membership,
        record.identity,
        record.source_oid,
        record.identity_remedy,
    )
    has_lost = record.error is not None and record.error.code == IdentityLostError.code
    return _without_identity(last) if has_lost else last


def _without_identity(last: LastPublished) -> LastPublished:
    return replace(last, identity=NONE)


class Publishing:
    """The publications of a source, for one attempt to stream the source."""

    def __init__(
        self,
        source: SourceMapping,
        server: SourceServer,
        bookkeeping: Bookkeeping,
        relations: "Iterable[MappedRelation]",
        *,
        captures: bool = False,
    ) -> None:
        """*captures*: the source reports changes of definitions in its stream."""
        self._captures = captures
        self._source = source
        self._server = server
        self._bookkeeping = bookkeeping
        self._relations = relations
        self._memberships: dict[int, LastPublished] = {}
        self._returned: set[int] = set()
        self._renewed: set[MappedRelation] = set()
        self._roots: dict[int, int] = {}
        self.is_being_copied: Callable[[MappedRelation], bool] = lambda _: False
        self._lock = asyncio.Lock()

    def load(self, record: RelationRecord) -> None:
        """Read the stored facts of a relation."""
        if record.has_returned:
            self._returned.add(record.relation_id)
        self._memberships[record.relation_id] = last_published(record)

    def change(self, source: SourceMapping) -> None:
        """Use the rules of *source* from now on."""
        self._source = source

    def bind(self, mapped: "MappedRelation") -> None:
        """Bind *mapped*, whose changes are held for a copy, to the table with its name now."""
        mapped.relid = self._roots.get(mapped.relation_id, mapped.relid)

    def renew(self, mapped: "MappedRelation") -> None:
        """Ignore earlier gaps in the publication of *mapped*: a new copy is due."""
        self._renewed.discard(mapped)

    async def reconcile(self, plain: Connection) -> Reconciled:
        """Publish every relation as its identity allows; return the consequences for each.

        This method stores the consequences before it returns. Raises UnpublishedError when a
        publication in use is gone, and SourceRejectedError.
        """
        async with self._lock:
            with translating(self._source.label):
                relations = {mapped.mapping.source: mapped for mapped in self._relations}
                state = await self._read(plain, relations)
                self._store_oids(state, relations)
                tables = self._tables(relations, await self._read_bare(relations, state))
                plan = reconcile(state, tables, self._source)
                return await self._execute(plan, plain, relations)

    async def _execute(
        self,
        plan: PublicationPlan,
        plain: Connection,
        relations: "Mapping[RelationName, MappedRelation]",
    ) -> Reconciled:
        """Store and publish as *plan* says, so that a crash in between loses no change.

        1. *The consequences come before the changes of publications.* Once a column list is
           complete, or a table has an identity again, the catalogs no longer show that the stream
           lacked changes.
        2. *A fingerprint that streamer itself changes is cleared first.* If this process dies
           before it has read the next fingerprint, the table continues without an operator.
        3. *The consequences come before the new facts.* After a crash in between, the next plan
           compares with the former facts again.
        4. *The loss of an identity is stored before publications change.* Otherwise a foreign
           session could delay the change, and give the table an identity meanwhile.
        """
        former = {name: self._last(relations[name]) for name in plan.cleared}
        cleared = {name: replace(last, fingerprint=None) for name, last in former.items()}
        await self._store(cleared, relations)
        stopped = await self._store_cases(plan.cases, relations)
        lost = [name for name, case in plan.cases.items() if case.has_lost_identity]
        await self._store(
            {name: _without_identity(self._last(relations[name])) for name in lost}, relations
        )
        try:
            refused = await ensure_publications(
                plain, self._source, plan.wanted, self._server.version
            )
        except SourceContentionError as exc:
            await self._store(former, relations)  # no publication has changed
            return self._reconciled(plan, relations, stopped, exc)
        if plan.wanted.relisted:
            failpoint("publication.relisted")
        staying = {table.name: relations[table.name] for table in plan.tables}
        state = await self._read(plain, staying)
        earlier, plan = plan, conclude(plan, state, self._tables(staying), refused, self._source)
        new = {name: case for name, case in plan.cases.items() if case != earlier.cases.get(name)}
        stopped |= await self._store_cases(new, relations)
        for name, membership in plan.memberships.items():
            mapped, root = relations[name], state.identities[name].root.oid
            self._roots[mapped.relation_id] = root
            if mapped.relid is None and membership.oid == root:
                mapped.relid = root
        await self._store(plan.memberships, relations)
        self._returned.clear()
        obstructed = {name for name, case in plan.cases.items() if case.error is not None}
        self._renewed.update(relations[name] for name in plan.wanted.fresh - obstructed)
        return self._reconciled(plan, relations, stopped)

    def _reconciled(
        self,
        plan: PublicationPlan,
        relations: "Mapping[RelationName, MappedRelation]",
        stopped: "Mapping[MappedRelation, TableState]",
        contention: SourceContentionError | None = None,
    ) -> Reconciled:
        """*stopped*: the states of tables just after streamer stored their stops. A table for which
        an operator has requested a copy since then continues.
        """
        requested = {
            mapped
            for mapped, state in stopped.items()
            if mapped.state.awaits_snapshot and not state.awaits_snapshot
        }
        cases = {relations[name]: case for name, case in plan.cases.items()}
        cases = {m: c for m, c in cases.items() if c.fate is not Fate.STOP or m not in requested}
        return Reconciled(cases, plan.is_incomplete or contention is not None, contention)

    # ---- facts ---------------------------------------------------------------------------------

    async def _read(
        self, plain: Connection, relations: "Mapping[RelationName, MappedRelation]"
    ) -> SourceState:
        tables, version = self._tables(relations), self._server.version
        return await read_state(plain, self._source, version, tables, captures=self._captures)

    async def _read_bare(
        self, relations: "Mapping[RelationName, MappedRelation]", state: SourceState
    ) -> set[int]:
        """Return the missing relations that a pattern named and of which the target contains no
        row.

        No operator expects these relations.
        """
        ids = [
            mapped.relation_id
            for name, mapped in relations.items()
            if name not in state.identities
            and mapped.mapping.rule.pattern.is_pattern
            and not _is_in_sync(mapped)
        ]
        return await read_bare(self._bookkeeping, ids) if ids else set()

    def _tables(
        self,
        relations: "Mapping[RelationName, MappedRelation]",
        bare: Iterable[int] = (),
    ) -> list[MappedTable]:
        return [
            MappedTable(
                mapped.mapping,
                self._last(mapped),
                oid=mapped.relid,
                seen_oid=self._roots.get(mapped.relation_id),
                is_in_sync=_is_in_sync(mapped),
                is_set_aside=mapped.state.is_lost,
                error=mapped.state.error,
                is_being_copied=self.is_being_copied(mapped),
                is_being_read=mapped.state.is_being_read,
                is_renewed=mapped in self._renewed,
                has_history=self._has_history(mapped),
                has_returned=mapped.relation_id in self._returned,
                is_bare=mapped.relation_id in bare,
            )
            for mapped in relations.values()
        ]

    def _has_history(self, mapped: "MappedRelation") -> bool:
        """Whether the target holds earlier row versions that a copy of all rows would interrupt."""
        is_first = self.is_being_copied(mapped) and (mapped.state.need is not Need.PART)
        return mapped.mapping.rule.keeps_history and _is_in_sync(mapped) and not is_first

    def _last(self, mapped: "MappedRelation") -> LastPublished:
        return self._memberships.get(mapped.relation_id, LastPublished())

    # ---- effects -------------------------------------------------------------------------------

    def _store_oids(
        self, state: SourceState, relations: "Mapping[RelationName, MappedRelation]"
    ) -> None:
        """Record the OIDs of published tables: the stream may send these tables under new names."""
        members = members_by_fingerprint(state.publications.values())
        for mapped in relations.values():
            if mapped.relid is None:
                is_in_sync = _is_in_sync(mapped)
                mapped.relid = oid_of(self._last(mapped), members, is_in_sync=is_in_sync)

    async def _store(
        self,
        memberships: Mapping[RelationName, LastPublished],
        relations: "Mapping[RelationName, MappedRelation]",
    ) -> None:
        changed = {
            relations[name].relation_id: membership
            for name, membership in memberships.items()
            if membership != self._last(relations[name])
        }
        if changed:
            self._memberships |= changed
            await set_published(
                self._bookkeeping,
                {
                    key: (m.fingerprint, m.identity, m.oid, m.identity_remedy)
                    for key, m in changed.items()
                },
            )

    async def _store_cases(
        self,
        cases: Mapping[RelationName, Case],
        relations: "Mapping[RelationName, MappedRelation]",
    ) -> "dict[MappedRelation, TableState]":
        """Store *cases*; return the states of stopped tables, as of just after the store."""
        stopped = {}
        for name, case in cases.items():
            mapped = relations[name]
            match case.fate:
                case Fate.STOP:
                    assert case.error is not None
                    await require_resync(self._bookkeeping, mapped.relation_id, case.error)
                    stopped[mapped] = mapped.state
                case Fate.COPY:
                    if not self.is_being_copied(mapped) or mapped.state.follows:
                        mapped.become(mapped.state.with_options(Resync()))
                    options = mapped.state.resync
                    await demand_copy(self._bookkeeping, mapped.relation_id, options)
                case Fate.COPY_AT_POINT:
                    await demand_copy_at_point(self._bookkeeping, mapped.relation_id, case.columns)
        return stopped


def _is_in_sync(mapped: "MappedRelation") -> bool:
    """Whether *mapped* needs all later changes from the stream."""
    return mapped.state.needs_stream
