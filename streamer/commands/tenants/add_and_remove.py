"""``streamer tenants add`` and ``remove``: a group's tables and settings are the template.

With a mapping database, both commands edit and apply the draft
(`streamer.admin.service.edit_draft`). Without a mapping database, they edit the configuration file.
If the edit would lose comments or layout, they print the lines to write instead.
"""

import asyncio
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.sources import read_source_records
from streamer.commands.teardown import teardown
from streamer.commands.tenants.tenant_list import read_tenants
from streamer.config import static_mapping
from streamer.config.edit_urls_in_file import add_url, remove_url, url_line
from streamer.config.settings import Settings
from streamer.config.yaml_file import read_text
from streamer.errors.command_lines import command
from streamer.errors.error_classes import MappingError
from streamer.mapping.rules import Mapping, SourceLabel, SourceMapping, find_source
from streamer.source.slot_and_publications.source_teardown import Teardown
from streamer.target.connection import TargetAddress

POLL_SECONDS: Final = 0.2
SID_VARIABLE: Final = "{sid}"


@dataclass(frozen=True, slots=True)
class TenantChange:
    """The effect of adding or removing tenants.

    ``lines``: the lines that the operator must write, if the command did not.
    ``next_step``: the operator's next step. ``is_applied``: the mapping contains the change.
    """

    labels: list[str]
    lines: list[str] = field(default_factory=list)
    next_step: str | None = None
    is_applied: bool = True
    left_sql: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "tenants": self.labels,
            "lines": self.lines,
            "next_step": self.next_step,
            "left_sql": list(self.left_sql),
        }


def urls_of(template: str, sids: list[str]) -> list[tuple[str, str]]:
    """Return url and sid of each new tenant; ``{sid}`` in the url stands for the sid.

    Raises MappingError if two tenants would have the same url.
    """
    urls = [(template.replace(SID_VARIABLE, sid), sid) for sid in sids]
    if len({url for url, _ in urls}) < len(urls):
        raise MappingError(
            "several tenants would have the same url",
            hint=f"write {SID_VARIABLE} in the place where their urls differ",
        )
    return urls


async def check_new(
    address: TargetAddress, mapping: Mapping, database: str, sids: list[str]
) -> None:
    """Raise MappingError for an unknown group, and for sids in use."""
    group = [source for source in mapping.sources if source.database == database]
    if not group:
        raise MappingError(
            f'there is no group "{database}" to which a tenant could be added',
            hint=f"`{command('tenants list')}` shows the groups",
        )
    unnamed = [source for source in group if source.sid is None]
    if any(rule.sid is not None for source in unnamed for rule in source.rules):
        raise MappingError(
            f'the tenants of "{database}" are schemas, so a new tenant joins by itself',
            hint="create its schema and tables at the source",
        )
    if unnamed:
        raise MappingError(
            f'the source of "{database}" has no sid, so streamer could not distinguish its rows '
            "from rows of the new tenant",
            hint="give its url a sid first; its tables then need a column sid and a resync",
        )
    for sid in sids:
        if find_source(group, database, sid) is not None:
            raise MappingError(f'"{SourceLabel(database, sid)}" is already in the mapping')
    for tenant in await read_tenants(address, mapping, database):
        if tenant.purge and tenant.sid in sids:
            raise MappingError(
                f'"{tenant.label}" was removed, and its rows may still be in '
                f"{tenant.purge[0].target}",
                hint=f"run first: {command('tenants purge', database, '--yes', sid=tenant.sid)}",
            )


def add_to_file(config: Path, database: str, urls: list[tuple[str, str]]) -> TenantChange:
    """Write tenants into the configuration file. Raises SettingsError for a faulty result."""
    labels: list[str] = [SourceLabel(database, sid) for _, sid in urls]
    text: str | None = read_text(config)
    for url, sid in urls:
        text = None if text is None else add_url(text, database, url, sid)
    lines = [f"- {url_line(url, sid)}" for url, sid in urls]
    step = f"send SIGHUP to the running process, which then reads {config} again"
    if text is not None and _write(config, text):
        return TenantChange(labels, next_step=step)
    words = f'add these lines to `urls` of "{database}" in {config}; then {step}'
    return TenantChange(labels, lines, words)


def remove_from_file(config: Path, database: str, sid: str) -> TenantChange:
    """Remove a tenant from the configuration file. Raises SettingsError for a faulty result."""
    text = remove_url(read_text(config), database, sid)
    step = f"send SIGHUP to the running process, which then reads {config} again"
    if text is not None and _write(config, text):
        return TenantChange([SourceLabel(database, sid)], next_step=step)
    words = f'remove the url with sid "{sid}" from "{database}" in {config}; then {step}'
    return TenantChange([SourceLabel(database, sid)], [], words)


def _write(config: Path, text: str) -> bool:
    """Write the file if *text* is a valid configuration; return False if the write fails."""
    try:
        path = config.resolve(strict=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new = Path(file.name)
    except OSError:
        return False
    try:
        new.chmod(path.stat().st_mode)
        static_mapping.load(new, {})
        new.replace(path)
    except OSError:
        return False
    finally:
        new.unlink(missing_ok=True)
    return True


async def finish_removal(
    address: TargetAddress, settings: Settings, source: SourceMapping, actor: str, seconds: float
) -> Teardown | None:
    """Wait until the process of *source* drops the slot; without a process, drop the slot.

    Returns None if a process still runs the source after *seconds*.
    """
    bookkeeping = Bookkeeping(address, "streamer tenants")
    try:
        async with asyncio.timeout(seconds):
            await _until_stopped(bookkeeping, source)
    except TimeoutError:
        return None
    finally:
        await bookkeeping.close()
    (result,) = await teardown(
        address, [source], settings.spool.path, actor=actor, drops_schema=False
    )
    return result


async def _until_stopped(bookkeeping: Bookkeeping, source: SourceMapping) -> None:
    """Wait until no process holds the lock of a source."""
    if not await is_installed(bookkeeping):
        return
    while True:
        records = await read_source_records(bookkeeping)
        record = find_source(records, source.database, source.sid)
        if record is None or record.holder is None:
            return
        await asyncio.sleep(POLL_SECONDS)
