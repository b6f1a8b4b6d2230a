"""No test leaves a patch or a log handler to the next tests of the process."""

import logging
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a patch or a log handler, and remove both."""
    yield
    active: list[object] = mock._patch._active_patches  # type: ignore[attr-defined]
    patched = list(active)
    mock.patch.stopall()
    # pytest's own handlers have their own types.
    handlers = [
        handler for handler in logging.root.handlers if type(handler) is logging.StreamHandler
    ]
    for handler in handlers:
        logging.root.removeHandler(handler)
    assert not patched, "a patch that was started was not stopped"
    assert not handlers, "log lines would go to the streams of this test: use support.invoking"
