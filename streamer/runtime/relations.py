"""The mapped relations of one source while it streams: their states, and the lanes they are in.

With ``consistency: table`` every relation has a lane of its own. With ``consistency: transaction``
those in sync share one, and a relation in copy has its own until then. Relations whose target
tables are connected by foreign keys share one too, where the role cannot keep the keys from firing.
"""

import asyncio
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from streamer.apply.lane import Hold, Lane, LaneOwner, MappedRelation, RelationSource, holds
from streamer.decode.pgoutput import Relation
from streamer.decode.text_conversion import TextConversion
from streamer.error_reports import ErrorReport, TableWait
from streamer.errors import MappingError
from streamer.lsn import EVERYTHING, Lsn
from streamer.mapping.names import RelationName
from streamer.mapping.options import OnTableDropped
from streamer.mapping.rules import RelationMapping, SourceMapping, former_names, resolve
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.registered_relations import forget_relation
from streamer.progress.relation_states import set_waiting
from streamer.progress.relations import RelationRecord, read_relation_records
from streamer.progress.table_state import TO_POINT, Need, State, TableState
from streamer.progress.tracker import ProgressTracker
from streamer.runtime.lag import lane_lag_seconds
from streamer.runtime.services import Health, Services
from streamer.source.catalog import SourceRelation, read_relation_names, read_relations
from streamer.source.clock import SourceClock
from streamer.source.connection import Connection
from streamer.target.claim import Claim
from streamer.target.foreign_key_groups import Groups, read_groups


def worker_number(source_label: str, lane_name: str, worker_count: int) -> int:
    """Return the worker for a lane: the same in every process, however it hashes strings."""
    return zlib.crc32(f"{source_label}\0{lane_name}".encode()) % worker_count


