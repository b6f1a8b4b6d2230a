"""The facts that a bug report needs, in a single file without secrets.

The configuration appears with masks in place of secrets, as on the page. As a second guard, the
bundle blanks each secret of at least `BLANKED_LENGTH_MIN` characters in all gathered texts.
"""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from streamer.bookkeeping import (
    bookkeeping_schema,
    copied_parts,
    deferred_indexes,
    held_changes,
    quarantined_changes,
    relation_records,
    requests,
    sources,
)
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.server_of_run import read_known_server
from streamer.commands.check.check import Examination
from streamer.commands.doctor.diagnosis import Diagnosis, sentences
from streamer.config.connection_settings import COMMAND_FIELDS
from streamer.config.settings import ENVIRONMENT_PREFIX, Settings
from streamer.errors.error_classes import SettingsError, SourceError, StreamerError, TargetError
from streamer.mapping.rules import Mapping, SourceMapping
from streamer.observability import build_facts
from streamer.observability.logs import redact
from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.secret import Secret
from streamer.postgres.url_passwords import MASK, SECRET_PARAMETERS, mask, secret_spans
from streamer.source.connection import connection, fetch_all
from streamer.source.server.primaries_after_failover import require_server_of_run
from streamer.source.timeline_branches import KnownServer
from streamer.target.connection import TargetAddress, target_connection
from streamer.util.waiting import in_thread

BLANKED_LENGTH_MIN: Final = 4
"""The search in texts skips shorter secrets, which would match parts of ordinary words."""
SECONDS_MAX: Final = 30.0


async def check_new(path: Path) -> None:
    """Refuse an existing *path*, before the slow diagnosis. Raises SettingsError."""
    if await asyncio.to_thread(path.exists):
        raise _file_exists_error(path)


def _file_exists_error(path: Path) -> SettingsError:
    return SettingsError(f"{path} already exists", hint="name a new file")


async def write_bundle(
    path: Path, settings: Settings, mapping: Mapping, diagnosis: Diagnosis
) -> None:
    """Write a zip file to *path*, which must not exist yet. Raises SettingsError."""
    texts = {
        "report.txt": "\n".join(sentences(diagnosis)) + "\n",
        "report.json": _as_json(diagnosis.to_json()),
        "check.json": _as_json(diagnosis.examination.report.to_json()),
        "configuration.yaml": yaml.safe_dump(_configuration(settings, mapping), sort_keys=False),
        "status.json": _as_json([status.to_json() for status in diagnosis.status.sources]),
        "slots.json": _as_json(await _slots(settings, mapping)),
        "bookkeeping.json": _as_json(await _bookkeeping(settings)),
        "versions.json": _as_json(_versions(diagnosis.examination)),
    }
    blanker = _SecretBlanker(secrets_of(settings, mapping))
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"streamer/{name}", blanker.blank(redact(text)))
    await in_thread(_write_new, path, data.getvalue())


def _write_new(path: Path, data: bytes) -> None:
    """Write a complete file for its owner alone, or no file. An existing file stays."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(name, path)
        finally:
            os.unlink(name)
    except FileExistsError:
        raise _file_exists_error(path) from None
    except OSError as exc:
        raise SettingsError(
            f"cannot write {path}: {exc.strerror}",
            hint="name a file in a directory that you can write to",
        ) from None


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2, default=str, ensure_ascii=False) + "\n"


# ---- configuration -----------------------------------------------------------------------------


def _configuration(settings: Settings, mapping: Mapping) -> Any:
    shown = _masked(settings)
    if settings.mapping_database is not None:
        shown["sources"] = [_masked(source) for source in mapping.sources]
    names = [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]
    return {"settings": shown, "set_by_environment": sorted(names)}


def _masked(value: Any) -> Any:
    """Return a value of the configuration in types of YAML, secrets masked."""
    if isinstance(value, Secret):
        return MASK
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {
            field.alias or name: _masked_field(name, getattr(value, name))
            for name, field in fields.items()
        }
    if dataclasses.is_dataclass(value):
        return {
            field.name: _masked_field(field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Dictionary):
        return {str(key): _masked(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)


def _masked_field(name: str, value: Any) -> Any:
    if name == "url" and isinstance(value, Secret):
        return mask(value.reveal())
    if name in COMMAND_FIELDS and value is not None:
        return MASK
    return _masked(value)


def secrets_of(settings: Settings, mapping: Mapping) -> set[str]:
    """Return all secret values."""
    secrets = set(_secrets_in(settings))
    for source in mapping.sources:
        secrets |= _secrets_in_url(source.url)
    return secrets


def _secrets_in(value: Any) -> Iterable[str]:
    if isinstance(value, Secret):
        yield value.reveal()
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            field = getattr(value, name)
            if isinstance(field, Secret):
                yield from _secrets_in_url(field) if name == "url" else (field.reveal(),)
            else:
                yield from _secrets_in(field)
    elif isinstance(value, Dictionary):
        for item in value.values():
            yield from _secrets_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _secrets_in(item)


def _secrets_in_url(url: Secret) -> set[str]:
    text = url.reveal()
    written = {span.value_in(text) for span in secret_spans(text)}
    try:
        parameters = parse_conninfo(text)
    except ValueError:
        return written | {text}
    return written | {value for name, value in parameters.items() if name in SECRET_PARAMETERS}


class _SecretBlanker:
    """Blanks secrets in texts of any origin, but not secrets that are too short."""

    def __init__(self, secrets: Iterable[str]) -> None:
        long_enough = (secret for secret in secrets if len(secret) >= BLANKED_LENGTH_MIN)
        self._secrets = sorted(long_enough, key=len, reverse=True)

    def blank(self, text: str) -> str:
        for secret in self._secrets:
            # The plain text, and the text as escaped in JSON.
            for ensure_ascii in (True, False):
                text = text.replace(json.dumps(secret, ensure_ascii=ensure_ascii)[1:-1], MASK)
            text = text.replace(secret, MASK)
        return text


# ---- servers -----------------------------------------------------------------------------------

_SLOTS_SQL: Final = """
select pg_catalog.to_jsonb(s) as slot,
       (select pg_catalog.to_jsonb(r) - 'client_addr' - 'client_hostname'
        from pg_catalog.pg_stat_replication r where r.pid = s.active_pid) as walsender
