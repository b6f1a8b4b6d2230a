"""The publications of each mapped relation, and whether they were unbroken.

The bookkeeping stores two facts of every ready relation: the fingerprint of its membership in a
publication, and its replica identity as published. At every start, and every few seconds while
streaming, the guard compares them with the catalogs. The comparison has one of these results:

- *keep*: nothing is missing. A plain table may change its key: the stream shows that in order.
- *copy*: the table can become ready again, but only after a copy. It gained a replica identity, or
  identities of partitions changed, whose order is unknown.
- *copy*, too: the application dropped and re-created the table during its copy, or its column
  list lacked a column. A table that keeps its past takes its changes up to that copy's point.
- *stop*: changes are missing, or will be. The table waits in state ``error`` for an operator. A
  table whose updates can no longer be published leaves the publication of updates first, so that
  the application's own statements work.
- *block*: streamer cannot publish a table that is not ready anyway; its copy begins as soon as it
  can.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from streamer.apply.lane import MappedRelation
from streamer.error_reports import ErrorReport
from streamer.errors import (
    IdentityLostError,
    SourceContentionError,
    SourceDivergedError,
    StreamerError,
    TableGoneError,
    UnpublishedError,
)
from streamer.failpoints import failpoint
from streamer.lsn import EVERYTHING
from streamer.mapping.names import RelationName
from streamer.mapping.options import OnTableDropped
from streamer.mapping.resync import Resync, after_loss, has_own_past
from streamer.mapping.rules import SourceMapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.relations import (
    RelationRecord,
    demand_copy,
    demand_copy_at_point,
    read_bare,
    require_resync,
    set_published,
)
from streamer.remedies import Command, Remedy, resync_source, run
from streamer.runtime.renames import renamed
from streamer.source.catalog import SourceServer
from streamer.source.column_lists import ColumnLists, column_lists, unlisted
from streamer.source.connection import Connection, translating
from streamer.source.guarded_identities import read_identities, read_present_oids
from streamer.source.publication import (
    Publication,
    concerns,
    ensure_publications,
    interrupted_error,
    membership_fingerprint,
    publication_faults,
    read_publications,
    unlogged_error,
)
from streamer.source.replica_identity import NONE, RelationIdentity


@dataclass(frozen=True, slots=True)
class Known:
    """The stored facts of a relation when it was last seen."""

    mark: str | None = None
    identity: str | None = None
    relid: int | None = None


@dataclass(slots=True)
class Verdicts:
    """The consequences for relations; unnamed relations continue."""

    stopped: dict[MappedRelation, ErrorReport] = field(default_factory=dict)
    copied: dict[MappedRelation, str] = field(default_factory=dict)
    """With the reason, for the log."""
    copied_at_point: dict[MappedRelation, tuple[str, list[str] | None]] = field(
        default_factory=dict
    )
    """Tables that keep their past: the reason, and the target's columns to bring, if not all."""
    blocked: dict[MappedRelation, ErrorReport] = field(default_factory=dict)
    renamed: dict[MappedRelation, RelationName] = field(default_factory=dict)
    """Tables with other names at the source now, if it captures renames."""
    dropped: set[MappedRelation] = field(default_factory=set)
    """Tables that are gone and that need not stop."""
    replaced: set[MappedRelation] = field(default_factory=set)
    """Tables that are gone, and another one has the name. They stay as they are until the target
    has their last changes.
    """
    successors: dict[MappedRelation, MappedRelation] = field(default_factory=dict)
    """For `replaced` ones, the relation under which the table of their name has streamed so far."""
    is_unsettled: bool = False
    """Tables have gone during the look; the next one judges them."""
    contention: SourceContentionError | None = None
    """Another session kept us from changing publications; the next round judges the rest."""


def needs_copy(before: str | None, identity: RelationIdentity) -> bool:
    """Whether a relation whose replica identity was *before* needs a copy. Pure.

    Without an identity only inserts were published. Identities of partitions change one by one, and
    in between the stream brings old rows that fit neither.
    """
    if before is None or before == identity.published or not identity.is_usable:
        return False
    return before == NONE or identity.is_partitioned


