"""The reverse stream from the target to the source, for programs that moved to the target.

The configuration mirrors the configuration of the source. The slot exists before programs may write
at the target. So the reverse stream misses no change, whenever its `run` starts. Both streams mark
their transactions with a replication origin, so no change comes back. The tables count as in sync
(``initial: none``), because the earlier steps have proved equality.
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import yaml

from streamer.commands import teardown as teardown_command
from streamer.commands.check.capture_findings import check_capture
from streamer.commands.check.check import examine
from streamer.commands.check.findings import Fix
from streamer.config import static_mapping
from streamer.config.settings import Settings
from streamer.errors.error_classes import CutoverError
from streamer.errors.remedies import Command, Remedy, at_source, at_target
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.postgres.credentials import ConnectionUrl
from streamer.postgres.secret import Secret
from streamer.report.problems import Severity
from streamer.runtime.process.engine import Engine, StopCondition
from streamer.target.connection import TargetAddress

POLL_SECONDS: Final = 0.1


def obstacles(source: SourceMapping, mappings: list[RelationMapping]) -> list[str]:
    """Return the reasons why changes of the target cannot flow back to *source*. Pure."""
    problems = []
    if source.sid is not None:
        problems.append(
            f"source {source.label} has a sid, so rows of other sources may be in its tables"
        )
    for mapping in mappings:
        rule = mapping.rule
        reason = None
        if mapping.type is not TableType.CLONE:
            reason = f"is of type {mapping.type.value}"
        elif rule.may_lack_rows or rule.set or rule.hashes or rule.exclude or rule.metadata:
            reason = "has a filter, copy_where, computed or excluded columns, or row metadata"
        elif rule.sid is not None:
            reason = "has a sid"
        elif rule.is_disjoint:
            reason = "shares its target by `keys: disjoint`"
        if reason is not None:
            problems.append(f'table "{mapping.source}" {reason}, so its rows cannot go back')
    return problems


def document(
    settings: Settings, source: SourceMapping, mappings: list[RelationMapping]
) -> dict[str, Any]:
    """Return the configuration of the reverse stream. Pure."""
    tables: dict[str, Any] = {}
    for mapping in mappings:
        rule: dict[str, Any] = {"target": str(mapping.source), "initial": "none"}
        if mapping.rule.columns is not None:
            rule["columns"] = {target: name for name, target in mapping.rule.columns}
        tables[str(mapping.target)] = rule
    return {
        "target": _login(source.url) | {"create_tables": False},
        "http": {"listen": ""},
        "spool": {"directory": f"{settings.spool.path}-back"},
        "sources": [
            {
                "database": f"{source.database}_back",
                "sequences": True,
                "urls": [_login(settings.target.url)],
                "tables": tables,
            }
        ],
    }


def _login(url: Secret) -> dict[str, Any]:
    """Return the settings of a connection."""
    login: dict[str, Any] = {"url": url.reveal()}
    if isinstance(url, ConnectionUrl):
        password = url.password_source
        if password.file is not None:
            login["password_file"] = password.file
        if password.command is not None:
            login |= {"password_command": password.command, "password_lifetime": password.seconds}
    return login


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a configuration with passwords, readable for its owner only. An existing file stays.

    Raises CutoverError.
    """
    text = "# The reverse stream, by `streamer cutover`: start it with `streamer run`.\n"
    text += yaml.safe_dump(content, sort_keys=False)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as exc:
        raise CutoverError(f"--reverse {path}: {exc.strerror}") from None
    with os.fdopen(handle, "w") as file:
        file.write(text)


async def find_missing(path: Path, content: dict[str, Any]) -> list[tuple[str, Remedy | None]]:
    """Return the findings of `streamer check` that would stop the reverse stream, on either side.

    An existing file at *path* takes precedence over *content*. The list includes warnings
    whose problem a GRANT fixes, and warnings about the event triggers of `ddl: capture`. The
    remedies name the sides of the cut-over: the target is the source of the reverse stream.
    """
    with tempfile.TemporaryDirectory() as directory:
        if not await asyncio.to_thread(path.exists):
            path = Path(directory) / "back.yaml"
            write(path, content)
        settings, mapping = await asyncio.to_thread(static_mapping.load, path)
    examination = await examine(settings, mapping)
    needed = {finding for facts in examination.sources for finding in check_capture(facts)}
    return [
        (f"reverse stream, {finding.place}: {finding.problem}", _remedy(finding.fix))
        for finding in examination.report.findings
        if finding.severity is Severity.ERROR
        or finding in needed
        or (finding.fix is not None and any(sql.startswith("grant ") for sql in finding.fix.sql))
    ]


def _remedy(fix: Fix | None) -> Remedy | None:
    """Convert a fix of the reverse stream into a remedy of the cut-over."""
    if fix is None or not fix.sql:
        return None if fix is None else Remedy.given(fix.words)
    introduction = fix.introduction or fix.usual_introduction
    words = f"; {fix.words}" if fix.words else None
    if fix.at == "here":
        return Remedy.of(f"{introduction}: ", *map(Command, fix.sql), words)
    step = at_target(*fix.sql) if fix.at == "source" else at_source(*fix.sql)
    introduction = introduction.replace(f"at the {fix.at}", f"at the {step.side}")
    return Remedy.of(f"{introduction}: ", step, words)


async def prepare(path: Path, seconds: float) -> None:
    """Create slot and bookkeeping of the reverse stream, and mark its tables as in sync.

    A second call is harmless. Raises an error of the stream that only an operator can end, and
    TimeoutError after *seconds*, with the last error of the stream.
    """
    settings, mapping = await asyncio.to_thread(static_mapping.load, path)
    engine = Engine(settings, mapping, StopCondition(when_caught_up=True))
    deadline = time.monotonic() + seconds
    running = asyncio.ensure_future(engine.run())
    try:
        while not (await asyncio.wait([running], timeout=POLL_SECONDS))[0]:
            for supervisor in engine.supervisors:
                if supervisor.failure is not None:
                    raise supervisor.failure
            if time.monotonic() > deadline:
                errors = [
                    str(member.health.error)
                    for member in engine.supervisors
                    if member.health.error is not None
                ]
                raise TimeoutError("; ".join(["the reverse stream did not start", *errors]))
        await running
    finally:
        if not running.done():
            engine.stop()
            running.cancel()
            await asyncio.wait([running])


async def remove(path: Path) -> None:
    """Remove slot and bookkeeping of the reverse stream. Raises CutoverError."""
    if not await asyncio.to_thread(path.exists):
        return
    settings, mapping = await asyncio.to_thread(static_mapping.load, path)
    results = await teardown_command.teardown(
        TargetAddress.parse(settings.target.url),
        list(mapping.sources),
        settings.spool.path,
        actor=None,
    )
    for result in results:
        if result.error is not None:
            raise CutoverError(
                f"the reverse stream could not be removed: {result.error}",
                hint=f"run `streamer --config {path} teardown --yes`",
            )
