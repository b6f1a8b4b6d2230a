"""The facts about the tables of a source, and the plan for these tables. Pure.

`streamer.runtime.guards.reconcile` makes the plan from the facts.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from streamer.errors.error_classes import (
    IdentityLostError,
    StreamerError,
    TableGoneError,
    UnpublishedError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.source.copy_grants import RoleRights
from streamer.source.identity_advice import Candidates, advise_identity
from streamer.source.replica_identity import RelationIdentity
from streamer.source.slot_and_publications.publication import (
    Publication,
    PublicationFault,
    WantedMembers,
)


@dataclass(frozen=True, slots=True)
class SourceState:
    """The facts of a source, all read at one moment, because tables may swap their names."""

    publications: Mapping[str, Publication]
    identities: Mapping[RelationName, RelationIdentity]
    """The identities of the mapped tables, and of renamed tables under their new names."""
    oids: Collection[int]
    """The OIDs of missing and replaced tables that still exist."""
    version: int
    captures: bool = False
    """The source reports changes of definitions in its stream."""
    candidates: Candidates = field(default_factory=dict)
    """The possible keys of tables without a usable identity."""
    may_create: bool = True
    """streamer's role may create missing publications of the tables."""
    rights: RoleRights = field(default_factory=RoleRights)
    """The rights of streamer's role in tables that are back or no longer published."""

    def identity_remedy(self, identity: RelationIdentity) -> Remedy | None:
        """Return the statements that give a table a usable identity; None for a usable identity."""
        if identity.is_usable:
            return None
        return advise_identity(identity, self.candidates).remedy

    def root(self, name: RelationName) -> int | None:
        """Return the OID of the table *name*."""
        identity = self.identities.get(name)
        return None if identity is None else identity.root.oid


@dataclass(frozen=True, slots=True)
class LastPublished:
    """The stored facts of a table that streamer published last."""

    fingerprint: str | None = None
    """The fingerprint of the membership. None accepts any fingerprint."""
    identity: str | None = None
    oid: int | None = None
    identity_remedy: Remedy | None = None
    """The statements that give a table without a usable identity such an identity."""


@dataclass(frozen=True, slots=True)
class MappedTable:
    """A mapped table: its facts in the bookkeeping and in the running process."""

    mapping: RelationMapping
    last: LastPublished = field(default_factory=LastPublished)
    oid: int | None = None
    """The OID of the source table whose rows the target contains, or whose rows the copy reads."""
    seen_oid: int | None = None
    """The OID of the table that had the name when streamer last read the catalogs."""
    is_in_sync: bool = False
    """The table needs all later changes from the stream: see `TableState.needs_stream`."""
    is_set_aside: bool = False
    """The table has stopped, and waits for an operator's request."""
    error: ErrorReport | None = None
    """The stored error of the table."""
    is_being_copied: bool = False
    is_being_read: bool = False
    """A copy of all rows may have a snapshot whose position is not known yet."""
    is_renewed: bool = False
    """The table is not in sync, and streamer has published the table for its next copy."""
    has_history: bool = False
    """The target holds earlier row versions that a copy of all rows would interrupt."""
    has_returned: bool = False
    """The mapping has the table again: streamer itself removed the table from the publication."""
    is_bare: bool = False
    """The target contains no row of the table, and a pattern added the table."""

    @property
    def name(self) -> RelationName:
        return self.mapping.source

    @property
    def was_gone(self) -> bool:
        """Whether the table stopped with TableGoneError: the source lacked the table."""
        return self._has_stopped_for(TableGoneError)

    @property
    def was_unpublished(self) -> bool:
        """Whether the table stopped because a publication lacked the table or its changes."""
        return self._has_stopped_for(UnpublishedError)

    def _has_stopped_for(self, kind: type[StreamerError]) -> bool:
        has_code = self.error is not None and self.error.code == kind.code
        return self.is_set_aside and has_code


class Fate(enum.StrEnum):
    """The decision about a table, see `streamer.runtime.guards.reconcile`."""

    COPY = "copy"
    COPY_AT_POINT = "copy at a point"
    STOP = "stop"
    BLOCK = "block"
    RENAMED = "renamed"
    DROPPED = "dropped"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Case:
    """The consequence for a table."""

    fate: Fate
    reason: str = ""
    """Why the table needs a copy, for the log."""
    error: ErrorReport | None = None
    """Why the table stops, or why its copy cannot begin yet."""
    columns: tuple[str, ...] | None = None
    """The target's columns to copy at a point; None for all columns."""
    name: RelationName | None = None
    """The new name of a renamed table."""
    successor: RelationName | None = None
    """The former name of the table that replaced this table."""
    fault: PublicationFault | None = None
    """The reason of `error`, if a publication omits changes of the table."""

    @property
    def has_lost_identity(self) -> bool:
        """Whether the table stops because it lost its replica identity."""
        return self.error is not None and self.error.code == IdentityLostError.code


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """The consequences for tables, and the required members of streamer's publications."""

    cases: Mapping[RelationName, Case]
    tables: tuple[MappedTable, ...]
    """The tables that exist under their names, as of this plan."""
    state: SourceState
    """The facts behind the plan."""
    wanted: WantedMembers = field(default_factory=WantedMembers)
    cleared: frozenset[RelationName] = frozenset()
    """The tables without a new copy whose fingerprint streamer itself changes."""
    memberships: Mapping[RelationName, LastPublished] = field(default_factory=dict)
    """The facts to store once the publications have the required members."""
    is_incomplete: bool = False
    """Tables disappeared while streamer read the catalogs; the next plan decides."""
