"""Chromium on this machine, started headless for tests and pictures."""

import shutil

from playwright.sync_api import Browser, BrowserType

INSTALL = "apt-get install chromium-headless-shell"
_NAMES = (
    "chromium-headless-shell",  # the same browser without windows: half of the CPU
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)


def launch(chromium: BrowserType) -> Browser:
    """Start the browser. Raises FileNotFoundError, with the command that installs the browser."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        raise FileNotFoundError(f"Chromium is not on this machine; run: {INSTALL}")
    return chromium.launch(executable_path=path, args=["--no-sandbox"])
