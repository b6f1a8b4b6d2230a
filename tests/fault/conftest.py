"""The engine in a fault test never blocks its event loop."""

import pytest


@pytest.fixture(autouse=True)
def _guarded(loop_is_never_blocked: None) -> None:
    """Guard every test of this folder."""
