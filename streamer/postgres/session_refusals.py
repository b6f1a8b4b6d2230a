"""The causes for which a server that answers refuses a session, each with its remedy.

asyncpg reports the SQLSTATE of a refusal. libpq reports only the text, in the language of the
server's `lc_messages`. A SQLSTATE has several causes, so the text decides among these.
"""

import enum
import getpass
import os
import re
from dataclasses import dataclass
from typing import Final

from streamer.errors.remedies import Remedy, Side, at_source, at_target
from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.quoting import quote_identifier
from streamer.postgres.secret import Secret


class RefusalKind(enum.Enum):
    """The kinds of causes, which decide the class of the error."""

    LOGIN = "login"
    """Role, password, database or pg_hba.conf is wrong."""
    LIMIT = "limit"
    """Role, database or server has too many connections."""
    STATE = "state"
    """The server starts, stops or recovers."""


@dataclass(frozen=True, slots=True)
class SessionLogin:
    """A connection attempt. ``setting``: the setting with role, password and database.

    ``needs``: the connections that streamer needs at the server, in words; empty if unknown.
    """

    side: Side
    url: Secret
    setting: str
    needs: str = ""

    @property
    def names(self) -> dict[str, str]:
        """The names of role and database, by libpq's rules."""
        parameters = parse_conninfo(self.url.reveal())
        role = parameters.get("user") or os.environ.get("PGUSER") or getpass.getuser()
        database = parameters.get("dbname") or os.environ.get("PGDATABASE") or role
        return {"role": role, "database": database}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A cause of a refusal. ``text``: a pattern for the message, with groups for the names in the
    message; an empty pattern matches each message with ``state``.

    ``advice`` and ``statement`` have fields in braces.
    """

    state: str
    text: str
    kind: RefusalKind
    advice: str
    statement: str = ""

    def matches(self, text: str, state: str | None) -> bool:
        if not self.text:
            return state == self.state
        return state in (None, self.state) and re.search(self.text, text) is not None

    def remedy(self, text: str, login: SessionLogin) -> Remedy:
        """Return the remedy for the message *text*."""
        match = re.search(self.text, text) if self.text else None
        names = login.names | (match.groupdict() if match else {})
        # A session to run the statement must not begin in the database that refuses sessions.
        maintenance = "template1" if names["database"] == "postgres" else "postgres"
        words = self.advice.format(
            side=login.side, setting=login.setting, maintenance=maintenance, line=_hba_line(text)
        )
        if self.kind is RefusalKind.LIMIT and login.needs:
            words = f"streamer needs {login.needs}; {words}"
        if not self.statement:
            return Remedy.of(words)
        sql = self.statement.format(**{k: quote_identifier(v) for k, v in names.items()})
        if login.side == "source":
            return Remedy.of(words, at_source(sql, database=maintenance))
        return Remedy.of(words, at_target(sql, database=maintenance))


_HBA: Final = re.compile(
    r'for (?:replication connection from )?host "(?P<host>[^"]*)", user "(?P<user>.*?)"'
    r'(?:, database "(?P<database>.*?)")?, (?P<encryption>no encryption|SSL off|SSL|GSS)'
)


def _hba_line(text: str) -> str:
    """Return the line of pg_hba.conf that accepts the connection that message *text* names."""
    match = _HBA.search(text)
    if match is None:
        return "a line for this connection"
    host, database = match["host"], match["database"]
    kinds = {"SSL": "hostssl", "GSS": "hostgssenc"}
    words = [kinds.get(match["encryption"], "host")]
    words.append("replication" if database is None else quote_identifier(database))
    words.append(quote_identifier(match["user"]))
    if host == "[local]":
        words[0] = "local"
    else:
        words.append(f"{host}/{128 if ':' in host else 32}")
    return f"the line `{' '.join(words)} scram-sha-256`"


_ADMINISTRATOR: Final = "have an administrator run at the {side}: "
_ELSEWHERE: Final = "have an administrator run at the {side}, in database {maintenance}: "
_LIMIT: Final = "raise or remove the limit; " + _ADMINISTRATOR
_REFUSALS: Final = (
    Refusal(
        "28P01",
        "password authentication failed|no password supplied",
        RefusalKind.LOGIN,
        "check that the role exists at the {side}, and that {setting} has its password",
    ),
    Refusal(
        "28000",
        'role "(?P<role>.*)" does not exist',
        RefusalKind.LOGIN,
        "correct the role in {setting}, or " + _ADMINISTRATOR,
        "create role {role} login",
    ),
    Refusal(
        "28000",
        'role "(?P<role>.*)" is not permitted to log in',
        RefusalKind.LOGIN,
        _ADMINISTRATOR,
        "alter role {role} login",
    ),
    Refusal(
        "28000",
        "no pg_hba.conf entry for|pg_hba.conf rejects",
        RefusalKind.LOGIN,
        "have an administrator put {line} into pg_hba.conf of the {side}, "
        "before any line that rejects the connection; then run: ",
        "select pg_catalog.pg_reload_conf()",
    ),
    Refusal(
        "28000",
        "authentication failed",
        RefusalKind.LOGIN,
        "check the role in {setting}, and the authentication method of the {side} in pg_hba.conf",
    ),
    Refusal(
        "3D000",
        'database "(?P<database>.*)" does not exist',
        RefusalKind.LOGIN,
        "correct the database in {setting}, or " + _ELSEWHERE,
        "create database {database}",
    ),
    Refusal(
        "42501",
        'permission denied for database "(?P<database>.*)"',
        RefusalKind.LOGIN,
        _ADMINISTRATOR,
        "grant connect on database {database} to {role}",
    ),
    Refusal(
        "42501",
        "permission denied to start WAL sender"
        "|must be superuser or replication role to start walsender",
        RefusalKind.LOGIN,
        _ADMINISTRATOR,
        "alter role {role} replication",
    ),
    Refusal(
        "55000",
        'database "(?P<database>.*)" is not currently accepting connections',
        RefusalKind.LOGIN,
        _ELSEWHERE,
        "alter database {database} allow_connections true",
    ),
    Refusal(
        "58P01",
        "could not access file|could not load library",
        RefusalKind.LOGIN,
        "remove the library from session_preload_libraries and local_preload_libraries of role, "
        "database and server at the {side}, or install the library there",
    ),
    Refusal(
        "53300",
        'too many connections for role "(?P<role>.*)"',
        RefusalKind.LIMIT,
        _LIMIT,
        "alter role {role} connection limit -1",
    ),
    Refusal(
        "53300",
        'too many connections for database "(?P<database>.*)"',
        RefusalKind.LIMIT,
        _LIMIT,
        "alter database {database} connection limit -1",
    ),
    Refusal(
        "53300",
        'exceeds "?max_wal_senders"?',
        RefusalKind.LIMIT,
        "raise max_wal_senders at the {side}, and restart that server",
    ),
    Refusal(
        "53300",
        "too many clients already|remaining connection slots are reserved",
        RefusalKind.LIMIT,
        "end idle sessions at the {side}, or raise max_connections there and restart that server",
    ),
    Refusal(
        "57P03",
        "database system is starting up|not yet accepting connections",
        RefusalKind.STATE,
        "wait until the {side} has started; if the start takes long, the server's log has the "
        "reason",
    ),
    Refusal(
        "57P03",
        "database system is in recovery mode",
        RefusalKind.STATE,
        "wait until the {side} has recovered from a crash; the server's log names the cause of the "
        "crash",
    ),
    Refusal(
        "57P03",
        "database system is shutting down",
        RefusalKind.STATE,
        "start the server of the {side} again once the shutdown has ended",
    ),
    Refusal(
        "57P03",
        "database system is not accepting connections",
        RefusalKind.STATE,
        "the server is a standby without hot standby: set hot_standby = on there and restart the "
        "server, or list its primary in {setting}",
    ),
    # Messages in the language of a server.
    Refusal(
        "28000",
        "",
        RefusalKind.LOGIN,
        "check role, password and database in {setting}, and pg_hba.conf of the {side}",
    ),
    Refusal("3D000", "", RefusalKind.LOGIN, "correct the database in {setting}"),
    Refusal(
        "28P01", "", RefusalKind.LOGIN, "check role and password in {setting}, and at the {side}"
    ),
    Refusal("53300", "", RefusalKind.LIMIT, "raise the limit that the message names at the {side}"),
    Refusal("57P03", "", RefusalKind.STATE, "wait until the {side} accepts connections"),
)
"""The causes. For a message, the first match counts."""


def find_refusal(text: str, state: str | None = None) -> Refusal | None:
    """Return the cause of a server's message; None if no server has refused a session."""
    return next((refusal for refusal in _REFUSALS if refusal.matches(text, state)), None)
