"""The mapped relations of one source while it streams: their states and their lanes.

With ``consistency: table`` every relation has its own lane. With ``consistency: transaction``,
relations in sync share a lane, and a relation has its own lane until its copy ends. Relations whose
target tables are connected by foreign keys share a lane, too, where the role cannot disable the
keys.
"""

import asyncio
import itertools
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from sys import intern
from typing import NamedTuple

from streamer.apply.lanes.lane import Hold, Lane, LaneOwner, MappedRelation, RelationSource, holds
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.registered_relations import forget_relation
from streamer.bookkeeping.relation_records import RelationRecord, read_relation_records
from streamer.bookkeeping.relation_states import set_waiting
from streamer.control.progress_tracker import ProgressTracker
from streamer.control.table_state import TO_POINT, Need, State, TableState
from streamer.decode.pgoutput import Relation
from streamer.decode.text_conversion import TextConversion
from streamer.errors.error_classes import MappingError, UnpublishedError
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import OnTableDropped
from streamer.mapping.rules import RelationMapping, SourceMapping, former_names, resolve_new
from streamer.runtime.services import Health, Services
from streamer.runtime.tables.lag import lane_lag_seconds
from streamer.source.catalog import (
    SourceRelation,
    read_extension_tables,
    read_relation_names,
    read_relations,
)
from streamer.source.connection import Connection
from streamer.source.server.source_clock import SourceClock
from streamer.target.fencing_token import FencingToken
from streamer.target.foreign_key_groups import Groups, read_groups
from streamer.util.lsn import LSN_MAX, Lsn


def worker_number(source_label: str, lane_name: str, worker_count: int) -> int:
    """Return the worker of a lane, by a checksum that is equal in every process, unlike `hash`."""
    return zlib.crc32(f"{source_label}\0{lane_name}".encode()) % worker_count


