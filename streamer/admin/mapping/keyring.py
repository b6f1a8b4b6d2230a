"""Encrypts the passwords in the mapping database.

The key comes from the settings (``admin.key``, which is STREAMER_ADMIN__KEY in the environment) or
from a file that only its owner may read. The first password creates a missing file. The database
never contains the key, so a copy of the database, such as a backup, reveals no password. Of several
keys, in lines or separated by commas, the first key encrypts and all keys decrypt, so an operator
can replace a key.
"""

import os
import re
import shlex
import stat
import tempfile
from pathlib import Path
from typing import Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from streamer.errors.error_classes import StoreError
from streamer.postgres.secret import Secret

_SEPARATORS: Final = re.compile(r"[\s,]+")


def generate_key() -> str:
    """Make a new key."""
    return Fernet.generate_key().decode()


class Keyring:
    """The key in use, read or created for the first password. Reads files: not for the event
    loop.
    """

    def __init__(self, key: Secret | None, path: Path | None) -> None:
        self._key = key
        self._path = path
        self._fernet: MultiFernet | None = None

    @classmethod
    def temporary(cls) -> "Keyring":
        """Return a keyring for data that does not outlive the process."""
        return cls(Secret(generate_key()), None)

    def encrypt(self, text: str) -> str:
        """Encrypt *text*; create the key file if missing. Raises StoreError."""
        return self._open(may_create=True).encrypt(text.encode()).decode()

    def decrypt(self, token: str, label: str) -> str:
        """Return the decrypted text; *label* names the owner of the password. Raises StoreError."""
        try:
            return self._open(may_create=False).decrypt(token).decode()
        except InvalidToken:
            raise StoreError(
                f"the stored password of {label} was encrypted with another key",
                hint=f"give that key in {self._place}, or enter the password again",
            ) from None

    @property
    def _place(self) -> str:
        return "STREAMER_ADMIN__KEY" if self._key is not None else str(self._path)

    def _open(self, *, may_create: bool) -> MultiFernet:
        if self._fernet is None:
            text = self._key.reveal() if self._key is not None else self._read(may_create)
            self._fernet = self._parse(text)
        return self._fernet

    def _parse(self, text: str) -> MultiFernet:
        keys = [key for key in _SEPARATORS.split(text) if key]
        try:
            return MultiFernet([Fernet(key) for key in keys])
        except ValueError:
            raise StoreError(
                f"{self._place}: not a key",
                hint="`streamer admin generate-key` prints one",
            ) from None

    def _read(self, may_create: bool) -> str:
        path = self._path
        assert path is not None
        if may_create:
            self._create(path)
        try:
            with path.open(encoding="ascii") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & 0o077:
                    raise StoreError(
                        f"{path} is readable by other users (mode {mode:o})",
                        hint=f"run: {shlex.join(['chmod', '600', str(path)])}",
                    )
                return file.read()
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not a key"
            raise StoreError(
                f"cannot read {path}, the key of stored passwords: {reason}",
                hint="restore the key file, give the key in STREAMER_ADMIN__KEY, or enter the "
                "passwords again",
            ) from None

    @staticmethod
    def _create(path: Path) -> None:
        """Create the file with a new key, unless it exists; never a partial file."""
        try:
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name) as file:
                file.write(generate_key() + "\n")
                file.flush()
                os.fsync(file.fileno())
                os.link(file.name, path)
        except FileExistsError:
            pass
        except OSError as exc:
            raise StoreError(
                f"cannot create {path}, the key for passwords: {exc.strerror}",
                hint="give a key in STREAMER_ADMIN__KEY (`streamer admin generate-key` prints "
                "one), or write ${NAME} instead of the password",
            ) from None
