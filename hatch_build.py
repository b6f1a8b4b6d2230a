"""Builds the extension module of streamer.compiled, where a C compiler and Python's headers are
there.

Without them the package is pure Python: it does the same, more slowly. The build tools are those of
requirements-build.lock.
"""

import importlib.util
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("streamer/compiled/_compiled.pyx")


class CompiledHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles in place, and has a wheel name the platform and Python that it is for."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version != "editable" and (commit := _commit(root)):
            file = root / "build" / "commit.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{commit}\n", encoding="ascii")
            build_data["force_include"][str(file)] = "streamer/commit.txt"
        if self.target_name != "wheel":
            return
        for stale in (root / SOURCE.parent).glob("_compiled.*.so"):
            stale.unlink()
        try:
            path = _compile(root)
        except _NotBuilt as exc:
            self.app.display_warning(f"streamer.compiled stays pure Python: {exc}")
            return
        if version == "editable":
            return  # the module is imported from the source tree
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"][str(path)] = str(path.relative_to(root))


def _commit(root: Path) -> str | None:
    """Return the commit of the sources. An image has no repository, so a variable can name it."""
    if commit := os.environ.get("SOURCE_COMMIT"):
        return commit
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class _NotBuilt(Exception):
    pass


def _compile(root: Path, *, checked: bool = False) -> Path:
    """Return the extension module, built from its source.

    *checked*: with bounds checks, and an address sanitizer that the process has to preload.
    """
    if importlib.util.find_spec("Cython") is None:
        raise _NotBuilt("Cython is not installed")
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext
    from setuptools.errors import BaseError, CCompilerError

    options = ["-O1", "-g", "-fsanitize=address"] if checked else ["-O3"]
    crc = zlib.crc32((root / SOURCE).read_bytes())
    extension = Extension(
        "streamer.compiled._compiled",
        [str(root / SOURCE)],
        define_macros=[("STREAMER_SOURCE_CRC", f"{crc}u")],
        extra_compile_args=options,
        extra_link_args=["-fsanitize=address"] if checked else [],
    )
    build = root / "build" / ("checked" if checked else sys.implementation.cache_tag)
    directives = {"boundscheck": checked, "wraparound": False, "initializedcheck": checked}
    extensions = cythonize(
        [extension], build_dir=str(build), quiet=True, compiler_directives=directives, force=True
    )
    command = build_ext(Distribution({"name": "streamer", "ext_modules": extensions}))
    command.build_lib, command.build_temp = str(build), str(build)
    command.force = True
    command.ensure_finalized()
    try:
        command.run()
    except (BaseError, CCompilerError) as exc:
        raise _NotBuilt(f"no C compiler, or no Python headers ({exc})") from exc
    made = Path(command.get_ext_fullpath(extension.name))
    there = root / SOURCE.parent / made.name
    fresh = there.with_suffix(".new")
    fresh.write_bytes(made.read_bytes())
    fresh.replace(there)  # a process may have the former one mapped
    return there


if __name__ == "__main__":
    sys.stdout.write(f"{_compile(Path(__file__).parent, checked='--checked' in sys.argv)}\n")
