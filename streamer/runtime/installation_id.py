"""The id of this installation, known even while the target is unreachable.

The target's bookkeeping holds the id. Without the id, a process that starts during an outage of the
target could not recognise its publications. The process therefore keeps a copy of the id in
``spool.directory``, in a file named after the target. Processes with different targets are
different installations, even in the same directory.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

import structlog

from streamer.postgres.conninfo import parse_conninfo
from streamer.util.owned_directory import make_private, read_private
from streamer.util.waiting import in_thread

log = structlog.get_logger()

_PLACE: Final = ("host", "hostaddr", "port", "dbname", "user", "service")
_ID_LENGTH_MAX: Final = 200


def installation_file(directory: Path, target_url: str) -> Path:
    """Return the path of the file in *directory* with the installation id for this target."""
    parameters = parse_conninfo(target_url)
    place = [parameters.get(name) or os.environ.get(f"PG{name.upper()}", "") for name in _PLACE]
    # libpq's variable for the database name does not follow from the parameter's name.
    place.append("" if parameters.get("dbname") else os.environ.get("PGDATABASE", ""))
    digest = hashlib.sha256("\0".join(place).encode()).hexdigest()
    return directory / f"installation-{digest[:16]}"


class Installation:
    """The id of this installation, or None until the target or a stored copy has shown the id."""

    def __init__(self, directory: Path, target_url: str) -> None:
        self._path = installation_file(directory, target_url)
        self.id = self._read()

    def _read(self) -> str | None:
        try:
            text = read_private(self._path).strip()
        except (OSError, ValueError):
            return None
        return text if 0 < len(text) <= _ID_LENGTH_MAX else None

    async def store(self, installation: str) -> None:
        """Store the id that the target's bookkeeping has. Log a failure to write the file."""
        await in_thread(self._store_blocking, installation)

    def _store_blocking(self, installation: str) -> None:
        if installation == self.id and self._path.exists():
            return
        self.id = installation
        try:
            self._write(installation)
        except OSError as exc:
            log.warning(
                "streamer cannot store the id of this installation; a process that starts while "
                "the target is unreachable will not touch a replication slot",
                file=str(self._path),
                error=exc.strerror,
            )

    def _write(self, installation: str) -> None:
        directory = self._path.parent
        make_private(directory)
        # mkstemp gives mode 0600. A rename leaves the old or the new file after a crash.
        descriptor, name = tempfile.mkstemp(prefix=".installation-", dir=directory)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"{installation}\n")
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self._path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
