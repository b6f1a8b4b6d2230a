"""How many examples a property is tried on: few by default, many with ``PROPERTY_EXAMPLES=2000``."""

import os

from hypothesis import settings

settings.register_profile(
    "streamer",
    max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "100")),
    stateful_step_count=30,
    deadline=None,  # other work on the machine is no failure
    print_blob=True,  # a failure says how to replay it
)
settings.load_profile("streamer")
