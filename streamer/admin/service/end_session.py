"""For the page: ends a session that blocks streamer at the target."""

from streamer.admin.service.admin_service import AdminService
from streamer.bookkeeping.bookkeeping_schema import installed
from streamer.bookkeeping.relation_states import read_blocking_transactions
from streamer.bookkeeping.requests import END_SESSION, acting
from streamer.errors.error_classes import TargetRejectedError, UnreadyError
from streamer.postgres.blocking_sessions import END_BLOCKING_SQL
from streamer.target.connection import TargetAddress


async def end_session(service: AdminService, pid: int, actor: str) -> None:
    """End session *pid* at the target if the session blocks a session of streamer, or blocked
    the last attempt at a table that still waits.

    Raises UnreadyError for other sessions, and TargetError.
    """
    address = TargetAddress.parse(service.settings.target.url)
    async with (
        installed(address, "streamer page") as bookkeeping,
        acting(bookkeeping, actor, END_SESSION, f"pid {pid}"),
    ):
        try:
            async with bookkeeping.connection() as target:
                transactions = await read_blocking_transactions(target, pid)
                rows = await target.fetch(END_BLOCKING_SQL, pid, transactions)
        except TargetRejectedError as exc:
            hint = f"have an administrator of the target run `select pg_terminate_backend({pid})`"
            raise UnreadyError(exc.message, hint=hint) from exc
        if not rows:
            hint = "reload the page: the session may have ended"
            raise UnreadyError(f"session {pid} blocks no session of streamer", hint=hint)
