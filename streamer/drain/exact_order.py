"""Writes lane transactions in order, up to the first that the target refuses.

The drainer uses this order for windows that cannot be written as sets. The writer diverts rejected
changes of tables whose rule is quarantine. Without that rule, a rejected change stops its
transaction and all later transactions.
"""

from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.quarantine.quarantine_writer import QuarantineWriter
from streamer.drain.commit_transactions import add_context, diverts, may_divert
from streamer.errors.error_classes import ConflictError, Retry, StreamerError


class ExactOrder:
    """Writes windows through *writer*, in exact order."""

    def __init__(self, writer: QuarantineWriter) -> None:
        self._writer = writer

    async def write(self, window: LaneWindow) -> tuple[int, StreamerError | None]:
        """Write the transactions before the refused transaction; return their number and the
        error. The caller commits these transactions.
        """
        writer = self._writer
        count, error = len(window.transactions), None
        by_keys = writer.orders_by_keys(window)
        if by_keys:
            # If transactions are written table by table, several together can violate a key that
            # each transaction satisfies.
            count, error = await self._find_refused(window, count, by_keys=True)
        while count and not by_keys:
            await writer.savepoint()
            try:
                await writer.write_in_order(window, 0, count)
                await writer.transaction.check_constraints()
                break
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                error = exc
                await writer.rollback_to_savepoint()
                if exc.transaction_number is None or exc.transaction_number >= count:
                    count, error = await self._find_refused(window, count)
                    break
                count = exc.transaction_number
        if error is not None:
            add_context(error, window.transactions[count])
        return count, error

    async def _find_refused(
        self, window: LaneWindow, count: int, *, by_keys: bool = False
    ) -> tuple[int, StreamerError | None]:
        """Write each transaction by itself, up to the transaction that the target refuses.

        With quarantine, this writes transactions of a single change together, and checks all
        constraints after each transaction.
        """
        number = 0
        while number < count:
            stop = number + 1
            while not by_keys and stop < count and _is_one_change(window, number, stop + 1):
                stop += 1
            await self._writer.savepoint()
            try:
                if stop > number + 1:
                    try:
                        await self._write_singles(window, number, stop)
                    except StreamerError as exc:
                        if exc.retry is Retry.TIMED:
                            raise
                        stop = number + 1
                        await self._writer.rollback_to_savepoint()
                        await self._write_transaction(window, number)
                elif by_keys:
                    await self._write_by_keys(window, number)
                else:
                    await self._write_transaction(window, number)
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await self._writer.rollback_to_savepoint()
                return number, exc
            await self._writer.transaction.release_savepoint()
            number = stop
        return count, None

    async def _write_singles(self, window: LaneWindow, start: int, stop: int) -> None:
        await self._writer.write_in_order(window, start, stop, immediate=True)
        await self._writer.transaction.check_constraints()

    async def _write_by_keys(self, window: LaneWindow, number: int) -> None:
        """Write a transaction of tables that foreign keys connect: try each order that may satisfy
        the keys.

        The window does not contain the order of changes across tables. Sets are written in the
        order that the foreign keys require. Exact order goes table by table, forward or in reverse.
        """
        writer = self._writer
        single = window.single_transaction(number)
        if not any(map(writer.has_blocked_keys, single.relations)):
            try:
                await writer.write(single)
                await writer.transaction.check_constraints()
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await writer.rollback_to_savepoint()
            else:
                return
        try:
            await self._write_transaction(window, number)
        except ConflictError as exc:
            if exc.kind != "foreign_key":
                raise
            await writer.rollback_to_savepoint()
            await writer.write_in_order(window, number, number + 1, reverse=True)
            await writer.transaction.check_constraints()

    async def _write_transaction(self, window: LaneWindow, number: int) -> None:
        """Write a transaction, at whose end every constraint must hold."""
        writer = self._writer
        try:
            await writer.write_in_order(window, number, number + 1)
            await writer.transaction.check_constraints()
        except StreamerError as exc:
            if exc.retry is Retry.TIMED or not may_divert(window.transactions[number]):
                raise
            # A deferred constraint does not say which row violates it.
            await writer.rollback_to_savepoint()
            await writer.write_in_order(window, number, number + 1, immediate=True)
            await writer.transaction.check_constraints()


def _is_one_change(window: LaneWindow, start: int, stop: int) -> bool:
    """Whether each transaction is a single change of a table whose refused changes go into
    quarantine.
    """
    return all(
        len(lane_transaction.changes) == 1
        and len(lane_transaction.changes[0][1].payloads) == 1
        and diverts(lane_transaction.changes[0][0])
        for lane_transaction in window.transactions[start:stop]
    )