class Relations:
    """See the module. Owned by a pipeline, which also owns the lanes."""

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
        """The source's clock, measured against the clock of this machine."""
        self.missing: set[MappedRelation] = set()
        """Relations that the source lacked when their copy began."""
        self._by_id: dict[int, MappedRelation] = {}
        self._by_name: dict[RelationName, MappedRelation] = {}
        self._by_relid: dict[int, tuple[Relation, MappedRelation | None]] = {}
        self._lanes: dict[MappedRelation, Lane] = {}
        self._owners: dict[Lane, MappedRelation] = {}
        """The relation for which a lane of a single table was created."""
        self._shared_lanes: dict[RelationName | None, Lane] = {}
        """Lanes of several relations, by the first table of their group; None for all."""
        self._followed: dict[MappedRelation, tuple[Lane, Lsn]] = {}
        """The former lane of a relation, and the end of the relation's changes in that lane."""
        self._groups: Groups = {}
        self.unmapped_defined = asyncio.Event()
        """The stream has sent the definition of a table that is not mapped."""
        self.positions_requested = asyncio.Event()
        """An operator waits for tables, so the process must store their positions."""
        self.awaited_ids: set[int] = set()
        """The ids of relations whose states decide the outcomes of operators' requests."""
        self.requested = asyncio.Event()
        """Set when a request, or the outcome of a request, may exist."""

    @property
    def source(self) -> SourceMapping:
        """The source, with the current rules."""
        return self._owner.source

    def __iter__(self) -> Iterator[MappedRelation]:
        return iter(list(self._by_id.values()))

    @property
    def table_count(self) -> int:
        return len(self._by_id)

    def __contains__(self, mapped: MappedRelation) -> bool:
        """Whether *mapped* still belongs to these relations: a task may remove a relation during
        any await.
        """
        return self._by_id.get(mapped.relation_id) is mapped

    def lags(self) -> dict[str, float]:
        """Return the lag of each table in seconds, by table name."""
        return {str(mapped.mapping.source): self.lag_seconds(mapped) for mapped in self}

    def figures(self, name: RelationName) -> tuple[float, int] | None:
        """Return the lag of a table in seconds, and the bytes of its held changes; None for a table
        that no rule maps.
        """
        mapped = self._by_name.get(name)
        if mapped is None:
            return None
        return self.lag_seconds(mapped), self.lane(mapped).held(mapped)[1]

    def lag_seconds(self, mapped: MappedRelation) -> float:
        return lane_lag_seconds(self.lane(mapped), self.clock, time.monotonic())

    def named(self, name: RelationName) -> MappedRelation | None:
        return self._by_name.get(name)

    def get(self, relation_id: int) -> MappedRelation | None:
        return self._by_id.get(relation_id)

    def find(self, relation: Relation) -> MappedRelation | None:
        """Return the relation that a RELATION message describes, if the relation is mapped."""
        cached = self._by_relid.get(relation.relid)
        if cached is not None and cached[0] is relation:
            return cached[1]
        mapped = self._by_name.get(RelationName(relation.namespace, relation.name))
        if mapped is None or mapped.relid != relation.relid:
            # The message has a different name of the table. Either streamer has not followed a
            # rename yet, or the stream has not reached the rename that streamer has followed.
            renamed = (item for item in self._by_id.values() if item.relid == relation.relid)
            mapped = next(renamed, mapped)
        if mapped is None or mapped.relid is not None:  # a later table may have the OID
            self._by_relid[relation.relid] = (relation, mapped)
        return mapped

    def report_unmapped(self) -> None:
        self.unmapped_defined.set()

    # ---- states --------------------------------------------------------------------------------

    @property
    def are_ready(self) -> bool:
        """Whether every relation is in sync."""
        return all(mapped.state.shown is State.READY for mapped in self)

    def become(self, mapped: MappedRelation, state: TableState) -> None:
        """Give *state* to *mapped*: show the state, and hold its lane as the state says.

        The caller stores the state.
        """
        former, former_lane = mapped.state, self._lanes.get(mapped)
        mapped.become(state)
        if mapped.relation_id in self.awaited_ids:
            self.requested.set()
        self._show(mapped)
        if state.need is Need.NOTHING:
            lane = former_lane or self._home_lane(mapped)
        else:
            lane = self._own_lane(mapped)
        self._lanes[mapped] = lane
        if state.need is not Need.PART:
            self._followed.pop(mapped, None)
        elif former_lane not in (None, lane):
            assert former_lane is not None
            self._followed[mapped] = (former_lane, self._tracker.newest_lsn)
        if reasons := holds(state) & ~Hold.POINT:
            lane.add_hold(reasons)
        self._hold_to_point(mapped)
        if former_lane is lane:
            self._release(lane, holds(former) & ~holds(state))
        elif former_lane is not None:
            self._release(former_lane, holds(former))

    async def become_when_applied(self, mapped: MappedRelation, state: TableState) -> None:
        """Give *state* to *mapped*; wait until no earlier change is in flight."""
        former_lane, newest_lsn = self._lanes[mapped], self._tracker.newest_lsn
        self.become(mapped, state)
        former_lane.wake()  # lets a drainer give up a large, incomplete transaction
        await until_applied(former_lane, newest_lsn)

    def drop_changes(self, mapped: MappedRelation, error: ErrorReport) -> None:
        """Drop the changes of *mapped* from now on, so that they retain no WAL at the source."""
        self.become(mapped, mapped.state.lost(error))
        self._lanes[mapped].release(Hold.ERROR)

    def _show(self, mapped: MappedRelation) -> None:
        table, state = _table(mapped), mapped.state
        self._health.table_states[table] = state.shown
        if state.error is None:
            self._health.table_errors.pop(table, None)
        else:
            self._health.table_errors[table] = state.error

    def _hold_to_point(self, mapped: MappedRelation) -> None:
        """Stop the lane exactly at the point of a copy."""
        if mapped.state.need in TO_POINT:
            is_behind = self.former_lane(mapped) is not None
            self._lanes[mapped].hold_to_point(None if is_behind else mapped.state.drains_to)

    def _release(self, lane: Lane, reasons: Hold) -> None:
        """Release *lane* from *reasons*, except reasons of another relation in the lane."""
        if reasons and lane.table is None:
            for relation in self.in_lane(lane):
                reasons &= ~holds(relation.state)
        if reasons:
            lane.release(reasons)

    async def show_wait(self, relations: Iterable[MappedRelation], wait: TableWait | None) -> None:
        """Show and store why *relations* wait; None if the wait is over."""
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

    def current_lane(self, mapped: MappedRelation) -> Lane | None:
        """Return the lane of a relation, even of a relation that left the mapping."""
        return self._lanes.get(mapped)

    def lanes(self) -> set[Lane]:
        """Return all lanes."""
        return {*self._lanes.values(), *self._shared_lanes.values()}

    def has_lane(self, lane: Lane) -> bool:
        """Whether *lane* is among `lanes`."""
        return lane in self._shared_lanes.values() or bool(self.in_lane(lane))

    @property
    def has_several_lanes(self) -> bool:
        lanes = itertools.chain(self._lanes.values(), self._shared_lanes.values())
        first = next(lanes, None)
        return any(lane is not first for lane in lanes)

    @property
    def have_held_lanes(self) -> bool:
        return any(lane.is_held for lane in self._lanes.values())

    def in_lane(self, lane: Lane) -> list[MappedRelation]:
        if lane.table is not None:  # each of many thousand tables calls this for its own lane
            owner = self._owners.get(lane)
            return [owner] if owner is not None and self._lanes.get(owner) is lane else []
        return [mapped for mapped, home in self._lanes.items() if home is lane]

    def add(
        self, mapped: MappedRelation, record: RelationRecord, *, is_to_mark_synced: bool = False
    ) -> None:
        """Add a relation in the state of its record, and hold its lane as the state says."""
        self._by_id[mapped.relation_id] = mapped
        self._by_name[mapped.mapping.source] = mapped
        self._by_relid.clear()
        state = replace(record.table_state, is_to_mark_synced=is_to_mark_synced)
        mapped.quarantine.forget(record.quarantined)
        self._health.quarantined[_table(mapped)] = record.quarantined
        self.become(mapped, state)
        if state.need is not Need.NOTHING:
            return
        lane = self._lanes[mapped]
        if record.quarantined:
            lane.add_hold(Hold.QUARANTINE)
        if state.shown is State.ERROR:
            lane.add_hold(Hold.ERROR, record.error and record.error.text)
        elif state.shown is State.CATCHING_UP:
            lane.add_hold(Hold.BUSY)  # the drainer then reports the relation as ready

    def replace_mapping(self, mapped: MappedRelation, mapping: RelationMapping) -> None:
        """Use the new rule of *mapped* from the next plan on; source and target stay the same."""
        if mapped.mapping != mapping:
            mapped.mapping = mapping
            mapped.plan = None

    def shares_lane_in_sync(self, mapped: MappedRelation) -> bool:
        """Whether *mapped* shares a lane with other relations once the relation is in sync."""
        return self._services.by_transaction or mapped.mapping.target in self._groups

    def announce_drop(self, mapped: MappedRelation) -> None:
        """Say in the events that the source's table was dropped, before `remove`."""
        text = "the table was dropped at the source, and its target keeps the rows"
        if count := mapped.quarantine.count:
            changes = "1 change" if count == 1 else f"{count:,} changes"
            text += f"; {changes} in quarantine were removed, and never reached the target"
        report = ErrorReport(text, UnpublishedError.code)
        self._health.add_removal(str(mapped.mapping.source), report)

    def remove(self, mapped: MappedRelation) -> Lane:
        """Remove a relation from the stream; return its lane, which may still hold changes."""
        mapped.skip_through_lsn = LSN_MAX
        del self._by_id[mapped.relation_id]
        del self._by_name[mapped.mapping.source]
        self._by_relid.clear()
        self._followed.pop(mapped, None)
        table = str(mapped.mapping.source)
        self._health.table_waits.pop(table, None)
        self._health.table_states.pop(table, None)
        self._health.table_errors.pop(table, None)
        self._health.quarantined.pop(table, None)
        lane = self._lanes.pop(mapped)
        self._owners.pop(lane, None)
        return lane

    def awaits_copy(self, mapped: MappedRelation) -> bool:
        """Whether *mapped* needs a copy, or to be marked as synced, and is not paused."""
        needs_copy = mapped.skip_through_lsn == LSN_MAX or mapped.state.follows
        return needs_copy and not mapped.state.is_paused

    def release_moved(self, lane: Lane) -> None:
        """Release relations that have left *lane*, after *lane* has applied some changes."""
        followers = [item for item, (former, _) in self._followed.items() if former is lane]
        for mapped in followers:
            self.former_lane(mapped)

    def is_behind(self, mapped: MappedRelation, lsn: Lsn) -> bool:
        """Whether the stream must still apply changes of *mapped* that committed before *lsn*.

        A relation that waits for a copy of all rows drops its changes, and the copy's snapshot is
        newer than all these changes. So such a relation is not behind; otherwise the copy and the
        stream could wait for each other.
        """
        if mapped.skip_through_lsn == LSN_MAX:
            return False
        former_lane = self.former_lane(mapped)
        lanes = [self._lanes[mapped], *([] if former_lane is None else [former_lane])]
        return any(lane.is_behind(lsn) for lane in lanes)

    def may_follow_chunks(self, mapped: MappedRelation) -> bool:
        """Whether a lane may leave out changes of some rows: no foreign key connects the table."""
        return mapped.mapping.target not in self._groups

    def former_lane(self, mapped: MappedRelation) -> Lane | None:
        """Return the former lane of *mapped* until that lane has applied the relation's changes."""
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
            lane = self._lanes[mapped] = self._new_own_lane(mapped)
        return lane

    def quarantine_changed(self, mapped: MappedRelation) -> None:
        """Hold or release the lanes of *mapped* after a change of its quarantined rows."""
        lane = self._lanes.get(mapped)
        if lane is None:
            return
        self._health.quarantined[str(mapped.mapping.source)] = mapped.quarantine.count
        for affected in {lane, self._home_lane(mapped)}:
            if any(relation.quarantine.count for relation in self.in_lane(affected)):
                affected.add_hold(Hold.QUARANTINE)
            else:
                affected.release(Hold.QUARANTINE)

    def release_to_home_lane(self, lane: Lane) -> None:
        """Release a lane with quarantined rows whose relations belong in another lane."""
        for mapped in self.in_lane(lane):
            home = self._home_lane(mapped)
            if home is not lane and Hold.QUARANTINE in lane.hold:
                home.add_hold(Hold.QUARANTINE)
                lane.release(Hold.QUARANTINE)

    def move_to_home_lanes(self, lane: Lane) -> None:
        """Move the relations of the empty *lane* to the lanes where they belong."""
        for mapped in self.in_lane(lane):
            self._lanes[mapped] = home = self._home_lane(mapped)
            if home is not lane:
                self._owners.pop(lane, None)

    def _home_lane(self, mapped: MappedRelation) -> Lane:
        """Return the lane where *mapped* belongs once the relation is in sync."""
        group = self._groups.get(mapped.mapping.target)
        if not self._services.by_transaction and group is None:
            lane = self._lanes.get(mapped)
            return lane or self._new_own_lane(mapped)
        key = None if self._services.by_transaction else group
        if key not in self._shared_lanes:
            self._shared_lanes[key] = self._new_lane(None, key)
        return self._shared_lanes[key]

    async def read_groups(self, mappings: Iterable[RelationMapping]) -> Groups:
        """Return the tables of *mappings* that need a common lane because of foreign keys."""
        async with self._services.bookkeeping.connection() as target:
            return await read_groups(target, [mapping.target for mapping in mappings])

    def set_groups(self, groups: Groups) -> None:
        """Set the groups that share lanes, before the first relation is added."""
        self._groups = groups

    def fits(self, groups: Groups) -> bool:
        """Whether the present relations can keep their lanes under *groups*."""
        targets = [mapped.mapping.target for mapped in self]
        return all(groups.get(name) == self._groups.get(name) for name in targets)

    def _new_own_lane(self, mapped: MappedRelation) -> Lane:
        lane = self._new_lane(_table(mapped))
        self._owners[lane] = mapped
        return lane

    def _new_lane(self, table: str | None, group: RelationName | None = None) -> Lane:
        """Create a lane, for a single table, for a group of tables or for all tables."""
        workers, name = self._services.workers, table or str(group or self._label)
        number = worker_number(self._label, name, len(workers))
        return Lane(
            f"{self._label} {name}",
            workers[number],
            self._owner,
            self._services.spools.lane_spool,
            table=table,
        )


