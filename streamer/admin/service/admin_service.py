"""The operations on the mapping, for API and command line: edit, plan, apply, request.

Edits change only the draft. Applying builds the mapping from the draft, reads the servers, stores
the mapping as the newest revision and switches the engine to that mapping. streamer rejects a
faulty draft before any change. `streamer run` starts with the newest revision, so a process that
dies during a switch finishes the switch at the next start.

Without a mapping database the operations only read: the sources of the YAML file are in a store in
memory.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from streamer.admin.mapping import api_models
from streamer.admin.mapping.admin_store import AdminStore, Query, open_store
from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.mapping.applied_mapping import EMPTY, applied_mapping, keyring_of, show_static
from streamer.admin.mapping.export_and_import import export_mapping, mask_passwords, read_import
from streamer.admin.mapping.file_values import read_file_values
from streamer.admin.mapping.keyring import Keyring
from streamer.admin.mapping.mapping_of_draft import build_mapping, check_table, unfinished
from streamer.admin.mapping.mapping_rows import Content, Row
from streamer.admin.mapping.plan_of_change import Plan, make_plan
from streamer.admin.mapping.written_settings import WrittenSettings, read_written
from streamer.admin.service.discovered_tables import discovered
from streamer.admin.service.repair_tables import Repairs
from streamer.admin.service.server_reads import ALL, TARGET, ServerReads
from streamer.admin.service.table_side_by_side import read_table_pair
from streamer.admin.service.tenant_service import Tenants
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.requests import Request, read_audited
from streamer.commands.check.source_facts import SourceFacts, read_source
from streamer.commands.conflict_log import read_conflicts
from streamer.commands.quarantined_rows import (
    Choice,
    QuarantinedRow,
    count_rows,
    read_rows,
    request_action,
)
from streamer.commands.source_requests import restart
from streamer.commands.status import read_report
from streamer.commands.table_requests import request
from streamer.config.allowed_names import HINT as ALLOWED_HINT
from streamer.config.allowed_names import AllowedNames, NotAllowedError
from streamer.config.settings import Settings
from streamer.config.yaml_file import (
    replace_variables,
)
from streamer.errors.error_classes import (
    AdminError,
    ConfigurationError,
    InvalidError,
    MappingError,
    NotFoundError,
    ReadOnlyError,
    StreamerError,
    TakenError,
    TargetError,
    UnreadyError,
)
from streamer.mapping.lost_mapping import MappingProblem
from streamer.mapping.relation_names import RelationPattern, parse_name, parse_relation
from streamer.mapping.rules import Mapping, SourceLabel, SourceMapping, TableRule, find_source
from streamer.mapping.scope import Scope
from streamer.observability.logs import redact
from streamer.postgres.conninfo import server_name, without_stored_passwords
from streamer.postgres.credentials import ConnectionUrl
from streamer.postgres.password_source import PasswordSource
from streamer.postgres.secret import Secret
from streamer.postgres.url_passwords import has_mask
from streamer.target.connection import TargetAddress
from streamer.target.server_facts import ServerFacts, read_server_facts
from streamer.util.migrations import read_migrations

log = structlog.get_logger()

FACTS_SECONDS: Final = 30.0
"""The maximum age of server facts. Each query for the size of a database reads all file sizes."""
EVERY_TABLE: Final = RelationPattern("*", "*", namespace_is_pattern=True, name_is_pattern=True)


class RunningEngine(Protocol):
    """An engine that switches to a new mapping while running."""

    async def apply(self, mapping: Mapping) -> None: ...

    def confirm_mapping(self) -> None:
        """Make all replicas use the mapping of this process."""


def database_path(settings: Settings) -> str | None:
    """Return the path of the mapping database, independent of the working directory."""
    path = settings.mapping_database
    return None if path is None else str(path.resolve())


def _patterns(names: list[str]) -> list[RelationPattern]:
    return [parse_relation(name, "public") for name in names]


class AdminService:
    """The mapping, and the operations on the mapping. Made by `open_service`."""

    def __init__(
        self,
        settings: Settings,
        config: Path,
        store: AdminStore,
        mapping: Mapping,
        *,
        is_static: bool,
    ) -> None:
        self.settings = settings
        self.store = store
        self.mapping = mapping
        """The whole applied mapping, even if this process runs only some of its sources."""
        self.is_static = is_static
        self.engine: RunningEngine | None = None
        self.select_sources: Callable[[Mapping], Mapping] = lambda mapping: mapping
        self.find_lost_mapping: Callable[[], MappingProblem | None] = lambda: None
        self.on_change: Callable[[str, Row], None] = lambda name, data: None
        self._config = config
        self._address = TargetAddress.parse(settings.target.url)
        self._applying = asyncio.Lock()
        self.reads = ServerReads()
        self._allowed = AllowedNames(settings.admin)
        self.tenants = Tenants(self)
        self.repairs = Repairs(self)

    def labels(self) -> list[str]:
        """Return the labels of all mapped sources."""
        return [source.label for source in self.mapping.sources]

    @property
    def problem(self) -> MappingProblem | None:
        """The fault of the mapping as a whole."""
        return self.store.problem or self.find_lost_mapping()

    async def close(self) -> None:
        await self.tenants.close()
        await self.repairs.close()
        await self.store.close()

    # ---- rows ----------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Raise ReadOnlyError without a mapping database."""
        if self.is_static:
            raise ReadOnlyError(
                "the mapping is in the configuration file",
                hint="edit the file and send SIGHUP, or set mapping_database and run "
                "`streamer import` with the file",
            )

    async def create(self, kind: str, values: Row, actor: str) -> Row:
        """Add a row to the draft. Raises InvalidError, TakenError."""
        self.check_writable()
        row = await self.store.create(kind, self._check(kind, values), actor)
        self.on_change("draft", {"action": "create", "object": kind, "id": row["id"]})
        return row

    async def replace(self, kind: str, number: int, values: Row, actor: str) -> Row:
        """Replace a row of the draft. Raises AdminError."""
        return await self._change(kind, number, lambda row: values, actor)

    async def patch(self, kind: str, number: int, changes: Row, actor: str) -> Row:
        """Change some fields of a row of the draft. Raises AdminError."""
        return await self._change(kind, number, lambda row: row | changes, actor)

    async def _change(
        self, kind: str, number: int, change: Callable[[Row], Row], actor: str
    ) -> Row:
        self.check_writable()

        def changed(row: Row) -> Row:
            for name in ("id", "database"):
                row.pop(name, None)
            return self._check(kind, change(row))

        row = await self.store.replace(kind, number, changed, actor)
        self.on_change("draft", {"action": "change", "object": kind, "id": number})
        return row

    async def delete(self, kind: str, number: int, actor: str) -> None:
        """Remove a row, and its dependents, from the draft. Raises NotFoundError."""
        self.check_writable()
        await self.store.delete(kind, number, actor)
        self.on_change("draft", {"action": "delete", "object": kind, "id": number})

    async def check_source(self, name: str, values: Row) -> Row:
        """Validate and return a new url of database *name*. Raises InvalidError, TakenError."""
        self.check_writable()
        api_models.validate("database", {"name": name})
        fields = self._check("url", values | {"database_id": 1})
        content = await self.store.content()
        ids = {row["id"] for row in content["databases"] if row["name"] == name}
        sids = {row["sid"] for row in content["urls"] if row["database_id"] in ids}
        if fields["sid"] in sids:
            which = f'with sid "{fields["sid"]}"' if fields["sid"] else "without a sid"
            raise TakenError(f"sid: the database already has a url {which}")
        return fields

    async def add_source(self, name: str, url: Row, tables: list[Row], actor: str) -> Row:
        """Add a url with tables, and a new database, in a single transaction.

        Raises InvalidError, TakenError; an error of a table begins with the name of the table.
        """
        fields = await self.check_source(name, url)
        database = api_models.validate("database", {"name": name})
        checked = []
        for table in tables:
            try:
                checked.append(self._check("table", table | {"database_id": 1}))
            except AdminError as exc:
                raise type(exc)(f"{table['name']}: {exc.message}", hint=exc.hint) from None
        row = await self.store.add_source(database, fields, checked, actor)
        self.on_change("draft", {"action": "create", "object": "url", "id": row["id"]})
        return row

    def _check(self, kind: str, values: Row) -> Row:
        fields = api_models.validate(kind, values)
        if kind == "table":
            check_table(fields, self.settings)
        return fields

    async def set_settings(self, changes: Row, actor: str) -> Row:
        """Change settings of the mapping as a whole; None restores a default."""
        self.check_writable()
        merged = {**await self.store.settings(), **changes}
        return await self.store.set_settings(merged, actor)

    # ---- draft, plan, apply --------------------------------------------------------------------

    async def build(self, content: Content) -> Mapping:
        """Return the mapping that *content* describes. Raises ConfigurationError."""
        urls = await self.store.reveal_each(content)
        return await in_admin_thread(build_mapping, content, urls, self.settings)

    async def draft(self) -> Row:
        """Return whether the draft differs from the applied mapping, and its unfinished parts."""
        content = await self.store.content()
        latest = await self.store.latest()
        number, applied = latest if latest is not None else (None, EMPTY)
        return {
            "mapping_database": await in_admin_thread(database_path, self.settings),
            "revision": number,
            "changed": content != applied and not self.is_static,
            "unfinished": unfinished(content),
        }

    async def plan(self) -> Plan:
        """Return the effect of applying the draft. Raises ConfigurationError."""
        content = await self.store.content()
        key = "plan", json.dumps(content, sort_keys=True, default=str)
        return await self.reads.get(key, ALL, lambda: self._plan(content))

    async def _plan(self, content: Content) -> Plan:
        if self.is_static:
            # Without a running process the previous mapping is unknown.
            applied = self.mapping if self.engine is not None else None
            return await make_plan(self.settings, self.mapping, applied)
        plan = await make_plan(self.settings, await self.build(content), self.mapping)
        plan.notes += [f"{text}, so streamer leaves it out" for text in unfinished(content)]
        return plan

    async def apply(self, actor: str, *, force: bool = False) -> Row:
        """Apply the draft. Raises ConfigurationError or UnreadyError before any change.

        *force*: apply even if a source or a table would stop.
        """
        self.check_writable()
        async with self._applying:
            content = await self.store.content()
            mapping = await self.build(content)
            plan = await self._plan(content)
            if plan.obstacles and not force:
                count = len(plan.obstacles) - 1
                more = f" (and {count} more, see the plan)" if count else ""
                raise UnreadyError(
                    redact(f"the draft is not applied: {plan.obstacles[0]}{more}"),
                    hint="remove the obstacle, or apply with force: true (--force)",
                )
            number = await self.store.add_revision(content, actor)
            warning = None
            try:
                await self._switch_to(mapping)
            except ConfigurationError:
                await self.store.drop_revision(number, actor)
                raise
            except StreamerError as exc:  # the state of the source shows the error
                warning = redact(str(exc))
            self.mapping = mapping
            if self.engine is not None:
                self.engine.confirm_mapping()
        self.on_change("applied", {"revision": number})
        log.info("mapping applied", revision=number, actor=actor, sources=len(mapping.sources))
        return {"revision": number, "warning": warning, "plan": plan.to_json()}

    async def _switch_to(self, mapping: Mapping) -> None:
        if self.engine is not None:
            await self.engine.apply(self.select_sources(mapping))

    async def reload(self, settings: Settings, mapping: Mapping) -> None:
        """Switch to the newest revision, perhaps of another process; without a mapping database to
        *mapping*. Raises ConfigurationError, without any change, and StreamerError.
        """
        async with self._applying:
            if not self.is_static:
                mapping = await applied_mapping(self.store, self.settings)
            try:
                await self._switch_to(mapping)
            except ConfigurationError:
                raise
            except StreamerError:
                self.mapping = mapping
                raise
            self.mapping = mapping
            if self.is_static:
                await show_static(self.store, settings, mapping)

    async def discard(self, actor: str) -> None:
        """Reset the draft to the mapping applied last."""
        self.check_writable()
        latest = await self.store.latest()
        await self.store.restore(latest[1] if latest is not None else None, actor)
        self.on_change("draft", {"action": "discard"})

    # ---- YAML ----------------------------------------------------------------------------------

    async def export(self) -> tuple[str, list[str]]:
        """Return the draft as YAML, and the names of the variables that stand for passwords."""
        content = await self.store.content()
        urls = await self.store.reveal(content)
        users = [(row["name"], row["role"]) for row in await self.store.users()]
        return export_mapping(content, urls, await self._written_settings(), users)

    async def file_values(self) -> str:
        """Return the values of the configuration file as YAML, without secrets.

        Raises SettingsError.
        """
        return await in_admin_thread(read_file_values, self._config)

    async def import_text(
        self, path: Path, text: str, actor: str, *, excludes_missing: bool = False
    ) -> list[str]:
        """Replace the draft with a file; return notes. Raises ConfigurationError."""
        self.check_writable()
        # The event loop also streams.
        contents = await in_admin_thread(read_import, path, text, excludes_missing=excludes_missing)
        content = await self.store.content()
        urls = await self.store.reveal(content)
        rows = mask_passwords(contents.groups, content, urls, await self._written_settings())
        for _, _, tables in rows:
            for row in tables:
                check_table(row, self.settings)
        settings = None
        if contents.settings is not None:
            settings = _differing(contents.settings, self.settings)
        await self.store.merge(rows, settings, actor)
        self.on_change("draft", {"action": "import"})
        return contents.notes

    async def _written_settings(self) -> WrittenSettings:
        """Return the settings of the configuration file, if any. Raises SettingsError."""

        def read() -> WrittenSettings:
            return read_written(self._config) if self._config.exists() else WrittenSettings()

        return await in_admin_thread(read)

    # ---- audit ---------------------------------------------------------------------------------

    async def audit(self, query: Query) -> tuple[list[Row], int]:
        """Return operators' changes and requests, the newest first.

        Changes of the mapping are in the mapping database, and requests in the target. The list
        lacks the requests of a target that does not answer.
        """
        end = query.page * query.per_page
        entries, total = await self.store.audit(Query(1, end))
        try:
            requests, count = await self.reads.get(
                ("audit", end), TARGET, lambda: self._read_requests(end)
            )
        except TargetError:
            requests, count = [], 0
        entries += map(_audit_entry, requests)
        entries.sort(key=lambda entry: str(entry["at"]), reverse=True)
        return entries[end - query.per_page : end], total + count

    async def _read_requests(self, end: int) -> tuple[list[Request], int]:
        bookkeeping = Bookkeeping(self._address, "streamer audit")
        try:
            async with bookkeeping.connection() as connection:
                return await read_audited(connection, end)
        finally:
            await bookkeeping.close()

    # ---- servers -------------------------------------------------------------------------------

    async def status(self) -> Row:
        """Return the output of `streamer status --json`, and the state of the draft."""
        shown = await self.reads.get("status", ALL, self._read_status)
        return {
            "mode": "static" if self.is_static else "admin",
            "draft": await self.draft(),
            **{name: shown[name] for name in ("target", "mapping", "sources", "replicas")},
        }

    async def _read_status(self) -> Row:
        report = await read_report(self._address, self.mapping)
        report = replace(report, mapping=self.problem or report.mapping)
        # Thousands of tables take a moment, and the event loop also streams.
        return await in_admin_thread(lambda: _with_redacted_sources(report.to_json()))

    async def target_facts(self) -> ServerFacts:
        """Return version, size and connections of the target, at most `FACTS_SECONDS` old.

        Raises TargetError.
        """
        return await self.reads.get(
            "server of the target", TARGET, self._read_target_facts, FACTS_SECONDS
        )

    async def _read_target_facts(self) -> ServerFacts:
        bookkeeping = Bookkeeping(self._address, "streamer page")
        try:
            async with bookkeeping.connection() as connection:
                return await read_server_facts(connection)
        finally:
            await bookkeeping.close()

    async def discover(
        self, url: str | None, number: int | None, actor: str, *, database: int | None = None
    ) -> Row:
        """Read the catalogs at a stored url or at *url*. Raises InvalidError, SourceError.

        *database*: the group for *url*; the answer marks its tables as mapped. The audit names
        *actor* and server.
        """
        if (url is None) == (number is None):
            raise InvalidError("url: give either url or url_id")
        password_file, excluded = None, []
        if number is not None:
            row = await self.store.get("url", number)
            database, excluded = row["database_id"], row["exclude_tables"]
            content = await self.store.content()
            url = (await self.store.reveal(content))[number]
            password_file = row.get("password_file")
        assert url is not None
        if has_mask(url):
            raise InvalidError("url: *** stands for a stored password: give url_id instead")
        is_from_file = self.is_static and number is not None
        # The check of a password file follows links, which would block the event loop.
        secret = await in_admin_thread(self._open_url, url, password_file, is_from_file)
        facts = await self._read_source_facts(secret, actor)
        if facts.server is None:
            raise facts.error or UnreadyError("the database did not answer")
        names: list[str] = []
        if database is not None:
            content = await self.store.content()
            names = [
                f"{row['schema']}.{row['name']}"
                for row in content["tables"]
                if row["database_id"] == database
            ]
            excluded = excluded + (await self.store.get("database", database))["exclude_tables"]
        return discovered(facts, _patterns(names), _patterns(excluded))

    def _open_url(self, url: str, password_file: str | None, is_from_file: bool) -> Secret:
        """Return *url* with variables replaced. Raises InvalidError.

        *is_from_file*: the configuration file has the url, and may name all variables and files.
        """
        try:
            if is_from_file:
                secret = Secret(replace_variables(url))
                file = None if password_file is None else replace_variables(password_file)
            else:
                self._allowed.check_url(url)
                secret = Secret(self._allowed.replace(url))
                file = None if password_file is None else self._allowed.replace(password_file)
                if file is not None:
                    self._allowed.check_file(file)
        except LookupError as exc:
            raise InvalidError(f"url: {exc.args[0]}") from None
        except NotAllowedError as exc:
            raise InvalidError(f"url: {exc}", hint=ALLOWED_HINT) from None
        if file is not None:
            return ConnectionUrl(secret.reveal(), PasswordSource(file=file))
        return secret if is_from_file else Secret(without_stored_passwords(secret.reveal()))

    async def _read_source_facts(self, url: Secret, actor: str) -> SourceFacts:
        server = server_name(url.reveal())

        async def read() -> SourceFacts:
            await self.store.write_discovery(actor, server)
            rule = TableRule(EVERY_TABLE, EVERY_TABLE)
            return await read_source(SourceMapping("discover", None, url, (rule,)), "public")

        return await self.reads.get(("discover", url), server, read)

    async def request_for_rule(
        self, action: str, number: int, sid: str | None, actor: str, options: Row | None = None
    ) -> list[str]:
        """Request resync, pause or resume for the tables of a rule; return their names."""
        row = await self.store.get("table", number)
        content = await self.store.content()
        patterns = [
            parse_relation(f"{rule['schema']}.{rule['name']}", "public")
            for rule in content["tables"]
            if rule["database_id"] == row["database_id"] and rule["id"] != number
        ]
        exact = [pattern for pattern in patterns if not pattern.is_pattern]
        try:
            requested = await request(
                self._address,
                action,
                f"{row['schema']}.{row['name']}",
                database=row["database"],
                sid=sid,
                options=options,
                actor=actor,
                unless=exact,
            )
        except MappingError as exc:
            hint = "apply the draft; /api/status lists the tables"
            raise UnreadyError(exc.message, hint=exc.hint or hint) from None
        return requested.names

    def source(self, database: str, sid: str | None) -> SourceMapping:
        """Return a source that runs. Raises NotFoundError."""
        if (source := find_source(self.mapping.sources, database, sid)) is not None:
            return source
        raise NotFoundError(
            f'no source "{SourceLabel(database, sid)}" runs',
            hint="name the source in the configuration file, and send SIGHUP"
            if self.is_static
            else "apply the draft; the overview then lists the source",
        )

    async def read_table_pair(self, database: str, sid: str | None, table: str) -> Row:
        """Return a table as defined on both sides. Raises NotFoundError, SourceConnectionError."""
        source = self.source(database, sid)
        namespace = self.mapping.target_namespace
        seen = await self.reads.get(
            ("table", source.label, table),
            source.label,
            lambda: read_table_pair(self.settings, source, parse_name(table), namespace),
        )
        return _redacted_row(seen)

    async def request_for_table(
        self,
        action: str,
        database: str,
        sid: str | None,
        table: str,
        actor: str,
        options: Row | None = None,
    ) -> None:
        """Request resync, pause or resume of a table of a source. Raises UnreadyError."""
        name = str(parse_name(table))
        if sid is None:
            self.source(database, sid)  # a group without sids has a single url
        try:
            await request(
                self._address,
                action,
                name,
                database=database,
                sid=sid,
                options=options,
                actor=actor,
            )
        except MappingError as exc:
            raise UnreadyError(exc.message, hint=exc.hint) from None

    async def restart(self, database: str, sid: str | None, actor: str) -> Row:
        """Request the restart of a source; return its label and the id of the request.

        Raises NotFoundError, and UnreadyError for a source that has never run.
        """
        source = self.source(database, sid)
        try:
            requested = await restart(self._address, source.label, actor)
        except MappingError as exc:
            raise UnreadyError(exc.message, hint=exc.hint) from None
        return {"action": "restart", "source": requested.label, "request": requested.request_id}

    async def quarantine(self, choice: Choice, limit: int) -> Row:
        """Return the oldest changes in quarantine, and the number of all these changes."""

        async def read() -> tuple[list[QuarantinedRow], int]:
            rows = await read_rows(self._address, choice, limit)
            return rows, await count_rows(self._address, choice)

        try:
            rows, total = await self.reads.get(("quarantine", choice, limit), TARGET, read)
        except MappingError:  # an unmapped table has no quarantined changes
            rows, total = [], 0
        return {"items": [_redacted(asdict(row)) for row in rows], "total": total}

    async def conflicts(self, scope: Scope, limit: int) -> Row:
        """Return the newest conflicts. Raises TargetError, InvalidError."""
        try:
            records = await self.reads.get(
                ("conflicts", scope, limit),
                TARGET,
                lambda: read_conflicts(self._address, scope, limit),
            )
        except MappingError as exc:
            raise InvalidError(exc.message, hint=exc.hint) from None
        return {"items": [_redacted(asdict(r)) for r in records]}

    async def request_quarantine_action(self, action: str, choice: Choice, actor: str) -> list[Row]:
        """Request `retry` or `drop`; return the tables and their numbers of changes. Raises
        InvalidError, UnreadyError.
        """
        if choice.table is None and not choice.ids:
            raise InvalidError("ids: name the changes, or their table")
        try:
            requested = await request_action(self._address, action, choice, actor)
        except MappingError as exc:
            raise UnreadyError(exc.message, hint=exc.hint) from None
        return [{"table": name, "changes": count} for name, count in requested.values()]