class Publishing:
    """The publications of one source, for one attempt to stream it."""

    def __init__(
        self,
        source: SourceMapping,
        server: SourceServer,
        bookkeeping: Bookkeeping,
        relations: Iterable[MappedRelation],
        *,
        captures: bool = False,
    ) -> None:
        """*captures*: the source reports changes of definitions in its stream."""
        self._captures = captures
        self._source = source
        self._server = server
        self._bookkeeping = bookkeeping
        self._relations = relations
        self._known: dict[int, Known] = {}
        self._returned: set[int] = set()
        """Mapped again: streamer itself took it out of the publication, no other session did."""
        self._renewed: set[MappedRelation] = set()
        """Not in sync, and published for its next copy."""
        self._roots: dict[int, int] = {}
        """The OIDs of tables, by relation id, when they were last seen."""
        self.is_being_copied: Callable[[MappedRelation], bool] = lambda _: False
        self._lock = asyncio.Lock()

    def know(self, record: RelationRecord) -> None:
        """Take the stored facts of a relation."""
        if record.has_returned:
            self._returned.add(record.relation_id)
        self._known[record.relation_id] = Known(
            record.publication_mark, record.identity, record.source_oid
        )

    def change(self, source: SourceMapping) -> None:
        """Go by other rules from now on."""
        self._source = source

    def know_table(self, mapped: MappedRelation) -> None:
        """Know *mapped*, whose changes are held for a copy, by the table that has its name now."""
        mapped.relid = self._roots.get(mapped.relation_id, mapped.relid)

    def renew(self, mapped: MappedRelation) -> None:
        """A new copy of *mapped* is due: earlier gaps in its publication no longer matter."""
        self._renewed.discard(mapped)

    async def settle(self, plain: Connection) -> Verdicts:
        """Publish every relation as its identity allows; return the consequences for each.

        This method stores the consequences before it returns. Raises SourceDivergedError when a
        publication that was in use is gone, and SourceRejectedError.
        """
        async with self._lock:
            with translating(self._source.label):
                return await self._settle(plain)

    async def _settle(self, plain: Connection) -> Verdicts:
        verdicts = Verdicts()
        relations = list(self._relations)
        publications, identities = await self._read(plain, relations)
        self._check_there(publications, relations)
        self._identify(relations, publications)
        verdicts.renamed = self._find_renamed(relations, publications)
        relations = [mapped for mapped in relations if mapped not in verdicts.renamed]
        verdicts.dropped = await self._find_dropped(plain, relations, publications, identities)
        relations = [mapped for mapped in relations if mapped not in verdicts.dropped]
        verdicts.replaced = await self._find_replaced(plain, relations, identities)
        relations = [mapped for mapped in relations if mapped not in verdicts.replaced]
        by_name = {mapped.mapping.source: mapped for mapped in verdicts.replaced}
        identities = {name: its for name, its in identities.items() if name not in by_name}
        for mapped in [each for each, name in verdicts.renamed.items() if name in by_name]:
            # The relation of that name copies the table, or stops.
            verdicts.dropped.add(mapped)
            verdicts.successors[by_name[verdicts.renamed.pop(mapped)]] = mapped
            verdicts.is_unsettled = True
        # They stay published.
        others = await read_identities(plain, verdicts.renamed.values())
        for mapped in verdicts.renamed:  # another table may have the name
            identities.pop(mapped.mapping.source, None)
        for mapped in relations:
            if _is_in_step(mapped):
                identity = identities.get(mapped.mapping.source)
                reason = self._break(mapped, publications, identity)
                if reason is None:
                    continue
                if mapped.relation_id in self._returned:
                    verdicts.copied[mapped] = "it was not published while the mapping lacked it"
                elif self._is_of_former_table(mapped, identity) and not self._has_past(mapped):
                    verdicts.copied[mapped] = "the application replaced it during its copy"
                else:
                    verdicts.stopped[mapped] = self._with_resync(mapped, reason)
        lists = column_lists(
            [mapped.mapping for mapped in relations],
            identities.values(),
            publications.values(),
            self._server.version,
        )
        relisted = self._find_relisted(verdicts, relations, publications, identities, lists)
        # A session that took a table out of a publication does not find it back at once.
        left = {
            mapped.mapping.source
            for mapped in relations
            if (mapped.is_set_aside or mapped in verdicts.stopped)
            and not any(p.has(mapped.mapping.source) for p in publications.values())
        }
        fresh = [
            mapped
            for mapped in relations
            if not _is_in_step(mapped) and not mapped.is_set_aside and mapped not in self._renewed
        ]
        expected = {m: mark for m, mark in relisted.items() if m not in verdicts.copied}
        await self._set_marks(dict.fromkeys(expected))
        if len(expected) < len(relisted) or verdicts.copied_at_point:
            # Once the list is complete, nothing else shows that the stream lacked the column.
            await self._store_verdicts(verdicts)
        # A table stops before its updates leave the publication. It may have an identity again by
        # the next look, and nothing else would show the updates in between.
        unusable = [
            mapped
            for mapped in relations
            if (its := identities.get(mapped.mapping.source)) is not None and not its.is_usable
        ]
        known_stopped = len(verdicts.stopped)
        self._judge_identities(verdicts, unusable, identities)
        if len(verdicts.stopped) > known_stopped:
            await self._store_verdicts(verdicts)
        try:
            refused = await ensure_publications(
                plain,
                self._source,
                [
                    *(identity for name, identity in identities.items() if name not in left),
                    *(identity for name, identity in others.items() if name not in identities),
                ],
                self._server.version,
                [mapped.mapping for mapped in relations],
                {mapped.mapping.source for mapped in fresh},
                self._marks_to_keep(),
                lists,
                {mapped.mapping.source for mapped in relisted},
            )
        except SourceContentionError as exc:
            await self._set_marks(expected)  # nothing has changed
            verdicts.contention = exc
            await self._store_verdicts(verdicts)
            return verdicts
        if relisted:
            failpoint("publication.relisted")
        roots = {mapped: _root(identities, mapped) for mapped in relations}
        publications, identities = await self._read(plain, relations)
        # A name that lost its table in between needs a look of its own: that may have another.
        relations = [
            mapped for mapped in relations if roots[mapped] in (None, _root(identities, mapped))
        ]
        verdicts.is_unsettled |= len(relations) < len(roots)
        self._judge_faults(
            verdicts, relations, publications, identities, {**refused, **lists.refused}, lists
        )
        self._judge_identities(verdicts, relations, identities)
        # Before the identity: after a crash in between, the guard compares with the old one again.
        await self._store_verdicts(verdicts)
        await self._remember(verdicts, relations, publications, identities, unusable)
        self._returned.clear()
        self._renewed.update(mapped for mapped in fresh if mapped not in verdicts.blocked)
        return verdicts

    def _identify(
        self, relations: list[MappedRelation], publications: dict[str, Publication]
    ) -> None:
        """Take the OIDs of published tables, which the stream may bring by other names."""
        members = {
            f"{publication.mark}/{member.mark}": member.relid
            for publication in publications.values()
            for member in publication.members.values()
        }
        for mapped in relations:
            known = self._known.get(mapped.relation_id, Known())
            if mapped.relid is None and known.mark in members:
                mapped.relid = members[known.mark]
            elif mapped.relid is None and _is_in_step(mapped):
                mapped.relid = known.relid

    def _find_relisted(
        self,
        verdicts: Verdicts,
        relations: list[MappedRelation],
        publications: dict[str, Publication],
        identities: dict[RelationName, RelationIdentity],
        lists: ColumnLists,
    ) -> dict[MappedRelation, str | None]:
        """Return the relations whose column list has to change at once, with their marks.

        Those whose list lacks columns need a copy, and one that runs is of no use: the stream
        brought changes without them.
        """
        relisted = {}
        for mapped in relations:
            identity = identities.get(mapped.mapping.source)
            if identity is None or mapped.is_set_aside or mapped in verdicts.stopped:
                continue
            if not (_is_in_step(mapped) or mapped in self._renewed or self.is_being_copied(mapped)):
                continue  # its copy begins later
            lacking = unlisted(mapped.mapping, identity, publications.values(), lists)
            if lacking is None:
                continue
            relisted[mapped] = self._known.get(mapped.relation_id, Known()).mark
            if lacking and mapped not in verdicts.copied:
                names = ", ".join(f'"{name}"' for name in sorted(lacking))
                reason = f"its publication did not send column {names}"
                self._copy(verdicts, mapped, reason, mapped.mapping.columns_from(lacking))
        return relisted

    def _copy(
        self,
        verdicts: Verdicts,
        mapped: MappedRelation,
        reason: str,
        columns: list[str] | None = None,
    ) -> None:
        """Have *mapped* copied, or only *columns* of the target if it keeps its past."""
        if self._has_past(mapped):
            verdicts.copied_at_point[mapped] = reason, columns
        else:
            verdicts.copied[mapped] = reason

    def _has_past(self, mapped: MappedRelation) -> bool:
        """Whether the target has a past of *mapped* that a copy of all rows would break off."""
        is_first = self.is_being_copied(mapped) and (
            not mapped.is_held_to_point or mapped.chunks is not None
        )
        return mapped.mapping.rule.keeps_past and _is_in_step(mapped) and not is_first

    async def _set_marks(self, marks: Mapping[MappedRelation, str | None]) -> None:
        """Store fingerprints of memberships. None accepts any: streamer itself changes it now, and
        can die before it has read the next one.
        """
        for mapped, mark in marks.items():
            known = self._known.get(mapped.relation_id, Known())
            self._known[mapped.relation_id] = replace(known, mark=mark)
        if marks:
            await self._store({mapped.relation_id for mapped in marks})

    async def _store(self, relation_ids: Iterable[int]) -> None:
        known = {relation_id: self._known[relation_id] for relation_id in relation_ids}
        await set_published(
            self._bookkeeping,
            {key: (each.mark, each.identity, each.relid) for key, each in known.items()},
        )

    def _marks_to_keep(self) -> set[str]:
        """Return the fingerprints of members that stay, if the source captures renames.

        A session may rename a table between two of our statements.
        """
        if not self._captures:
            return set()
        known = (self._known.get(mapped.relation_id, Known()).mark for mapped in self._relations)
        return {mark for mark in known if mark is not None}

    async def _store_verdicts(self, verdicts: Verdicts) -> None:
        for mapped, error in verdicts.stopped.items():
            await require_resync(self._bookkeeping, mapped.relation_id, error)
        for mapped in verdicts.copied:
            if not self.is_being_copied(mapped) or mapped.is_held_to_point:
                mapped.resync = Resync()
            await demand_copy(self._bookkeeping, mapped.relation_id, mapped.resync)
        for mapped, (_, columns) in verdicts.copied_at_point.items():
            await demand_copy_at_point(self._bookkeeping, mapped.relation_id, columns)

    async def _read(
        self, plain: Connection, relations: list[MappedRelation]
    ) -> tuple[dict[str, Publication], dict[RelationName, RelationIdentity]]:
        # Of one moment, because tables may exchange their names.
        async with plain.transaction():
            await plain.execute("set transaction isolation level repeatable read, read only")
            publications = await read_publications(plain, self._source, self._server.version)
            names = [mapped.mapping.source for mapped in relations]
            return publications, await read_identities(plain, names)

    def _check_there(
        self, publications: dict[str, Publication], relations: list[MappedRelation]
    ) -> None:
        """Refuse to stream without a publication: the slot needs it to decode the rest."""
        there = {publication.oid for publication in publications.values()}
        lost = []
        for mapped in relations:
            mark = self._known.get(mapped.relation_id, Known()).mark
            if _is_in_step(mapped) and mark is not None and mark.partition(".")[0] not in there:
                lost.append(mapped)
        if lost:
            tables = [mapped.mapping.source for mapped in lost]
            raise SourceDivergedError(
                f'publications of source "{self._source.label}" were dropped by another session, '
                "so changes may be missing",
                hint=resync_source(
                    tables,
                    *after_loss(mapped.mapping.type for mapped in lost),
                    database=self._source.database,
                    sid=self._source.sid,
                ),
            )

    def _find_renamed(
        self,
        relations: list[MappedRelation],
        publications: dict[str, Publication],
    ) -> dict[MappedRelation, RelationName]:
        """Return the relations that follow a table to another name, with that."""
        if not self._captures:
            return {}
        by_name = {mapped.mapping.source: mapped for mapped in relations}
        marks = {
            name: self._known.get(mapped.relation_id, Known()).mark
            for name, mapped in by_name.items()
        }
        found = renamed(marks, publications.values())
        return {by_name[former]: now for former, now in found.items()}

    async def _find_dropped(
        self,
        plain: Connection,
        relations: list[MappedRelation],
        publications: dict[str, Publication],
        identities: dict[RelationName, RelationIdentity],
    ) -> set[MappedRelation]:
        """Return the relations whose table is gone, if nothing of it is at the target or
        `on_table_dropped` lets them go.

        A renamed one is still in the publication, or its OID is there.
        """
        missing = [m for m in relations if m.mapping.source not in identities]
        if not missing:
            return set()
        brought = [m for m in missing if m.mapping.rule.pattern.is_pattern and not _is_in_step(m)]
        ids = [mapped.relation_id for mapped in brought]
        bare = await read_bare(self._bookkeeping, ids) if ids else set()
        missing = [
            mapped
            for mapped in missing
            if mapped.relation_id in bare
            or mapped.mapping.rule.on_table_dropped is not OnTableDropped.STOP
        ]
        if not missing:
            return set()
        there = await read_present_oids(plain, [m.relid for m in missing if m.relid is not None])
        members = {m.mark for p in publications.values() for m in p.members.values()}
        marks = {m: self._known.get(m.relation_id, Known()).mark or "" for m in missing}
        return {
            mapped
            for mapped in missing
            if mapped.relation_id in bare
            or (mapped.relid not in there and marks[mapped].partition("/")[2] not in members)
        }

    async def _find_replaced(
        self,
        plain: Connection,
        relations: list[MappedRelation],
        identities: dict[RelationName, RelationIdentity],
    ) -> set[MappedRelation]:
        """Return the relations in sync whose table was dropped, and another has its name."""
        found = {
            mapped: mapped.relid
            for mapped in relations
            if _is_in_step(mapped)
            and mapped.relid is not None
            and mapped.relation_id not in self._returned
            and mapped.relid != (_root(identities, mapped) or mapped.relid)
            and not self.is_being_copied(mapped)
        }
        there = await read_present_oids(plain, list(found.values())) if found else set()
        return {mapped for mapped, relid in found.items() if relid not in there}

    def _break(
        self,
        mapped: MappedRelation,
        publications: dict[str, Publication],
        identity: RelationIdentity | None,
    ) -> StreamerError | None:
        """Return the reason why changes of a relation in sync may be missing."""
        if identity is None:
            return TableGoneError(
                f'table "{mapped.mapping.source}" is no longer in the source: a session dropped '
                "or renamed it; if it is gone for good, give it `on_table_dropped: keep`"
            )
        known = self._known.get(mapped.relation_id, Known())
        mark = membership_fingerprint(publications.values(), identity)
        if known.mark in (None, mark) or needs_copy(known.identity, identity):
            return None
        return interrupted_error(mapped.mapping.source)

    def _is_of_former_table(
        self, mapped: MappedRelation, identity: RelationIdentity | None
    ) -> bool:
        """Whether another table got the name of *mapped* during its copy.

        The copy may be over by now, and may have read the other table.
        """
        if identity is None:
            return self.is_being_copied(mapped)
        if self._roots.get(mapped.relation_id) in (None, identity.root.oid):
            return False
        return self.is_being_copied(mapped) or mapped.relid == identity.root.oid

    def _judge_faults(
        self,
        verdicts: Verdicts,
        relations: list[MappedRelation],
        publications: dict[str, Publication],
        identities: dict[RelationName, RelationIdentity],
        refused: Mapping[RelationName, StreamerError],
        lists: ColumnLists,
    ) -> None:
        filtered = {m.mapping.source for m in relations if m.mapping.rule.filter is not None}
        faults = publication_faults(
            self._source, publications, identities.values(), filtered, self._server.version, lists
        )
        for mapped in relations:
            name = mapped.mapping.source
            identity = identities.get(name)
            error: StreamerError | None = None
            if identity is None:
                error = TableGoneError(
                    f'table "{name}" is not in the source',
                    hint="create it there, correct its name in `tables`, or take it out of there",
                )
            elif (unlogged := unlogged_error(identity)) is not None:
                error = unlogged
            elif name in refused:
                error = refused[name]
            else:
                for fault in faults:
                    if concerns(fault, publications[fault.publication], identity):
                        error = fault.error()
            if error is None or mapped.is_set_aside:
                continue
            if mapped in verdicts.stopped:
                if isinstance(error, UnpublishedError):  # the reason why it may lack changes
                    verdicts.stopped[mapped] = self._with_resync(mapped, error)
            elif _is_in_step(mapped) and mapped not in verdicts.copied:
                verdicts.stopped[mapped] = self._with_resync(mapped, error)
            else:
                verdicts.blocked[mapped] = ErrorReport.of(error)

    def _judge_identities(
        self,
        verdicts: Verdicts,
        relations: list[MappedRelation],
        identities: dict[RelationName, RelationIdentity],
    ) -> None:
        for mapped in relations:
            identity = identities.get(mapped.mapping.source)
            if identity is None or mapped in verdicts.stopped or mapped in verdicts.blocked:
                continue
            if mapped in verdicts.copied:
                continue
            before = self._known.get(mapped.relation_id, Known()).identity
            if _is_in_step(mapped):
                if before not in (None, NONE) and not identity.is_usable:
                    again = self._resync_command(mapped)
                    then = "` prints; streamer then copies the table again. "
                    then += "To continue with inserts only, run: "
                    if has_own_past(mapped.mapping.type):
                        then = "` prints; then run: "
                    hint = Remedy.of("run the statements that `", run("check"), then, again)
                    lost = IdentityLostError(
                        f'table "{mapped.mapping.source}": {identity.obstacle}, so its updates and '
                        "deletes are no longer published",
                        hint=hint,
                    )
                    verdicts.stopped[mapped] = ErrorReport.of(lost)
                elif needs_copy(before, identity):
                    self._copy(verdicts, mapped, "its replica identity has changed")
            elif mapped.is_set_aside and before == NONE and identity.is_usable:
                if has_own_past(mapped.mapping.type):
                    continue  # an operator decides on the gap
                verdicts.copied[mapped] = "it has a replica identity again"

    async def _remember(
        self,
        verdicts: Verdicts,
        relations: list[MappedRelation],
        publications: dict[str, Publication],
        identities: dict[RelationName, RelationIdentity],
        unusable: list[MappedRelation],
    ) -> None:
        """*unusable*: relations without a usable identity as the publications were changed."""
        changed = {}
        for mapped in relations:
            identity = identities.get(mapped.mapping.source)
            before = self._known.get(mapped.relation_id, Known())
            if identity is None:
                continue
            self._roots[mapped.relation_id] = identity.root.oid
            mark = membership_fingerprint(publications.values(), identity)
            known = Known(mark, identity.published, identity.root.oid)
            if mapped in verdicts.stopped or (
                mapped.is_set_aside and mapped not in verdicts.copied
            ):
                # It stays known how it was, but for an identity that it lost: to gain one helps.
                has_lost = mapped in unusable or not identity.is_usable
                lost = NONE if has_lost else before.identity
                known = replace(before, identity=lost)
            elif mapped.relid is None:  # later on, the copy knows which table it has read
                mapped.relid = identity.root.oid
            if known != before:
                changed[mapped.relation_id] = known
        if changed:
            self._known |= changed
            await self._store(changed)

    def replaced(self, mapped: MappedRelation) -> ErrorReport:
        """Say that the stream brings another table under the name of *mapped*."""
        name = mapped.mapping.source
        error = TableGoneError(f'another table of the source has the name "{name}" now')
        return self._with_resync(mapped, error)

    def _with_resync(self, mapped: MappedRelation, error: StreamerError) -> ErrorReport:
        first = error.remedy or "see to it that it is there and published"
        again = self._resync_command(mapped)
        remedy = Remedy.of(first, "; changes may be missing, so then run: ", again)
        return ErrorReport(f"{error.message}; {remedy}", error.code, remedy)

    def _resync_command(self, mapped: MappedRelation) -> Command:
        name = str(mapped.mapping.source)
        options, source = after_loss([mapped.mapping.type]), self._source
        return run("resync", name, *options, database=source.database, sid=source.sid)


def _root(identities: dict[RelationName, RelationIdentity], mapped: MappedRelation) -> int | None:
    identity = identities.get(mapped.mapping.source)
    return None if identity is None else identity.root.oid


def _is_in_step(mapped: MappedRelation) -> bool:
    """Whether *mapped* needs no further copy."""
    return mapped.skip_through_lsn != EVERYTHING