from pg_catalog.pg_replication_slots s where s.slot_name = %s
"""


async def _slots(settings: Settings, mapping: Mapping) -> list[Any]:
    """Return the slot as each source shows it, or an error if the server is not the server of
    `run`.
    """
    bookkeeping = Bookkeeping(TargetAddress.parse(settings.target.url), "streamer doctor")

    async def read(source: SourceMapping) -> Any:
        server = KnownServer()
        try:
            with contextlib.suppress(TargetError, TimeoutError):  # bookkeeping.json has the error
                async with asyncio.timeout(SECONDS_MAX):
                    server = await read_known_server(bookkeeping, source)
            async with asyncio.timeout(SECONDS_MAX), connection(source) as plain:
                await require_server_of_run(source, plain, server)
                return [dict(row) for row in await fetch_all(plain, _SLOTS_SQL, source.slot)]
        except (SourceError, TimeoutError) as exc:
            return {"error": str(exc) or "no answer in time"}

    try:
        rows = await asyncio.gather(*map(read, mapping.sources))
    finally:
        await bookkeeping.close()
    labels = [source.label for source in mapping.sources]
    return [{"source": label, "slots": slots} for label, slots in zip(labels, rows, strict=True)]


# These statements read names and errors, never values of rows.
_BOOKKEEPING_SQL: Final = {
    "migrations": bookkeeping_schema.SUMMARY_SQL,
    "sources": sources.SUMMARY_SQL,
    "last_changes": relation_records.SUMMARY_SQL,
    "held": held_changes.SUMMARY_SQL,
    "parts": copied_parts.SUMMARY_SQL,
    "quarantine": quarantined_changes.SUMMARY_SQL,
    "requests": requests.SUMMARY_SQL,
    "deferred_indexes": deferred_indexes.SUMMARY_SQL,
}


async def _bookkeeping(settings: Settings) -> Any:
    address = TargetAddress.parse(settings.target.url)
    contents: dict[str, Any] = {}
    try:
        async with (
            asyncio.timeout(SECONDS_MAX),
            target_connection(address, "streamer doctor") as target,
        ):
            for name, sql in _BOOKKEEPING_SQL.items():
                try:
                    contents[name] = [dict(row) for row in await target.fetch(sql)]
                except TargetError as exc:  # an older bookkeeping, or none at all
                    contents[name] = {"error": str(exc)}
    except (StreamerError, TimeoutError) as exc:
        contents["error"] = str(exc) or "no answer in time"
    return contents


def _versions(examination: Examination) -> Any:
    packages = {
        name: importlib.metadata.version(name)
        for name in sorted(
            {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()},
            key=str.lower,
        )
    }
    servers = {
        facts.label: None if facts.server is None else facts.server.version_text
        for facts in examination.sources
    }
    target = examination.target
    return {
        "made_at": datetime.now(UTC).isoformat(),
        "streamer": build_facts.labels(),
        "python": sys.version,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "target_server": None if target is None else target.server.version_text,
        "source_servers": servers,
        "packages": packages,
    }