def _differing(settings: Row, file: Settings) -> Row:
    """Return the settings of an imported file that differ from this process's configuration."""
    current = {"target_schema": file.target.schema_, "on_error": file.on_error.value}
    return {name: value for name, value in settings.items() if value != current[name]}


def _with_redacted_sources(status: Row) -> Row:
    return status | {"sources": _redacted(status["sources"])}


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    return value


def _audit_entry(request: Request) -> Row:
    """Return an operator's request as an entry of the audit."""
    at = request.requested_at
    assert at is not None
    return {
        "id": request.request_id,
        "at": at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "actor": request.actor,
        "action": request.verb,
        "object": request.object,
        "object_id": None,
        "label": request.label,
        "before": None,
        "after": request.shown_options or None,
        "state": request.state,
        "error": request.reason and redact(request.reason),
    }


def _redacted_row(row: Row) -> Row:
    redacted: Row = _redacted(row)
    return redacted


# ---- opening -----------------------------------------------------------------------------------


async def open_service(settings: Settings, config: Path, mapping: Mapping) -> AdminService:
    """Open the mapping database, or show the *mapping* of the configuration file.

    Raises ConfigurationError.
    """
    # Reads of files would block the event loop; later calls use the cached content.
    await in_admin_thread(read_migrations, "target")
    is_static = settings.mapping_database is None
    keyring = Keyring.temporary() if is_static else keyring_of(settings)
    store = await open_store(settings.mapping_database, keyring)
    try:
        if not is_static:
            mapping = await applied_mapping(store, settings)
        service = AdminService(settings, config, store, mapping, is_static=is_static)
        if is_static:
            await show_static(store, settings, mapping)
    except BaseException:
        await store.close()  # the store's open thread would prevent the end of the process
        raise
    return service
