"""The mapping that is applied: from the newest revision, or from the configuration file.

`streamer run` and the commands begin here, without the service.
"""

from typing import Any, Final

import structlog

from streamer.admin.mapping import api_models
from streamer.admin.mapping.admin_store import AdminStore, open_store
from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.mapping.export_and_import import DraftRows
from streamer.admin.mapping.keyring import Keyring
from streamer.admin.mapping.mapping_file import damage_remedy, find_damage
from streamer.admin.mapping.mapping_of_draft import build_mapping
from streamer.admin.mapping.mapping_rows import Content
from streamer.config.settings import Settings
from streamer.config.yaml_file import escape_references
from streamer.errors.error_classes import AdminError, StoreError
from streamer.errors.remedies import Remedy
from streamer.mapping.lost_mapping import MappingProblem
from streamer.mapping.rules import Mapping

log = structlog.get_logger()

EMPTY: Final[Content] = {"databases": [], "urls": [], "tables": [], "settings": {}}


def keyring_of(settings: Settings) -> Keyring:
    """Return the keyring of the settings, by default a file beside the mapping database."""
    path = settings.admin.key_file
    if path is None and settings.mapping_database is not None:
        path = settings.mapping_database.with_name(f"{settings.mapping_database.name}.key")
    return Keyring(settings.admin.key, path)


async def applied_mapping(store: AdminStore, settings: Settings) -> Mapping:
    """Return the mapping of the newest revision. Raises ConfigurationError."""
    latest = await store.latest()
    content = latest[1] if latest is not None else EMPTY
    urls = await store.reveal_each(content)
    return await in_admin_thread(build_mapping, content, urls, settings)


async def load_applied(settings: Settings) -> Mapping:
    """Return the applied mapping of the database file, for a short command.

    Creates no file. Raises ConfigurationError.
    """
    path = settings.mapping_database
    assert path is not None
    if not await in_admin_thread(path.exists):
        return Mapping((), settings.target.schema_)
    store = await open_store(path, keyring_of(settings))
    try:
        return await applied_mapping(store, settings)
    finally:
        await store.close()


async def read_applied(settings: Settings) -> tuple[Mapping, MappingProblem | None]:
    """Return the applied mapping, and the fault of its database.

    The function serves commands that show the present state, even with a damaged file.
    """
    path = settings.mapping_database
    assert path is not None
    try:
        mapping = await load_applied(settings)
    except StoreError as exc:
        empty = Mapping((), settings.target.schema_)
        return empty, MappingProblem(exc.message, exc.remedy or Remedy(()))
    damage = await in_admin_thread(lambda: find_damage(path) if path.exists() else None)
    if damage is None:
        return mapping, None
    text = f"mapping database {path} is damaged ({damage})"
    return mapping, MappingProblem(text, damage_remedy())


async def show_static(store: AdminStore, settings: Settings, mapping: Mapping) -> None:
    """Fill the store in memory from the configuration file."""
    try:
        await store.merge(_rows_of(settings, mapping), None, "file")
    except AdminError as exc:  # sources run without the API, too
        log.warning("the API cannot show the mapping", error=str(exc))


def _escaped(value: Any) -> Any:
    """Return the values of a loaded configuration in the form of a file."""
    if isinstance(value, str):
        return escape_references(value)
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return value


def _rows_of(settings: Settings, mapping: Mapping) -> DraftRows:
    """Return the sources of the file as rows, with unreplaced variables."""
    written = {(s.database, s.sid): s.written_url for s in mapping.sources}
    rows: DraftRows = []
    for group in settings.sources:
        urls = [
            api_models.validate(
                "url",
                {
                    **url.model_dump(mode="json", exclude={"url", *api_models.COMMAND_FIELDS}),
                    "url": written.get((group.database, url.sid))
                    or escape_references(url.url.reveal()),
                    "database_id": 1,
                },
            )
            for url in group.urls
        ]
        tables = [
            api_models.validate(
                "table",
                {**_escaped(table.model_dump(mode="json")), "name": name, "database_id": 1},
            )
            for name, table in group.tables.items()
        ]
        fields = _escaped(group.model_dump(mode="json", exclude={"database", "urls", "tables"}))
        database = api_models.validate("database", {**fields, "name": group.database})
        rows.append((database, urls, tables))
    return rows
