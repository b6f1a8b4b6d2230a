"""The commands about users of the page and the API.

They edit the mapping database itself, so a password never crosses the network. A process that runs
takes the change over within a second.
"""

import sys
from typing import Annotated, Final

import typer

from streamer.cli.options import JsonOption
from streamer.cli.terminal import GLOBALS, fail, print_json, with_mapping_database
from streamer.config import static
from streamer.config.settings import Role, Settings

PASSWORD_LENGTH_MIN: Final = 12

users = typer.Typer(help="Users of the page and the API.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="The user's name.", metavar="NAME")]


def _settings() -> Settings:
    _, settings = static.read(GLOBALS.config, GLOBALS.overrides)
    return settings


def _editable(name: str) -> Settings:
    settings = _settings()
    if settings.mapping_database is None:
        fail(
            "users are in the configuration file while mapping_database is not set; "
            "write them to admin.users: streamer admin hash-password",
            2,
        )
    if any(user.name == name for user in settings.admin.users):
        fail(f'user "{name}" is in admin.users of the configuration file; edit it there', 2)
    return settings


@users.command("add")
def add_user(
    name: NameArgument,
    role: Annotated[Role, typer.Option(help="viewer: look; admin: also change.")] = Role.VIEWER,
) -> None:
    """Add a user, or give one a new password and role. Asks for the password, or reads stdin."""
    from streamer.admin.access import hash_password
    from streamer.commands.requests import command_actor

    settings = _editable(name)
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
        settings, lambda store: store.set_user(name, role.value, hashed, command_actor())
    )
    typer.echo(f"{'added' if is_new else 'changed'}: {name} ({role.value})")


@users.command("remove")
def remove_user(name: NameArgument) -> None:
    """Remove a user and end the user's sessions."""
    from streamer.commands.requests import command_actor

    with_mapping_database(_editable(name), lambda store: store.remove_user(name, command_actor()))
    typer.echo(f"removed: {name}")


@users.command("list")
def list_users(as_json: JsonOption = False) -> None:
    """List users with their roles."""
    settings = _settings()
    rows = [
        {"name": user.name, "role": user.role.value, "from": "configuration"}
        for user in settings.admin.users
    ]
    if settings.mapping_database is not None and settings.mapping_database.exists():
        stored = with_mapping_database(settings, lambda store: store.users())
        rows += [{"name": u["name"], "role": u["role"], "from": "database"} for u in stored]
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo("no users; add one: streamer users add NAME --role admin")
    for row in rows:
        typer.echo(f"{row['name']}  {row['role']}  {row['from']}")
