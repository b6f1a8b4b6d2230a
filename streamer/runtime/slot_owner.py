"""Who owns a source's slot and publications, decided before anything is changed there."""

from streamer.mapping.rules import SourceMapping
from streamer.runtime.services import Services
from streamer.runtime.wal_retention.guard import BacklogGuard
from streamer.source.connection import Connection
from streamer.source.ownership import check_owner, read_found


async def claim_source(
    plain: Connection,
    source: SourceMapping,
    services: Services,
    guard: BacklogGuard,
    installation: str,
    *,
    is_known: bool,
) -> None:
    """Refuse slot and publications of another installation, unless they are to be taken over.

    *is_known*: the target has a position of the slot. The backlog guard leaves a slot alone that is
    not ours. Raises SourceTakenError.
    """
    found = await read_found(plain, source)
    if source.label in services.take_over:
        services.take_over.discard(source.label)
    else:
        guard.is_taken = True
        check_owner(found, source, installation, is_known=is_known)
    guard.is_taken = False
