"""Runs a module's tests with pure Python and with compiled code."""

from collections.abc import Iterator

import pytest

from streamer.compiled import choice
from streamer.errors.error_classes import SettingsError


def _available() -> list[str]:
    try:
        choice.choose("compiled")
    except SettingsError:
        return ["pure"]
    return ["pure", "compiled"]


@pytest.fixture(scope="module", autouse=True, params=_available())
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Import this fixture into a module to run all its tests with both implementations."""
    compiled = choice.choose(request.param)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "compiled", compiled)
        yield request.param