class Relations:
    """See the module. Owned by a pipeline, which owns the lanes too."""

    def __init__(
        self,
        label: str,
        services: Services,
        owner: LaneOwner,
        health: Health,
        tracker: ProgressTracker,
    ) -> None:
        self._label = label
        self._services = services
        self._owner = owner
        self._health = health
        self._tracker = tracker
        self.clock = SourceClock()
        """That of the source, measured against ours."""
        self.missing: set[MappedRelation] = set()
        """Relations that the source lacked when their copy began."""
        self._by_id: dict[int, MappedRelation] = {}
        self._by_name: dict[RelationName, MappedRelation] = {}
        self._by_relid: dict[int, tuple[Relation, MappedRelation | None]] = {}
        self._lanes: dict[MappedRelation, Lane] = {}
        self._shared_lanes: dict[RelationName | None, Lane] = {}
        """Lanes of several relations, by the first table of their group; None for all."""
        self._followed: dict[MappedRelation, tuple[Lane, Lsn]] = {}
        """The lane that a relation left, and the end of its changes there."""
        self._groups: Groups = {}
        self.met_another = asyncio.Event()
        """The stream has brought the definition of a table that is not mapped."""
        self.positions_wanted = asyncio.Event()
        """An operator waits for tables, so the process has to store their positions."""
        self.asked: set[int] = set()
        """The ids of relations whose states tell the outcomes of operators' requests."""
        self.requested = asyncio.Event()
        """There may be a request, or the outcome of a request."""

    @property
    def source(self) -> SourceMapping:
        """The source, with the rules that hold now."""
        return self._owner.source

    def __iter__(self) -> Iterator[MappedRelation]:
        return iter(list(self._by_id.values()))

    def __contains__(self, mapped: MappedRelation) -> bool:
        """Whether *mapped* is still one of them: the guard of the source may take it out during
        any await.
        """
        return self._by_id.get(mapped.relation_id) is mapped

    def lags(self) -> dict[str, float]:
        """Return the lag of each table in seconds, by its name."""
        return {str(mapped.mapping.source): self.lag_seconds(mapped) for mapped in self}

    def lag_seconds(self, mapped: MappedRelation) -> float:
        return lane_lag_seconds(self.lane(mapped), self.clock, time.monotonic())

    def get(self, relation_id: int) -> MappedRelation | None:
        return self._by_id.get(relation_id)

    def find(self, relation: Relation) -> MappedRelation | None:
        """Return the relation that a RELATION message describes, if it is mapped."""
        known = self._by_relid.get(relation.relid)
        if known is not None and known[0] is relation:
            return known[1]
        mapped = self._by_name.get(RelationName(relation.namespace, relation.name))
        if mapped is None or mapped.relid != relation.relid:
            # A session has renamed the table since, or is about to in the stream.
            renamed = (each for each in self._by_id.values() if each.relid == relation.relid)
            mapped = next(renamed, mapped)
        if mapped is None or mapped.relid is not None:  # later on, another one may have the OID
            self._by_relid[relation.relid] = (relation, mapped)
        return mapped

    def meets_unmapped(self) -> None:
        self.met_another.set()

    # ---- states --------------------------------------------------------------------------------

    @property
    def are_ready(self) -> bool:
        """Whether every relation is in sync."""
        return all(mapped.state.shown is State.READY for mapped in self)

    def in_step(self) -> list[MappedRelation]:
        """Return the relations that are."""
        return [mapped for mapped in self if mapped.state.shown is State.READY]

    def become(self, mapped: MappedRelation, state: TableState) -> None:
        """Give *state* to *mapped*: show the state, and hold its lane as the state says.

        The caller stores the state.
        """
        former, before = mapped.state, self._lanes.get(mapped)
        mapped.become(state)
        if mapped.relation_id in self.asked:
            self.requested.set()
        self._show(mapped)
        if state.need is Need.NOTHING:
            lane = before or self._home_lane(mapped)
        else:
            lane = self._own_lane(mapped)
        self._lanes[mapped] = lane
        if state.need is not Need.PART:
            self._followed.pop(mapped, None)
        elif before not in (None, lane):
            assert before is not None
            self._followed[mapped] = (before, self._tracker.newest_lsn)
        if reasons := holds(state) & ~Hold.POINT:
            lane.keep(reasons)
        self._hold_to_point(mapped)
        if before is lane:
            self._release(lane, holds(former) & ~holds(state))
        elif before is not None:
            self._release(before, holds(former))

    async def settle(self, mapped: MappedRelation, state: TableState) -> None:
        """Give *state* to *mapped*; wait until none of the changes that were dispatched before is
        on its way to the target.
        """
        before, newest_lsn = self._lanes[mapped], self._tracker.newest_lsn
        self.become(mapped, state)
        before.changed.set()  # a drainer gives up a large transaction of which more is to come
        await until_applied(before, newest_lsn)

    def lose(self, mapped: MappedRelation, error: ErrorReport) -> None:
        """Drop the changes of *mapped* from now on, so that they retain no WAL at the source."""
        self.become(mapped, mapped.state.lost(error))
        self._lanes[mapped].release(Hold.ERROR)

    def _show(self, mapped: MappedRelation) -> None:
        table, state = str(mapped.mapping.source), mapped.state
        self._health.table_states[table] = state.shown
        if state.error is None:
            self._health.table_errors.pop(table, None)
        else:
            self._health.table_errors[table] = state.error

    def _hold_to_point(self, mapped: MappedRelation) -> None:
        """Let a copy at a point find the changes before the point applied, and no others."""
        if mapped.state.need in TO_POINT:
            is_behind = self.followed(mapped) is not None
            self._lanes[mapped].hold_to_point(None if is_behind else mapped.state.drains_to)

    def _release(self, lane: Lane, reasons: Hold) -> None:
        """Release *lane* from *reasons* of one of its relations, unless others have them too."""
        if reasons and lane.table is None:
            for other in self.in_lane(lane):
                reasons &= ~holds(other.state)
        if reasons:
            lane.release(reasons)

    async def tell_waiting(
        self, relations: Iterable[MappedRelation], wait: TableWait | None
    ) -> None:
        """Show and store why *relations* wait; None if they wait no longer."""
        relations = list(relations)
        for mapped in relations:
            table = str(mapped.mapping.source)
            if wait is None:
                self._health.table_waits.pop(table, None)
            else:
                self._health.table_waits[table] = wait
        ids = [mapped.relation_id for mapped in relations]
        await set_waiting(self._services.bookkeeping, ids, wait)

    # ---- lanes ---------------------------------------------------------------------------------

    def lane(self, mapped: MappedRelation) -> Lane:
        return self._lanes[mapped]

    def lane_now(self, mapped: MappedRelation) -> Lane | None:
        """Return the lane of a relation, even of one that left the mapping."""
        return self._lanes.get(mapped)

    def lanes(self) -> set[Lane]:
        """Return all lanes there are."""
        return {*self._lanes.values(), *self._shared_lanes.values()}

    def in_lane(self, lane: Lane) -> list[MappedRelation]:
        return [mapped for mapped, its in self._lanes.items() if its is lane]

    def add(
        self, mapped: MappedRelation, record: RelationRecord, *, is_to_declare: bool = False
    ) -> None:
        """Add a relation in the state its record tells; its changes are held where that says so."""
        self._by_id[mapped.relation_id] = mapped
        self._by_name[mapped.mapping.source] = mapped
        self._by_relid.clear()
        state = replace(record.table_state, is_to_declare=is_to_declare)
        mapped.quarantine.forget(record.quarantined)
        self._health.quarantined[str(mapped.mapping.source)] = record.quarantined
        self.become(mapped, state)
        if state.need is not Need.NOTHING:
            return
        lane = self._lanes[mapped]
        if record.quarantined:
            lane.keep(Hold.QUARANTINE)
        if state.shown is State.ERROR:
            lane.keep(Hold.ERROR, record.error and record.error.text)
        elif state.shown is State.CATCHING_UP:
            lane.keep(Hold.BUSY)  # drained at once, and ready

    def replace_mapping(self, mapped: MappedRelation, mapping: RelationMapping) -> None:
        """Apply *mapped* by another rule from the next plan on; source and target stay the same."""
        if mapped.mapping != mapping:
            mapped.mapping = mapping
            mapped.plan = None

    def shares_home(self, mapped: MappedRelation) -> bool:
        """Whether *mapped* shares a lane with others once it is in sync."""
        return self._services.by_transaction or mapped.mapping.target in self._groups

    def remove(self, mapped: MappedRelation) -> Lane:
        """Take nothing more of a relation; return its lane, which may still hold changes."""
        mapped.skip_through_lsn = EVERYTHING
        del self._by_id[mapped.relation_id]
        del self._by_name[mapped.mapping.source]
        self._by_relid.clear()
        self._followed.pop(mapped, None)
        table = str(mapped.mapping.source)
        self._health.table_waits.pop(table, None)
        self._health.table_states.pop(table, None)
        self._health.table_errors.pop(table, None)
        self._health.quarantined.pop(table, None)
        return self._lanes.pop(mapped)

    def awaits_copy(self, mapped: MappedRelation) -> bool:
        """Whether *mapped* needs a copy, or a declaration to be in sync, and is not paused."""
        needs_copy = mapped.skip_through_lsn == EVERYTHING or mapped.state.follows
        return needs_copy and not mapped.state.is_paused

    def moved_on(self, lane: Lane) -> None:
        """*lane* is done with more of its changes: relations that have left it may come next."""
        for mapped in [each for each, (before, _) in self._followed.items() if before is lane]:
            self.followed(mapped)

    def is_behind(self, mapped: MappedRelation, lsn: Lsn) -> bool:
        """Whether the stream has changes of *mapped* to apply that committed before *lsn*.

        A relation that waits for a copy of all rows drops its changes, and the copy's snapshot is
        newer than all of them. So it holds nothing back, or both could wait for ever.
        """
        if mapped.skip_through_lsn == EVERYTHING:
            return False
        before = self.followed(mapped)
        lanes = [self._lanes[mapped], *([] if before is None else [before])]
        return any(lane.is_behind(lsn) for lane in lanes)

    def may_follow_chunks(self, mapped: MappedRelation) -> bool:
        """Whether changes of some rows may be left out: foreign keys could refer to those."""
        return mapped.mapping.target not in self._groups

    def followed(self, mapped: MappedRelation) -> Lane | None:
        """Return the lane that *mapped* has left, while that is not done with its changes."""
        if mapped not in self._followed:
            return None
        lane, through_lsn = self._followed[mapped]
        behind = lane.pending.flush_lsn_max
        if behind is not None and behind < through_lsn:
            return lane
        del self._followed[mapped]
        self._hold_to_point(mapped)
        return None

    def _own_lane(self, mapped: MappedRelation) -> Lane:
        lane = self._lanes.get(mapped)
        if lane is None or lane in self._shared_lanes.values():
            lane = self._lanes[mapped] = self._new_lane(str(mapped.mapping.source))
        return lane

    def quarantine_changed(self, mapped: MappedRelation) -> None:
        """Another number of rows is in quarantine now: hold the lanes where that asks for it."""
        lane = self._lanes.get(mapped)
        if lane is None:
            return
        self._health.quarantined[str(mapped.mapping.source)] = mapped.quarantine.count
        for each in {lane, self._home_lane(mapped)}:
            if any(other.quarantine.count for other in self.in_lane(each)):
                each.keep(Hold.QUARANTINE)
            else:
                each.release(Hold.QUARANTINE)

    def may_go_home(self, lane: Lane) -> None:
        """Let a lane with rows in quarantine end, if its relations belong in another."""
        for mapped in self.in_lane(lane):
            home = self._home_lane(mapped)
            if home is not lane and Hold.QUARANTINE in lane.hold:
                home.keep(Hold.QUARANTINE)
                lane.release(Hold.QUARANTINE)

    def go_home(self, lane: Lane) -> None:
        """Put the relations of *lane*, which holds nothing any more, where they belong."""
        for mapped in self.in_lane(lane):
            self._lanes[mapped] = self._home_lane(mapped)

    def _home_lane(self, mapped: MappedRelation) -> Lane:
        """Return the lane where *mapped* belongs once it is in sync."""
        group = self._groups.get(mapped.mapping.target)
        if not self._services.by_transaction and group is None:
            lane = self._lanes.get(mapped)
            return lane or self._new_lane(str(mapped.mapping.source))
        key = None if self._services.by_transaction else group
        if key not in self._shared_lanes:
            self._shared_lanes[key] = self._new_lane(None, key)
        return self._shared_lanes[key]

    async def read_groups(self, mappings: Iterable[RelationMapping]) -> Groups:
        """Return the tables of *mappings* that need one lane, because foreign keys connect them."""
        async with self._services.bookkeeping.connection() as target:
            return await read_groups(target, [mapping.target for mapping in mappings])

    def set_groups(self, groups: Groups) -> None:
        """Give a lane to each of *groups*, before the first relation."""
        self._groups = groups

    def fits(self, groups: Groups) -> bool:
        """Whether the relations that are here can keep their lanes under *groups*."""
        targets = [mapped.mapping.target for mapped in self]
        return all(groups.get(name) == self._groups.get(name) for name in targets)

    def _new_lane(self, table: str | None, group: RelationName | None = None) -> Lane:
        """Make a lane, for one table alone, for a group of tables or for all."""
        workers, name = self._services.workers, table or str(group or self._label)
        number = worker_number(self._label, name, len(workers))
        return Lane(
            f"{self._label} {name}",
            workers[number],
            self._owner,
            self._services.spools.lane_spool,
            table=table,
        )


