"""``streamer repair`` and ``streamer compare --repair``: correct tables that differ.

The comparison names the keys of the rows that differ, and a resync of these keys copies the rows
(`streamer.control.resync_options.RowScope`). The repair works like a resync: changes wait at the
position of a snapshot, and a single transaction swaps rows and stores the position. With too many
keys, or for rows without a key, a resync in mode `diff` copies the differing rows of the whole
table. The command then compares the same rows again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rich.console import Console

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.requests import make_request
from streamer.bookkeeping.taken_requests import find_mixed_rows
from streamer.commands.compare_command import compare
from streamer.commands.request_outcomes import await_outcomes
from streamer.commands.table_requests import SourceKey, command_actor
from streamer.compare.comparison import ComparisonScope, Options, TableResult
from streamer.config.settings import Settings
from streamer.control.resync_options import Mode, Resync, RowScope
from streamer.errors.error_classes import ComparisonError
from streamer.mapping.expressions import Expression
from streamer.mapping.rules import Mapping
from streamer.target.connection import TargetAddress

KEYS_MAX: Final = 5000
"""The bookkeeping stores the keys of a request. With more keys, the resync compares the whole
table.
"""


async def repair(
    settings: Settings,
    mapping: Mapping,
    scope: ComparisonScope,
    options: Options,
    *,
    actor: str | None = None,
    console: Console | None = None,
) -> list[TableResult]:
    """Compare tables, repair the tables that differ, and compare the repaired tables again.

    *actor*: the operator; by default the user of the command line. *console*: see `compare`.

    Return the results of the last comparison of each table. Raises ComparisonError if a repair ends
    with an error, and the errors of `compare`.
    """
    options = replace(options, keys_max=KEYS_MAX)
    results = await compare(settings, mapping, scope, options, console)
    different = [result for result in results if result.is_different]
    if not different:
        return results
    address = TargetAddress.parse(settings.target.url)
    await _repair_tables(address, different, scope.where, actor or command_actor())
    again = await compare(
        settings,
        mapping,
        replace(scope, relation_ids=frozenset(result.relation_id for result in different)),
        options,
        console,
    )
    results_again = {result.relation_id: result for result in again}
    for former in different:
        now = results_again[former.relation_id]
        now.repaired = None if now.error else max(0, former.differing - now.differing)
    return [results_again.get(result.relation_id, result) for result in results]


def choose_resync(result: TableResult, where: Expression | None) -> Resync:
    """Return the resync that copies the rows of *result* that differ. Pure.

    *where*: the condition of the comparison.
    """
    if result.keys is not None:
        return Resync(Mode.DIFF, scope=RowScope(keys=(result.keys,)))
    if where is not None:
        return Resync(Mode.DIFF, scope=RowScope((where.text,)))
    return Resync(Mode.DIFF)


async def _repair_tables(
    address: TargetAddress,
    different: Sequence[TableResult],
    where: Expression | None,
    actor: str,
) -> None:
    """Request a resync of tables, and wait for the end of the requests."""
    bookkeeping = Bookkeeping(address, "streamer repair")
    try:
        relations = {r.relation_id: r for r in await read_relation_records(bookkeeping)}
        refused, ids = None, []
        for result in different:
            resync = choose_resync(result, where)
            source = SourceKey(result.database, result.sid)
            if mixed := find_mixed_rows(relations[result.relation_id], resync, source):
                refused = refused or mixed
                continue
            ids.append(
                await make_request(
                    bookkeeping, result.relation_id, "resync", resync.to_json(), actor=actor
                )
            )
        ended = await await_outcomes(bookkeeping, ids, expects_process=True)
    finally:
        await bookkeeping.close()
    for request in ended.requests:
        if request.has_failed:
            raise ComparisonError(
                f"the repair of {request.label} failed: {request.reason}",
                hint="remove this cause, and run `streamer repair` again",
            )
    if ended.obstacle is not None:
        hint = "start `streamer run`, which makes the repair; then compare again"
        if not ended.is_absent:
            hint = "wait until `streamer requests` shows the outcome; then compare again"
        raise ComparisonError(f"{ended.obstacle}, so the repair waits", hint=hint)
    if refused is not None:
        raise ComparisonError(refused.message, hint=refused.remedy)
