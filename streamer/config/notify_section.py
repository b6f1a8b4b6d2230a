"""The settings of notifications: the section ``notify``."""

from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from streamer.config.connection_settings import SecretText, Strict
from streamer.report.problems import ProblemKind, Severity
from streamer.util.signing_key import signing_key

_WORDS: Final = (*Severity, *ProblemKind)


def _check_word(value: Any) -> Any:
    if value not in _WORDS:
        raise ValueError(f"expected one of: {', '.join(_WORDS)}")
    return value


class NotifySection(Strict):
    """``notify``"""

    webhook: SecretText | None = Field(
        default=None,
        description="URL that gets a POST when a problem begins, changes or ends, as JSON with a "
        "`text` that chat tools show. streamer never prints the URL, which may contain a secret. "
        "Not set: no notifications.",
    )
    on: list[
        Annotated[
            Severity | ProblemKind,
            BeforeValidator(_check_word, json_schema_input_type=Severity | ProblemKind),
        ]
    ] = Field(
        default=[Severity.ERROR, Severity.WARNING],
        min_length=1,
        description="The problems to send: severities (`error`, `warning`, `info`) and kinds, such "
        "as `table` or `wal`. streamer sends a problem if the list has its severity or kind.",
    )
    key: SecretText | None = Field(
        default=None,
        description="Secret that signs each notification, as Standard Webhooks describe. A secret "
        "with the prefix `whsec_` is base64.",
    )
    key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File whose only line is that secret. streamer reads the file for each "
        "notification.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.key is not None and self.key_file is not None:
            raise ValueError("key and key_file cannot be used together")
        if self.key is not None:
            try:
                signing_key(self.key.reveal())
            except ValueError as exc:
                raise ValueError(f"key: {exc}") from None
        if self.webhook is not None:
            try:
                url = urlsplit(self.webhook.reveal())
                # A password with "/" or "?" looks like a port, and errors name host and port.
                is_valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
            except ValueError:
                is_valid = False
            if not is_valid:
                raise ValueError("webhook: expected a URL with http:// or https://")
        return self
