"""The variables and files that the mapping database, the page and the API may name.

The author of a url chooses the server that receives the password. So a url must not name arbitrary
variables and files of this machine. The configuration file lists the variables and files that the
mapping may use. A variable stands for a secret only. In a host name, its value would go to a name
server; in a database name, into a message.
"""

import fnmatch
import os
from typing import Final

from streamer.config.settings import AdminSettings
from streamer.config.yaml_file import names_in, replace_variables
from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.url_passwords import names_outside_secrets, without_references

VARIABLES: Final = "admin.variables"
DIRECTORY: Final = "admin.secrets_directory"
HINT: Final = (
    f"{VARIABLES} of the configuration file lists the variables that the mapping may name, and "
    f"{DIRECTORY} is the directory of its files"
)
_FILES: Final = ("passfile", "sslcert", "sslkey")
_REFUSED: Final = {
    "service": "may hold a stored password",
    "servicefile": "may hold a stored password",
    "sslkeylogfile": "writes a file",
    "gssdelegation": "passes on a login of the machine",
}


class NotAllowedError(Exception):
    """A url or rule names a variable or file that the configuration does not list."""


class AllowedNames:
    """Checks the names in the mapping database, and the names from the page and the API."""

    def __init__(self, settings: AdminSettings) -> None:
        self._variables = settings.variables
        self._directory = settings.secrets_directory

    def check_variable(self, name: str) -> None:
        """Raise NotAllowedError for a variable that `admin.variables` does not list."""
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self._variables):
            raise NotAllowedError(f"environment variable {name} is not in {VARIABLES}")

    def check_file(self, path: str) -> None:
        """Raise NotAllowedError for a file outside of `admin.secrets_directory`."""
        if self._directory is not None:
            directory = os.path.realpath(self._directory)
            if os.path.commonpath([directory, os.path.realpath(path)]) == directory:
                return
        raise NotAllowedError(f"{path} is not in {DIRECTORY}")

    def check_url(self, url: str) -> None:
        """Raise NotAllowedError for a url that could take a secret elsewhere."""
        self.check_text(url)
        if names := names_outside_secrets(url):
            raise NotAllowedError(
                f"${{{names[0]}}} is outside of a password; only a password may be a variable"
            )
        try:
            parameters = parse_conninfo(without_references(url))
        except ValueError:  # the connection reports this error
            return
        for name, effect in _REFUSED.items():
            if name in parameters:
                raise NotAllowedError(f"the parameter {name} {effect}; leave it out")
        for name in _FILES:
            if name in parameters:
                self.check_file(parameters[name])
        # libpq finds a password of `passfile` by the name in `host`, and sends it to `hostaddr`.
        if "hostaddr" in parameters and "host" in parameters:
            raise NotAllowedError("hostaddr beside host may send a stored password elsewhere")

    def check_text(self, text: str) -> None:
        """Raise NotAllowedError unless the mapping may name each variable in *text*."""
        for name in names_in(text):
            self.check_variable(name)

    def replace(self, text: str) -> str:
        """Return *text* with its variables replaced. Raises LookupError, NotAllowedError."""
        self.check_text(text)
        return replace_variables(text)
