"""The number of examples of a property: few by default, many with ``PROPERTY_EXAMPLES=300``."""

import os
from typing import Final

from hypothesis import HealthCheck, settings

EXAMPLES: Final = int(os.environ.get("PROPERTY_EXAMPLES", "30"))

settings.register_profile(
    "streamer",
    max_examples=EXAMPLES,
    stateful_step_count=30,
    # A deadline would fail tests on a busy machine.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,  # a failure says how to replay it
)
settings.load_profile("streamer")
