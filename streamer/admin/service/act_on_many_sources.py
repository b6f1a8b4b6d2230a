"""Acts on the tables of many sources at once, for API and page: pause, resume, resync."""

from collections.abc import Sequence
from typing import Final

from streamer.admin.mapping.mapping_rows import Row
from streamer.admin.service.admin_service import AdminService
from streamer.commands.table_requests import SourceKey, SourceOutcome, request_each
from streamer.errors.error_classes import InvalidError, MappingError
from streamer.target.connection import TargetAddress

ACTIONS: Final = ("pause", "resume", "resync")


async def act_on_sources(
    service: AdminService,
    action: str,
    sources: Sequence[SourceKey],
    actor: str,
    *,
    tables: Sequence[str] = (),
    state: str | None = None,
    options: Row | None = None,
) -> list[SourceOutcome]:
    """Request *action* from sources; return the outcome of each.

    Raises InvalidError for a faulty pattern, and TargetError.
    """
    address = TargetAddress.parse(service.settings.target.url)
    try:
        return await request_each(
            address, action, sources, tables=tables, state=state, options=options, actor=actor
        )
    except MappingError as exc:
        raise InvalidError(exc.message, hint=exc.hint) from None
