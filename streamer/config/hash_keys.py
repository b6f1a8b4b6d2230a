"""Keyed hashes: the settings, and the secret keys, which are read with the configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator

from streamer.config.connection_settings import CommandLine, SecretText, Strict
from streamer.postgres.secret import Secret
from streamer.postgres.secret_command import OUTPUT_BYTES_MAX, CommandError, run_secret_command

KEY_CHARACTERS_MIN: Final = 32


class HashSettings(Strict):
    """``sources[].tables.*.set.*``: a column of the source that streamer hashes."""

    hmac: str = Field(min_length=1, description="Column of the source.", examples=["email"])
    key: str = Field(min_length=1, description="Name of a key in `hash_keys`.", examples=["people"])


class HashKeySettings(Strict):
    """``hash_keys.*``: a secret key for hashes in `set`."""

    key: SecretText | None = Field(
        default=None,
        description="The key itself, of at least 32 characters. `openssl rand -hex 32` generates a "
        "key; keep the key in an environment variable.",
        examples=["${PEOPLE_KEY}"],
    )
    key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File whose only line is the key. streamer reads the file at its start and at "
        "SIGHUP.",
    )
    key_command: CommandLine | None = Field(
        default=None,
        description="Command that prints the key in one line. streamer runs it without a shell, "
        "for at most 10 s, whenever it reads the configuration.",
        examples=["vault kv get -field=key secret/people"],
    )

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if [self.key, self.key_file, self.key_command].count(None) != 2:
            raise ValueError("expected one of key, key_file and key_command")
        return self


class HashKeyError(Exception):
    """A key is unreadable or too short. The message does not contain the key."""


def read_key(settings: HashKeySettings) -> Secret:
    """Return the key. Blocks while a command runs. Raises HashKeyError."""
    if settings.key is not None:
        content, place = settings.key.reveal().encode(), "key"
    elif settings.key_file is not None:
        content, place = _read_file(settings.key_file), f"key_file {settings.key_file}"
    else:
        assert settings.key_command is not None
        place = "key_command"
        try:
            content = run_secret_command(settings.key_command, {})
        except CommandError as exc:
            raise HashKeyError(f"{place}: {exc}") from None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise HashKeyError(f"{place}: the key is not UTF-8") from None
    lines = text.splitlines()
    if len(lines) != 1 or len(lines[0]) < KEY_CHARACTERS_MIN:
        raise HashKeyError(
            f"{place}: expected one line of at least {KEY_CHARACTERS_MIN} characters"
        )
    return Secret(lines[0])


def _read_file(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(OUTPUT_BYTES_MAX)
    except OSError as exc:
        raise HashKeyError(f"key_file {path}: {exc.strerror}") from None


def read_keys(settings: Mapping[str, HashKeySettings]) -> dict[str, Secret | HashKeyError]:
    """Return each key, or the error of an unreadable key."""
    keys: dict[str, Secret | HashKeyError] = {}
    for name, key_settings in settings.items():
        try:
            keys[name] = read_key(key_settings)
        except HashKeyError as exc:
            keys[name] = exc
    return keys
