"""The share of each replica: even, stable, and without a source in two shares."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.runtime.replicas.shares import Decision, Peer, decide, leads, make_plan

SOURCES = [f"s{number:02}" for number in range(12)]


def members(*numbers: int) -> list[Peer]:
    return [Peer(number, frozenset(SOURCES)) for number in numbers]


def owned(**shares: int) -> dict[str, int | None]:
    """Let replica ``_n`` own so many sources, in their order; the rest is free."""
    owners: list[int | None] = [
        int(name.strip("_")) for name, count in shares.items() for _ in range(count)
    ]
    return dict(zip(SOURCES, owners + [None] * len(SOURCES), strict=False))


def of(
    number: int, team: list[Peer], owners: dict[str, int | None], busy: Collection[str] = ()
) -> Decision:
    return decide(number, make_plan(team, owners), team, owners, busy)


def test_one_replica_takes_all_sources() -> None:
    assert of(1, members(1), owned()).take == SOURCES


def test_free_sources_are_shared_evenly_and_each_goes_to_one_replica() -> None:
    team = members(1, 2, 3)
    taken = [of(number, team, owned()).take for number in (1, 2, 3)]
    assert [len(each) for each in taken] == [4, 4, 4]
    assert sorted(label for each in taken for label in each) == SOURCES


def test_a_replica_that_joins_gets_its_share_from_the_others() -> None:
    team = members(1, 2, 3)
    owners = owned(_1=6, _2=6)
    assert [len(of(number, team, owners).give) for number in (1, 2, 3)] == [2, 2, 0]


def test_a_difference_of_one_moves_nothing() -> None:
    assert of(1, members(1, 2), {"s00": 1, "s01": 1, "s02": 2}) == Decision([], [])


def test_a_source_that_copies_stays() -> None:
    owners = owned(_1=12)
    give = of(1, members(1, 2), owners, busy=SOURCES[4:]).give
    assert give == SOURCES[:4]


def test_a_replica_takes_no_more_than_its_max_sources() -> None:
    team = [replace(each, max_sources=3) for each in members(1, 2)]
    plan = make_plan(team, owned())
    assert Counter(plan.takers.values()) == {1: 3, 2: 3}


def test_a_replica_that_stops_takes_nothing_and_its_sources_are_free_for_others() -> None:
    first, second = members(1, 2)
    team = [replace(first, is_stopping=True), second]
    assert of(1, team, owned()).take == []
    assert of(2, team, owned()).take == SOURCES


def test_a_source_whose_journal_is_on_a_disk_goes_to_that_replica() -> None:
    first, second = members(1, 2)
    team = [first, replace(second, journals=frozenset(SOURCES[:8]))]
    takers = make_plan(team, owned()).takers
    assert {takers[label] for label in SOURCES[:8]} == {2}
    assert {takers[label] for label in SOURCES[8:]} == {1}


def test_a_source_goes_back_to_the_replica_that_has_its_journal() -> None:
    """The replica came back too late after an outage of the target, and a peer has the lock."""
    first, second = members(1, 2)
    team = [first, replace(second, journals=frozenset({"s00"}))]
    owners: dict[str, int | None] = {"s00": 1, "s01": 1, "s02": 2}
    assert of(1, team, owners).give == ["s00"]
    assert of(2, team, owners).take == ["s00"]
    both = [replace(each, journals=frozenset({"s00"})) for each in team]
    assert of(1, both, owners) == Decision([], [])


def test_a_source_that_a_replica_has_not_taken_goes_to_another() -> None:
    team, owners = members(1, 2), owned()
    (label, taker), *_ = make_plan(team, owners).takers.items()
    assert make_plan(team, owners, {(taker, label)}).takers[label] == 3 - taker


def test_replicas_with_other_sources_share_only_those_they_have_in_common() -> None:
    team = [Peer(1, frozenset(SOURCES)), Peer(2, frozenset(SOURCES[:1]))]
    owners = owned(_1=12)
    assert of(1, team, owners).give == SOURCES[:1]
    assert of(1, team, {**owners, SOURCES[0]: 2}) == Decision([], [])


def test_the_oldest_replica_does_the_work_that_sources_share() -> None:
    team = [Peer(1, frozenset(["a"])), Peer(2, frozenset(["a", "b"]))]
    assert [leads(1, team, ["a"]), leads(2, team, ["a"]), leads(2, team, ["b"])] == [
        True,
        False,
        True,
    ]
    assert [leads(1, team, []), leads(2, team, [])] == [True, False]
    assert [leads(1, team, ["a", "b"]), leads(2, team, ["a", "b"])] == [False, True]


def test_a_source_that_its_replica_cannot_reach_goes_to_one_that_may() -> None:
    one, two = members(1, 2)
    one = replace(one, out_of_reach=frozenset(["s00"]))
    owners: dict[str, int | None] = {"s00": 1, "s01": 2}
    assert of(1, [one, two], owners) == Decision([], ["s00"])
    assert of(2, [one, two], owners).take == []  # until the source is free
    owners["s00"] = None
    assert of(1, [one, two], owners) == Decision([], [])
    assert of(2, [one, two], owners).take == ["s00"]


def test_a_source_that_no_replica_reaches_stays() -> None:
    team = [replace(each, out_of_reach=frozenset(["s00"])) for each in members(1, 2)]
    assert of(1, team, {"s00": 1, "s01": 2}) == Decision([], [])
    # So does a source without a taker, and a source with a journal on the disk of a replica.
    one, two = team[0], Peer(2, frozenset(SOURCES), 1)
    assert of(1, [one, two], {"s00": 1, "s01": 2}) == Decision([], [])
    one = replace(one, journals=frozenset(["s00"]))
    assert of(1, [one, *members(2)], {"s00": 1, "s01": 2}) == Decision([], [])


def test_no_source_goes_to_a_replica_with_another_mapping() -> None:
    first, second = members(1, 2)
    team = [first, replace(second, has_newest_mapping=False)]
    assert of(1, team, owned(_1=12)) == Decision([], [])
    cut_off = [replace(first, out_of_reach=frozenset(SOURCES)), team[1]]
    assert of(1, cut_off, owned(_1=12)) == Decision([], []), "nobody else would take the sources"
    assert leads(2, [replace(first, has_newest_mapping=False), second], ["s00"])


class World:
    """The locks of the target. Each replica acts on its last check."""

    def __init__(self) -> None:
        self.team: dict[int, Peer] = {}
        self.owners: dict[str, int | None] = dict.fromkeys(SOURCES)
        self.seen: dict[int, tuple[list[Peer], dict[str, int | None]]] = {}
        self.moves = 0

    def join(self, number: int, max_sources: int | None) -> None:
        self.team[number] = Peer(number, frozenset(SOURCES), max_sources)
        self.look(number)

    def end(self, number: int) -> None:
        """End a replica: the server frees the locks."""
        self.team.pop(number, None)
        self.seen.pop(number, None)
        self.owners = {s: None if who == number else who for s, who in self.owners.items()}

    def look(self, number: int) -> None:
        if number in self.team:
            self.seen[number] = [*self.team.values()], dict(self.owners)

    def act(self, number: int) -> None:
        """Take and give by an earlier check. The lock of a peer stays there."""
        if number not in self.team:
            return
        team, owners = self.seen[number]
        # A replica knows its own locks without a check.
        owners = {
            s: number if self.owners[s] == number else (None if who == number else who)
            for s, who in owners.items()
        }
        decision = decide(number, make_plan(team, owners), team, owners)
        for label in decision.give:
            assert self.owners[label] == number
            self.owners[label] = None
            self.moves += 1
        for label in decision.take:
            if self.owners[label] is None:
                self.owners[label] = number

    def lose(self, number: int, label: str) -> None:
        """The replica cannot reach a source."""
        if number in self.team:
            member = self.team[number]
            self.team[number] = replace(member, out_of_reach=member.out_of_reach | {label})

    def settle(self) -> None:
        for _ in range(12):
            for number in list(self.team):
                self.look(number)
                self.act(number)


NUMBERS = st.integers(1, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), NUMBERS, st.one_of(st.none(), st.integers(1, 6))),
        st.tuples(st.sampled_from(["end", "look", "act"]), NUMBERS),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
def test_any_joins_and_ends_lead_to_an_even_share_that_stays(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World()
    for name, number, *rest in steps:
        if name == "join" and number in world.team:
            continue
        getattr(world, name)(number, *rest)
    world.settle()
    loads = Counter(owner for owner in world.owners.values() if owner is not None)
    # Every source has an owner, as far as there is room.
    limits = [m.max_sources or len(SOURCES) for m in world.team.values()]
    assert loads.total() == min(len(SOURCES), sum(limits))
    # No replica has two sources more than a peer that has room.
    for member in world.team.values():
        if member.has_room(loads[member.number]):
            assert all(loads[each] <= loads[member.number] + 1 for each in world.team)
    # And no source moves from then on.
    before, world.moves = dict(world.owners), 0
    world.settle()
    assert (world.owners, world.moves) == (before, 0)


@settings(deadline=None)
@given(
    STEPS.flatmap(
        lambda steps: st.lists(
            st.tuples(st.just("lose"), NUMBERS, st.sampled_from(SOURCES[:3])), max_size=6
        ).map(lambda losses: [*steps, *losses])
    )
)
def test_each_source_comes_to_a_replica_that_may_reach_it_and_stays(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World()
    for name, number, *rest in steps:
        if name == "join" and number in world.team:
            continue
        getattr(world, name)(number, *rest)
    world.settle()
    loads = Counter(owner for owner in world.owners.values() if owner is not None)
    for label, owner in world.owners.items():
        able = [
            member
            for member in world.team.values()
            if label not in member.out_of_reach and member.has_room(loads[member.number])
        ]
        if able:
            assert owner is not None
            assert label not in world.team[owner].out_of_reach
    before, world.moves = dict(world.owners), 0
    world.settle()
    assert (world.owners, world.moves) == (before, 0)
