"""A replicated row is never different, whatever source and stream do meanwhile. A planted row is
always different, once both sides rest.
"""

from hypothesis import given
from hypothesis import strategies as st

from streamer.compare.judge_keys import Judge, Row, SourceReading, TargetReading
from streamer.util.lsn import Lsn

STEPS = st.lists(
    st.one_of(
        st.sampled_from(["change", "remove", "show", "apply", "read source", "read target"]),
        st.just("copy"),
    ),
    max_size=60,
)


class World:
    """A row of a source whose commits are written, later shown, and sent before or after that."""

    def __init__(self) -> None:
        self.versions: list[str | None] = ["v0"]  # each is a commit; None: the row is gone
        self.shown = 0  # the newest version that readers of the source see
        self.applied = 0
        self.counter = 0
        self.copying = False
        self.read_since = False
        self.judge = Judge([0], keeps_more=False)
        self.planted: str | None = None

    def step(self, step: str) -> None:
        newest = len(self.versions) - 1
        match step:
            case "change":
                self.counter += 1
                self.versions.append(f"v{self.counter % 3}")
            case "remove" if self.versions[-1] is not None:
                self.versions.append(None)
            case "show":
                self.shown = min(self.shown + 1, newest)
            case "apply":
                self.applied = min(self.applied + 1, newest)
            case "copy":
                self.copying = not self.copying
            case "read source" if not self.read_since:
                self.read_since = True
                running = frozenset(str(n) for n in range(self.shown + 1, newest + 1))
                rows = self._rows(self.shown)
                self.judge.read_source(SourceReading(Lsn(newest), running, rows))
            case "read target" if self.read_since:
                self.read_since = False
                lsn = None if self.copying else Lsn(self.applied)
                rows = self._rows(self.applied)
                if self.planted is not None:
                    rows = {0: [("planted", (self.planted,))]}
                self.judge.read_target(TargetReading(lsn, rows))

    def _rows(self, version: int) -> dict[int, list[Row]]:
        value = self.versions[version]
        return {} if value is None else {0: [(f"place {version}", (value,))]}

    def rest(self) -> None:
        """Show and apply all changes, and read both sides until the judge decides."""
        self.copying = False
        for step in ("show", "apply"):
            for _ in self.versions:
                self.step(step)
        for _ in range(4):
            self.step("read source")
            self.step("read target")


@given(STEPS)
def test_a_row_that_is_replicated_is_never_different(steps: list[str]) -> None:
    world = World()
    for step in steps:
        world.step(step)
    world.rest()
    assert world.judge.different == {}
    assert world.judge.pending == []


@given(STEPS)
def test_a_row_that_the_stream_never_mends_is_different_in_the_end(steps: list[str]) -> None:
    world = World()
    world.planted = "wrong"
    for step in steps:
        world.step(step)
    world.rest()
    assert 0 in world.judge.different
