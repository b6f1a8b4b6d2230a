"""Changes that the last source of a target table makes for all sources.

The peers of a source are the sources that write the same target table. A source whose change the
peers forbid waits for the peers. The last source to reach the change makes the change for all, and
`streamer.ddl` informs the waiting sources. A change of a type affects the values of all sources.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from streamer.bookkeeping.ddl_records import DdlPlace
from streamer.bookkeeping.relation_definitions import read_others, read_unchanged
from streamer.mapping.rule_options import DdlKind
from streamer.schema.indexes_constraints_types import TypeChange
from streamer.schema.source_definition import AnyChange, SourceDefinition
from streamer.target.connection import TargetConnection

_MADE_FOR_ALL: Final = frozenset({DdlKind.CHANGE_TYPE, DdlKind.WIDEN_TYPE})
"""Changes of columns that the last source makes for all, like all changes of types. A rename is
excluded: earlier rows of a peer's transaction may still have the former name.
"""


@dataclass(frozen=True, slots=True)
class PeerSources:
    """The definitions of a source's peers.

    ``unchanged``: the definitions of peers that do not wait to make the same changes.
    """

    definitions: Sequence[SourceDefinition] = ()
    unchanged: Sequence[SourceDefinition] = ()

    @property
    def all_wait(self) -> bool:
        """Whether peers exist, and all of them wait to make the same changes."""
        return bool(self.definitions) and not self.unchanged


async def read_peers(
    session: TargetConnection,
    place: DdlPlace,
    changes: Sequence[AnyChange],
) -> PeerSources:
    """Return the definitions of all peers of a shared table.

    The result also has the definitions of the peers that do not wait to make *changes*.
    """
    peers = await read_others(session, place.relation_id)
    if not peers:
        return PeerSources()
    words = [str(change) for change in changes]
    return PeerSources(peers, await read_unchanged(session, place, words))


def made_for_all(changes: Sequence[AnyChange], made: Sequence[str]) -> list[AnyChange]:
    """Return the *changes* that a peer has already made for all sources.

    *made*: the peer's changes as text. Pure.
    """
    if list(made) != [str(change) for change in changes]:
        return []
    return [c for c in changes if isinstance(c, TypeChange) or c.kind in _MADE_FOR_ALL]
