"""Settings of a connection, and the base class of all settings."""

import os
import shlex
from typing import Annotated, Any, Final, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.credentials import ConnectionUrl
from streamer.postgres.password_source import PasswordSource
from streamer.postgres.secret import Secret


class _SecretAnnotation:
    """Makes pydantic read a `Secret` from a string, and refuse to write the secret."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            Secret,
            core_schema.str_schema(min_length=1, strict=True),
            serialization=core_schema.plain_serializer_function_ser_schema(repr),
        )


SecretText = Annotated[Secret, _SecretAnnotation]


class Numbers(BaseModel):
    """Base for settings: refuses true and false for a number, which pydantic reads as 1 and 0."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        types = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and bool not in types and types & {int, float}:
            raise ValueError("expected a number, not true or false")
        return value


class Strict(Numbers):
    """Base for sections: rejects unknown keys; values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _command_line(value: Any) -> Any:
    """Join a list of arguments into a command."""
    is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return shlex.join(value) if is_list else value


def _check_command(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError:
        words = []
    if not words:
        raise ValueError("expected a command with its arguments, quoted as for a shell")
    return value


CommandLine = Annotated[
    str,
    BeforeValidator(_command_line, json_schema_input_type=str | list[str]),
    AfterValidator(_check_command),
]
"""A command with its arguments, as text or as a list."""
COMMAND_FIELDS: Final = ("password_command", "key_command")
"""The settings that are commands. Their arguments may be secrets."""


class ConnectionSettings(Strict):
    """A connection string, and the place of its password."""

    url: SecretText
    password_file: str | None = Field(
        default=None,
        min_length=1,
        title="Password file",
        description="File whose only line is the password, if the url has none. streamer reads the "
        "file for each new connection.",
    )
    password_command: CommandLine | None = Field(
        default=None,
        title="Password command",
        description="Command that prints the password, such as a cloud provider's token, if the "
        "url has none. streamer runs the command without a shell, for at most 10 s. The "
        "environment has PGHOST, PGPORT, PGUSER and PGDATABASE of the url. Only a configuration "
        "file can name a command.",
    )
    password_lifetime: float = Field(
        default=600,
        gt=0,
        title="Lifetime of a password",
        description="Seconds for which new connections use an output of `password_command`.",
    )

    @model_validator(mode="after")
    def _attach_password(self) -> Self:
        """Attach the place of the password to the url, where each connection finds the password."""
        if self.password_file is None and self.password_command is None:
            return self
        if self.password_file is not None and self.password_command is not None:
            raise ValueError("password_file and password_command cannot be used together")
        try:
            parameters = parse_conninfo(self.url.reveal())
        except ValueError:  # a later check reports this error, with its place
            parameters = {}
        if "password" in parameters:
            place = "password_file" if self.password_file else "password_command"
            raise ValueError(f"the url has a password, and {place} gives another")
        # A task of Spark may run in another directory.
        path = self.password_file and os.path.abspath(self.password_file)
        source = PasswordSource(path, self.password_command, self.password_lifetime)
        # The models are frozen, and no reader has seen this model yet.
        self.__dict__["url"] = ConnectionUrl(self.url.reveal(), source)
        return self
