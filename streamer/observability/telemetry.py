"""Opens the OpenTelemetry export, whose packages are an extra of the distribution."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamer.errors.error_classes import SettingsError
from streamer.observability.metrics import Metrics
from streamer.postgres.secret import Secret

if TYPE_CHECKING:
    from streamer.observability.opentelemetry_export import TelemetryExport


def open_telemetry(
    endpoint: str, headers: Mapping[str, Secret], interval: float, metrics: Metrics
) -> "TelemetryExport":
    """Return the export of *metrics* and spans. Raises SettingsError if the packages of
    OpenTelemetry are missing.
    """
    try:
        from streamer.observability.opentelemetry_export import TelemetryExport
    except ImportError as exc:  # also for packages of other versions
        raise SettingsError(
            f"opentelemetry.endpoint is set, but the package of {exc.name} is not installed, "
            f"or has another version: {exc.msg}",
            hint="run `pip install --upgrade 'pg-streamer[otel]'`, or remove `opentelemetry`",
        ) from None
    return TelemetryExport(endpoint, headers, interval, metrics)
