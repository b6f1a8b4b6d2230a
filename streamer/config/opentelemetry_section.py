"""The settings of the OpenTelemetry export: the section ``opentelemetry``."""

import re
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from streamer.config.connection_settings import SecretText, Strict
from streamer.postgres.secret import Secret

INTERVAL_SECONDS: Final = 60.0
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[\t -~]+")


def _check_endpoint(value: str) -> str:
    try:
        url = urlsplit(value)
        is_valid = url.scheme in ("http", "https") and bool(url.hostname) and "@" not in url.netloc
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError("expected a URL with http:// or https://, without a password")
    if "?" in value or "#" in value:
        raise ValueError(
            "expected a URL without ? and #: streamer appends /v1/metrics and /v1/traces; "
            "send a key in `headers`"
        )
    return value.rstrip("/")


def _check_headers(values: dict[str, Secret]) -> dict[str, Secret]:
    """Return *values* without white space around each value, such as the last line break of a
    secret of Kubernetes. An error contains no value.
    """
    stripped = {name: Secret(value.reveal().strip()) for name, value in values.items()}
    for name, value in stripped.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of an HTTP header")
        if not _HEADER_VALUE.fullmatch(value.reveal()):
            raise ValueError(f"the value of {name} is empty, or not one line of ASCII characters")
    return stripped


class OpenTelemetrySection(Strict):
    """``opentelemetry``"""

    endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = Field(
        default=None,
        description="Address of a receiver of OTLP over HTTP, such as `http://localhost:4318`, "
        "which gets all metrics and a span for each window and each copied part. Needs "
        "`pg-streamer[otel]`. Not set: no export, and no cost.",
    )
    headers: Annotated[dict[str, SecretText], AfterValidator(_check_headers)] = Field(
        default={},
        description="HTTP headers of each request, by name, such as `{authorization: "
        "${OTLP_TOKEN}}`.",
    )
    interval: float = Field(
        default=INTERVAL_SECONDS,
        gt=0,
        le=3600,
        description="Seconds between two exports of the metrics.",
    )
    spans: bool = Field(default=True, description="Export spans as well.")