async def forget_unmapped(
    bookkeeping: Bookkeeping, source_id: int, mappings: Iterable[RelationMapping]
) -> None:
    """Forget the progress of relations that are no longer mapped."""
    wanted = {str(mapping.source) for mapping in mappings}
    for record in await read_relation_records(bookkeeping, source_id):
        if record.source not in wanted:
            await forget_relation(bookkeeping, record.relation_id)


async def until_applied(lane: Lane, through_lsn: Lsn) -> None:
    """Wait until nothing of transactions up to *through_lsn* is on its way to the target."""
    while lane.is_applying(through_lsn):
        lane.changed.clear()
        await lane.changed.wait()


async def resolve_at(
    plain: Connection,
    source: SourceMapping,
    target_namespace: str,
    known: Iterable[RelationName] = (),
) -> tuple[list[RelationMapping], dict[RelationName, SourceRelation]]:
    """Apply the rules of *source* to its relations. Raises MappingError.

    Tables that rules name and the source lacks are mapped too, without a definition, so that they
    do not disturb the others. So are *known* ones, of which the target has rows: that a table is
    gone has to show, see `on_table_dropped`.
    """
    names = await read_relation_names(plain)
    missing = {
        name
        for name, rule in source.exact_names.items()
        if rule.on_table_dropped is OnTableDropped.STOP
    }
    if missing := missing.union(known) - set(names):
        names += missing - former_names(source, names, target_namespace)
    mappings = resolve(source, names, target_namespace)
    if not mappings:
        raise MappingError(
            f'no table of source "{source.label}" matches its rules',
            hint="correct `tables` in the configuration",
        )
    return mappings, await read_relations(plain, [mapping.source for mapping in mappings])


def relation_source(
    source: SourceMapping,
    relation: SourceRelation | None,
    binary_types: frozenset[int],
    claim: Claim,
    conversion: TextConversion | None = None,
) -> RelationSource:
    """Return the facts about a relation that applying needs; few, if the source lacks it."""
    facts = RelationSource(source.database, source.sid, claim, binary_types, conversion=conversion)
    return facts if relation is None else facts.with_definition(relation)
