"""Commands about users of the page and the API.

These commands edit the mapping database directly, so no password crosses the network. A running
process reads the change within a second.
"""

import sys
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from streamer.cli.shared_options import JsonOption, example
from streamer.cli.terminal import GLOBALS, fail, show, with_mapping_database

if TYPE_CHECKING:
    from streamer.config.settings import Settings

PASSWORD_LENGTH_MIN: Final = 12

users = typer.Typer(help="List and edit users of the page and the API.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="Name of the user.", metavar="NAME")]


def _settings() -> "Settings":
    from streamer.config import static_mapping

    _, settings = static_mapping.read(GLOBALS.config, GLOBALS.overrides)
    return settings


def _settings_for_edit(name: str) -> "Settings":
    settings = _settings()
    if settings.mapping_database is None:
        fail(
            "without mapping_database, users are in the configuration file; write them to "
            "admin.users, with hashes from streamer admin hash-password",
            2,
        )
    if any(user.name == name for user in settings.admin.users):
        fail(f'user "{name}" is in admin.users of the configuration file; edit it there', 2)
    return settings


@users.command("add", epilog=example("streamer users add alice --role admin"))
def add_user(
    name: NameArgument,
    role: Annotated[
        Literal["viewer", "admin"], typer.Option(help="viewer: read access; admin: full access.")
    ] = "viewer",
) -> None:
    """Add a user, or change a user's password and role. Prompts for the password, or reads stdin.

    The command warns about passwords of fewer than 12 characters. The command needs
    `mapping_database`; without that setting, users are in `admin.users`.
    """
    from streamer.admin.service.access import hash_password
    from streamer.commands.table_requests import command_actor

    settings = _settings_for_edit(name)
    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not name or not password:
        fail("a user needs a name and a password", 2)
    if len(password) < PASSWORD_LENGTH_MIN:
        typer.echo(
            f"streamer: warning: the password has fewer than {PASSWORD_LENGTH_MIN} characters",
            err=True,
        )
    hashed = hash_password(password)
    is_new = with_mapping_database(
        settings, lambda store: store.set_user(name, role, hashed, command_actor())
    )
    typer.echo(f"{'added' if is_new else 'changed'}: {name} ({role})")


@users.command("remove", epilog=example("streamer users remove alice"))
def remove_user(name: NameArgument) -> None:
    """Remove a user and end the user's sessions."""
    from streamer.commands.table_requests import command_actor

    with_mapping_database(
        _settings_for_edit(name), lambda store: store.remove_user(name, command_actor())
    )
    typer.echo(f"removed: {name}")


@users.command("list", epilog=example("streamer users list --json"))
def list_users(as_json: JsonOption = False) -> None:
    """List users with their roles."""
    from streamer.commands.terminal_table import Listing, ListingColumn

    settings = _settings()
    rows = [
        {"name": user.name, "role": user.role.value, "from": "configuration"}
        for user in settings.admin.users
    ]
    if settings.mapping_database is not None and settings.mapping_database.exists():
        stored = with_mapping_database(settings, lambda store: store.users())
        rows += [{"name": u["name"], "role": u["role"], "from": "database"} for u in stored]
    columns = [ListingColumn(name, itemgetter(name)) for name in ("name", "role", "from")]
    empty_text = "no users; add one with streamer users add NAME --role admin"
    show(Listing(None, columns, empty_text), rows, as_json=as_json)
