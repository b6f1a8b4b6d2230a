"""The versions of PostgreSQL that streamer supports, at both sides."""

from typing import Final

VERSION_MIN: Final = 12_00_00
"""The oldest supported version, as in ``server_version_num``."""
MAJOR_TESTED: Final = 18
"""The newest major version that the tests run with."""
