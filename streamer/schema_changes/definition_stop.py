"""The stop of a table whose definition waits for an operator, with the commands that continue
the table.
"""

from collections.abc import Sequence
from dataclasses import replace

from streamer.bookkeeping.relation_definitions import read_definition
from streamer.control.resync_options import after_loss
from streamer.errors.error_classes import (
    DefinitionStopError,
    SharedTargetError,
    StreamerError,
    TargetSchemaError,
)
from streamer.errors.remedies import Remedy, run
from streamer.schema.source_definition import AnyChange, all_differences
from streamer.schema_changes.changed_table import ChangedTable, SourceCommand
from streamer.schema_changes.changes_with_facts import translate_changes
from streamer.target.catalog import read_relation


def undecided(
    stops: Sequence[AnyChange], doubts: Sequence[str], tried: str | None
) -> TargetSchemaError:
    """Return the reason why a change waits. *tried*: why the last decision failed."""
    listed = [f"on_ddl is stop for {', '.join(map(str, stops))}"] if stops else []
    return TargetSchemaError(tried or "; ".join([*listed, *doubts]))


async def copy_remedy(
    table: ChangedTable, command: SourceCommand, refusal: StreamerError
) -> Remedy | None:
    """Return the command of a copy for a source that is behind its peers, if a copy would help.

    The target accepts the present definition of the source's table, but not an earlier definition
    in the stream.
    """
    if not isinstance(refusal, TargetSchemaError) or command.copy_follows:
        return None
    mapped, session = table.mapped, table.session
    try:
        target = await read_relation(session, mapped.mapping.target)
        if target is None or not target.has_sid:
            return None
        now = await table.read_present()
        stored = await read_definition(session, mapped.relation_id)
        if now is None or stored is None:
            return None
        present = replace(command, definition=now)
        await translate_changes(table, present, target, all_differences(stored, now))
    except StreamerError:  # for instance after a refused statement
        return None
    again = run(
        "resync",
        str(mapped.mapping.source),
        *after_loss([mapped.mapping.type]),
        database=table.source.database,
        sid=table.source.sid,
    )
    return Remedy.of("to copy the table with its present definition, run: ", again, "; ")


async def stop_error(
    table: ChangedTable,
    command: SourceCommand,
    reason: str,
    statements: Sequence[str],
    refusal: StreamerError,
) -> DefinitionStopError:
    """Return the error for the operator."""
    cause, copy = refusal.remedy, await copy_remedy(table, command, refusal)
    name, source = str(table.mapped.mapping.source), table.source
    apply, skip, edit = (
        run(f"ddl {action}", name, *options, database=source.database, sid=source.sid)
        for action, options in (
            ("apply", ()),
            ("skip", ()),
            ("edit", ("--file", "change.sql")),
        )
    )
    # This source alone cannot make a change that concerns its peers.
    may_apply = not isinstance(refusal, SharedTargetError)
    error = DefinitionStopError(
        f'table "{name}" waits for a decision: {reason}; {command.cause}',
        hint=Remedy.of(
            cause,
            "; " if cause else "",
            copy,
            f"streamer would run at the target: {'; '.join(statements)}; " if statements else "",
            *(("continue with `", apply, "`, ") if may_apply else ()),
            "run other statements there with `",
            edit,
            "`, or leave the target as it is with `",
            skip,
            "`",
        ),
    )
    error.subject = table.mapped
    return error
