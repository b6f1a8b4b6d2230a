"""The share of each replica. Pure.

All replicas see the same locks and decide by the same rules, so they need no coordinator. A free
source goes to the replica with the fewest sources. A replica that has at least two sources more
than a peer releases a source. Each move makes the shares more even, so moves come to an end.

The lock alone decides. Two replicas with different views may both try to take a source, and one of
the attempts fails.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Peer:
    """A live replica. ``number``: its number in the bookkeeping; a later replica has a greater
    number.
    """

    number: int
    sources: frozenset[str]
    """Labels of the sources that the replica may run."""
    max_sources: int | None = None
    is_stopping: bool = False
    journals: frozenset[str] = frozenset()
    """Labels of sources with a journal on the replica's disk. No peer can continue the sources."""
    out_of_reach: frozenset[str] = frozenset()
    """Labels of sources that the replica could not reach in its last attempt."""
    has_newest_mapping: bool = True
    """A replica without the newest mapping takes no source."""

    @property
    def is_taker(self) -> bool:
        return self.has_newest_mapping and not self.is_stopping

    def has_room(self, load: int) -> bool:
        """Whether the replica may take one more source when it runs *load* sources."""
        return not self.is_stopping and (self.max_sources is None or load < self.max_sources)


@dataclass(frozen=True, slots=True)
class SharePlan:
    """The even share. ``takers``: the replica for each free source that a replica may take."""

    loads: dict[int, int]
    """The number of sources of each replica after all moves."""
    takers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """The sources that a replica takes and releases now."""

    take: list[str]
    give: list[str]


Owners = Mapping[str, int | None]
"""The replica that holds the lock of each source; None for a free source. A process outside the
replicas has a number that no member has.
"""
Refusals = Collection[tuple[int, str]]
"""Replicas that have not taken a source for a while, although the plan assigned it."""


def find_keepers(members: Sequence[Peer], owners: Owners) -> dict[str, int]:
    """Return the replica with the journal of each source, which no peer can continue."""
    keepers: dict[str, int] = {}
    for member in members:
        for label in member.journals:
            if label not in keepers or owners.get(label) == member.number:
                keepers[label] = member.number
    return keepers


def find_unreached(members: Sequence[Peer], owners: Owners) -> set[tuple[int, str]]:
    """Return the replicas that cannot reach a source which another replica may reach.

    If no replica has reached the source, its owner keeps trying.
    """
    keepers = find_keepers(members, owners)
    return {
        (member.number, label)
        for member in members
        for label in member.out_of_reach
        if label not in keepers
        and any(
            label in peer.sources and label not in peer.out_of_reach and peer.is_taker
            for peer in members
        )
    }


def make_plan(members: Sequence[Peer], owners: Owners, refused: Refusals = ()) -> SharePlan:
    """Return the even share that takes the fewest moves from *owners*."""
    keepers = find_keepers(members, owners)
    unreached = find_unreached(members, owners)
    refused = {*refused, *unreached}
    # A replica that was cut off from the target continues its journal, even if a peer has taken the
    # source.
    owners = {
        label: owner
        if keepers.get(label, owner) == owner and (owner, label) not in unreached
        else None
        for label, owner in owners.items()
    }
    loads = Counter(owner for owner in owners.values() if owner is not None)
    loads = Counter({member.number: loads[member.number] for member in members})
    takers = {}
    for label in sorted(label for label, owner in owners.items() if owner is None):
        able = [
            member
            for member in members
            if label in member.sources
            and keepers.get(label, member.number) == member.number
            and member.has_room(loads[member.number])
            and (member.number, label) not in refused
        ]
        if able:
            taker = min(able, key=lambda member: (loads[member.number], member.number))
            takers[label] = taker.number
            loads[taker.number] += 1
    movable = {
        member.number: [
            label
            for label, owner in owners.items()
            if owner == member.number and label not in keepers
        ]
        for member in members
    }
    while (move := _find_move(members, loads, movable, refused)) is not None:
        giver, taker, label = move
        movable[giver.number].remove(label)
        loads[giver.number] -= 1
        loads[taker.number] += 1
    return SharePlan(dict(loads), takers)


def _find_move(
    members: Sequence[Peer],
    loads: "Counter[int]",
    movable: dict[int, list[str]],
    refused: Refusals,
) -> tuple[Peer, Peer, str] | None:
    by_load = sorted(members, key=lambda member: (loads[member.number], member.number))
    for giver in reversed(by_load):
        for taker in by_load:
            if loads[taker.number] + 1 >= loads[giver.number]:
                break
            if not (taker.is_taker and taker.has_room(loads[taker.number])):
                continue
            for label in reversed(movable[giver.number]):
                if label in taker.sources and (taker.number, label) not in refused:
                    return giver, taker, label
    return None


def decide(
    number: int,
    plan: SharePlan,
    members: Sequence[Peer],
    owners: Owners,
    busy: Collection[str] = (),
    refused: Refusals = (),
) -> Decision:
    """Return the sources that replica *number* takes and releases. *busy*: the sources that the
    replica must not release now.
    """
    loads = Counter(owner for owner in owners.values() if owner is not None)
    take = [label for label, taker in plan.takers.items() if taker == number]
    excess = loads[number] + len(take) - plan.loads.get(number, 0)
    short = [member for member in members if loads[member.number] < plan.loads[member.number]]
    keepers = find_keepers(members, owners)
    unreached = find_unreached(members, owners)
    refused = {*refused, *unreached}
    lent = [
        label
        for label, owner in owners.items()
        if owner == number
        and (
            keepers.get(label, number) != number
            or ((number, label) in unreached and plan.takers.get(label, number) != number)
        )
    ]
    # The present owner must release such a source first.
    take = [label for label in take if (owners[label], label) not in unreached]
    excess -= len(lent)
    give = [
        label
        for label, owner in owners.items()
        if owner == number
        and label not in busy
        and label not in lent
        and any(label in m.sources and (m.number, label) not in refused for m in short)
    ]
    return Decision(take, lent + (give[max(0, len(give) - excess) :] if excess > 0 else []))


def leads(number: int, members: Sequence[Peer], labels: Collection[str]) -> bool:
    """Whether *number* is the replica that does the shared work of the sources *labels*.

    This is the oldest replica that has the newest mapping and all of these sources. If no replica
    has both, every replica does the work.
    """
    able = [m.number for m in members if m.sources.issuperset(labels) and m.has_newest_mapping]
    return not able or number == min(able)
