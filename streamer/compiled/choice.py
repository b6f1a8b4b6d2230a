"""Chooses between compiled and pure Python code, once per process.

``STREAMER_IMPLEMENTATION=pure`` forces pure Python; ``compiled`` fails without the extension
module. Without the variable a process uses the extension module if it fits its source.
"""

import os
import shutil
import sysconfig
import zlib
from pathlib import Path
from types import ModuleType
from typing import Final

from streamer.errors.error_classes import SettingsError

VARIABLE: Final = "STREAMER_IMPLEMENTATION"
_SOURCE: Final = Path(__file__).with_name("_compiled.pyx")

compiled: ModuleType | None
"""The extension module, or None in a process that uses pure Python."""
reason: str
"""The reason why `compiled` is None, for operators; otherwise empty."""
error: SettingsError | None
"""The error of a variable that demands an unavailable implementation. Each command reports the
error and ends.
"""


def choose(setting: str) -> tuple[ModuleType | None, str]:
    """Return the extension module or None for the value of `VARIABLE`, and the reason for None.

    Raises SettingsError.
    """
    if setting not in ("", "pure", "compiled"):
        raise SettingsError(f'{VARIABLE} must be "pure" or "compiled", not {setting!r}')
    if setting == "pure":
        return None, f"{VARIABLE} is set"
    try:
        from streamer.compiled import _compiled
    except ImportError as exc:
        is_built = exc.name is None or not exc.name.endswith("_compiled")
        missing = f"cannot import it: {exc}" if is_built else missing_tools() or "it was not built"
    else:
        if zlib.crc32(_SOURCE.read_bytes()) == _compiled.SOURCE_CRC:
            return _compiled, ""
        missing = "it was built from another source"
    if setting == "compiled":
        raise SettingsError(
            f"{VARIABLE} asks for the extension module: {missing}",
            hint="install a C compiler and Python's headers, then install streamer again",
        )
    return None, missing


def missing_tools() -> str | None:
    """Name the tool that this machine lacks for building the extension module, if any."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None and shutil.which("cc") is None:
        return f"no C compiler ({compiler})"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return f"no Python headers (Python.h in {headers})"
    return None


def _choose_once() -> tuple[ModuleType | None, str, SettingsError | None]:
    try:
        return (*choose(os.environ.get(VARIABLE, "")), None)
    except SettingsError as exc:
        return None, str(exc), exc


compiled, reason, error = _choose_once()


def name() -> str:
    """Return the implementation of this process: ``compiled`` or ``pure``."""
    return "pure" if compiled is None else "compiled"


def describe() -> str:
    """Return the implementation and, for pure Python, the reason."""
    return "compiled" if compiled is not None else f"pure Python: {reason}"
