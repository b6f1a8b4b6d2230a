"""The settings of the OpenTelemetry export: the section ``opentelemetry``."""

from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from streamer.config.connection_settings import SecretText, Strict

INTERVAL_SECONDS: Final = 60.0


def _check_endpoint(value: str) -> str:
    try:
        url = urlsplit(value)
        is_valid = url.scheme in ("http", "https") and bool(url.hostname) and "@" not in url.netloc
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError("expected a URL with http:// or https://, without a password")
    return value.rstrip("/")


class OpenTelemetrySection(Strict):
    """``opentelemetry``"""

    endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = Field(
        default=None,
        description="Address of a receiver of OTLP over HTTP, such as `http://localhost:4318`, "
        "which gets all metrics and a span for each window and each copied part. Needs "
        "`pg-streamer[otel]`. Not set: no export, and no cost.",
    )
    headers: dict[str, SecretText] = Field(
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
