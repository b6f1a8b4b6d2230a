"""The values that a configuration file sets, as YAML without secrets, for the page."""

from pathlib import Path

from streamer.admin.mapping.export_and_import import write_yaml
from streamer.admin.mapping.written_settings import is_url, read_written
from streamer.config.yaml_file import Location
from streamer.postgres.url_passwords import MASK, mask_written


def read_file_values(path: Path) -> str:
    """Return the YAML. References to variables stay as written. Raises SettingsError."""
    return write_yaml(read_written(path).without_secrets(_mask))


def _mask(location: Location, text: str, loaded: str) -> str:
    return mask_written(text, loaded) if is_url(location) else MASK
