"""Shared by all commands: global options, failure, output."""

import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

import typer

from streamer.errors.error_classes import StreamerError
from streamer.util.owned_directory import NotPrivateError

if TYPE_CHECKING:
    from streamer.admin.mapping.admin_store import AdminStore
    from streamer.commands.status import MappingState
    from streamer.commands.terminal_table import Listing
    from streamer.config.settings import Settings
    from streamer.mapping.rules import Mapping
    from streamer.source.slot_and_publications.source_teardown import Teardown
    from streamer.target.connection import TargetAddress

T = TypeVar("T")


@dataclass(slots=True)
class Globals:
    """Values of the global options."""

    config: Path = Path("config.yaml")
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def is_debugging(self) -> bool:
        return self.log_level == "debug"


GLOBALS: Final = Globals()


def fail(message: str, code: int) -> NoReturn:
    """Print the problem on stderr, and exit."""
    from streamer.observability.logs import redact

    typer.echo(f"streamer: {redact(message)}", err=True)
    raise typer.Exit(code)


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a command to the end; a StreamerError becomes one line and an exit code."""
    import asyncio
    import traceback

    try:
        return asyncio.run(coroutine)
    except StreamerError as exc:
        if GLOBALS.is_debugging:
            traceback.print_exc()
        notes = "".join(f" ({note})" for note in getattr(exc, "__notes__", []))
        fail(f"{exc}{notes}", exc.exit_code)
    except typer.Exit:  # `fail` in the coroutine raises this
        raise
    except NotPrivateError as exc:
        step = exc.remedy or "set TMPDIR to a directory of streamer's own user"
        fail(f"cannot use {exc.filename} for temporary files: {exc.strerror}; {step}", 2)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as exc:  # noqa: BLE001  # last resort: one line, and a traceback for debugging
        if GLOBALS.is_debugging:
            traceback.print_exc()
        text = str(exc) or type(exc).__name__
        fail(f"internal error: {type(exc).__name__}: {text}; --log-level debug shows where", 4)


def with_mapping_database(
    settings: "Settings", work: "Callable[[AdminStore], Coroutine[Any, Any, T]]"
) -> T:
    """Run *work* on the mapping database directly, without the process that streams."""
    from streamer.admin.mapping.admin_store import open_store
    from streamer.admin.mapping.applied_mapping import keyring_of

    async def run() -> T:
        store = await open_store(settings.mapping_database, keyring_of(settings))
        try:
            return await work(store)
        finally:
            await store.close()

    return run_to_end(run())


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    """Return a record as its fields, and any other value as text."""
    if hasattr(value, "to_json"):
        return value.to_json()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def show(listing: "Listing[T]", rows: Sequence[T], *, as_json: bool) -> None:
    """Print the rows of a command, for people or as JSON."""
    from streamer.commands.terminal_table import print_rows

    if as_json:
        print_json(rows if listing.name is None else {listing.name: rows})
    else:
        print_rows(listing, rows)


def print_remaining(results: "Sequence[Teardown]", *, on_stderr: bool) -> None:
    """Print the errors of a teardown, and the statements that an administrator must run."""
    from streamer.observability.logs import redact

    for result in results:
        if result.error is not None:
            introduction = "; run at the source:" if result.left_sql else ""
            typer.echo(f"streamer: {redact(result.error)}{introduction}", err=True)
            for statement in result.left_sql:
                typer.echo(f"{statement};", err=on_stderr)


def _settings_and_mapping() -> "tuple[Any, Mapping]":
    from streamer.config import static_mapping

    try:
        return static_mapping.load(GLOBALS.config, GLOBALS.overrides)
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)


def load_to_show() -> "tuple[Any, Mapping, MappingState]":
    """Return the settings, the applied mapping, and the error of its database, if any."""
    from streamer.commands.status import MappingState

    settings, mapping = _settings_and_mapping()
    path = settings.mapping_database
    if path is None:
        return settings, mapping, MappingState()
    from streamer.admin.mapping.applied_mapping import read_applied

    mapping, problem = run_to_end(read_applied(settings))
    return settings, mapping, MappingState(problem, None if path.exists() else path)


def load(*, needs_sources: bool = False) -> "tuple[Any, Mapping]":
    """Return the settings and the applied mapping."""
    from streamer.config.static_mapping import require_sources

    settings, mapping = _settings_and_mapping()
    if settings.mapping_database is not None:
        from streamer.admin.mapping.applied_mapping import load_applied

        mapping = run_to_end(load_applied(settings))
    if needs_sources:
        try:
            require_sources(settings, mapping)
        except StreamerError as exc:
            fail(str(exc), exc.exit_code)
    return settings, mapping


def load_with_target(*, needs_sources: bool = False) -> "tuple[Any, Mapping, TargetAddress]":
    """Return the settings, the applied mapping and the address of the target."""
    settings, mapping = load(needs_sources=needs_sources)
    return settings, mapping, target_of(settings)


def target_of(settings: "Settings") -> "TargetAddress":
    from streamer.runtime.session_needs import address_of_target

    try:
        return address_of_target(settings)
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)