def _table(mapped: MappedRelation) -> str:
    """Return the name of a table; all dictionaries share the text."""
    return intern(str(mapped.mapping.source))


async def forget_unmapped(
    bookkeeping: Bookkeeping, source_id: int, mappings: Iterable[RelationMapping]
) -> None:
    """Delete the progress of relations that are no longer mapped."""
    expected_tables = {str(mapping.source) for mapping in mappings}
    for record in await read_relation_records(bookkeeping, source_id):
        if record.source not in expected_tables:
            await forget_relation(bookkeeping, record.relation_id)


async def until_applied(lane: Lane, through_lsn: Lsn) -> None:
    """Wait until no change of transactions up to *through_lsn* is in flight."""
    while lane.is_applying(through_lsn):
        lane.changed.clear()
        await lane.changed.wait()


class Resolved(NamedTuple):
    """The tables of a source. ``refused``: why a new table that a rule matches cannot join."""

    mappings: list[RelationMapping]
    definitions: dict[RelationName, SourceRelation]
    refused: MappingError | None


async def resolve_at(
    plain: Connection,
    source: SourceMapping,
    target_namespace: str,
    stored_names: Collection[RelationName] = (),
) -> Resolved:
    """Apply the rules of *source* to its relations. Raises MappingError.

    Tables that rules name and the source lacks are mapped too, without a definition, so that all
    existing tables continue. The result also contains *stored_names*, because the loss of a table
    whose rows the target contains must be visible: see `on_table_dropped`. A new table without a
    sid or target does not stop the existing tables.
    """
    names = await read_relation_names(plain, source)
    missing = {
        name
        for name, rule in source.exact_names.items()
        if rule.on_table_dropped is OnTableDropped.STOP
    }
    if missing := missing.union(stored_names) - set(names):
        # A table that joined an extension is not lost: patterns do not match the table any more.
        missing -= await read_extension_tables(plain)
        names += missing - former_names(source, names, target_namespace)
    mappings, refused = resolve_new(source, stored_names, names, target_namespace)
    if not mappings:
        raise MappingError(
            f'no table of source "{source.label}" matches its rules',
            hint="correct `tables` in the configuration",
        )
    definitions = await read_relations(plain, [mapping.source for mapping in mappings])
    return Resolved(mappings, definitions, refused)


def relation_source(
    source: SourceMapping,
    relation: SourceRelation | None,
    binary_types: frozenset[int],
    fence: FencingToken,
    conversion: TextConversion | None = None,
) -> RelationSource:
    """Return the facts that applying a relation needs; few, if the source lacks the relation."""
    facts = RelationSource(source.database, source.sid, fence, binary_types, conversion=conversion)
    return facts if relation is None else facts.with_definition(relation)
