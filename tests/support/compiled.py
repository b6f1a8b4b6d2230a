"""The extension module for tests that need it."""

from types import ModuleType

import pytest

from streamer.compiled import choice


def compiled_module() -> ModuleType | None:
    """Return the extension module; None only on a machine that cannot build it.

    Raises SettingsError where the machine has the tools but installing did not build the module.
    """
    return choice.choose("compiled")[0] if choice.missing_tools() is None else None


compiled = compiled_module()
needs_compiled = pytest.mark.skipif(
    compiled is None, reason="no C compiler, or no Python headers, to build the extension module"
)
