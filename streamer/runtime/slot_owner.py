"""The owner of a source's slot and publications, decided before any change at the source.

Two parts of the program use the slot. The pipeline takes the slot once it has reached the target.
The backlog guard drops the slot or reads it into a journal, even during an outage of the target.
The guard needs a proof each time: the id of this installation in the publications' comments, or a
claim of the pipeline.
"""

from typing import Final

from streamer.errors.error_classes import SourceTakenError
from streamer.mapping.rules import SourceMapping
from streamer.runtime.installation_id import Installation
from streamer.source.connection import Connection
from streamer.source.slot_and_publications.ownership import (
    SourceObjects,
    check_owner,
    read_source_objects,
    takeover_remedy,
)

_UNKNOWN_HINT: Final = (
    "restore the connection to the target; until then the source keeps the WAL. With "
    "spool.directory on a file system that survives a restart, streamer keeps its id there"
)


class SlotOwner:
    """The owner check of a source: the pipeline calls `check_owner`, the backlog guard `verify`."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._tolerated: tuple[str, ...] | None = None
        """Installations that comments named when the pipeline claimed the slot; None before."""

    async def check_owner(
        self,
        plain: Connection,
        source: SourceMapping,
        installation: str,
        *,
        has_position: bool,
        is_taken_over: bool,
    ) -> SourceObjects:
        """Refuse a foreign installation's slot and publications, unless the operator takes them
        over.

        Return the objects found at the source.

        *has_position*: the target has stored a position of the slot. Raises SourceTakenError.
        """
        await self._installation.store(installation)
        objects = await read_source_objects(plain, source)
        self._tolerated = None
        if not is_taken_over:
            check_owner(objects, source, installation, has_position=has_position)
        self._tolerated = objects.installations
        return objects

    async def verify(self, plain: Connection, source: SourceMapping) -> None:
        """Raise SourceTakenError unless this installation can prove that the slot belongs to it."""
        objects = await read_source_objects(plain, source)
        problem = unproven(objects, source, self._installation.id, self._tolerated)
        if problem is not None:
            is_foreign = self._installation.id is not None and objects.installations
            raise SourceTakenError(
                f'source "{source.label}": {problem}',
                hint=takeover_remedy(source) if is_foreign else _UNKNOWN_HINT,
            )


def unproven(
    objects: SourceObjects,
    source: SourceMapping,
    installation: str | None,
    tolerated: tuple[str, ...] | None,
) -> str | None:
    """Return why this installation cannot prove that it owns the slot; None with a proof. Pure.

    *tolerated*: installations that comments named when the pipeline claimed the slot.
    """
    foreign = [
        name for name in objects.installations if name not in (installation, *(tolerated or ()))
    ]
    if tolerated is None and installation is None:
        return (
            f'streamer does not use replication slot "{source.slot}": streamer has not reached the '
            "target, and spool.directory has no installation id that proves whose slot this is"
        )
    if foreign:
        return (
            f'streamer does not use replication slot "{source.slot}": publication '
            f'"{source.publication}" belongs to installation {foreign[0]}'
        )
    if tolerated is None and installation not in objects.installations:
        return (
            f'streamer does not use replication slot "{source.slot}": streamer has not reached the '
            "target, and no publication has a comment that proves whose slot this is"
        )
    return None
