"""Take the picture of the page that README.md shows: ``.venv/bin/python -m scripts.take_picture``.

The page shows the fleet of `tests.support.fleet`, without a server. Arguments of a different
picture: the file, the width in pixels, ``dark`` or ``light``, and ``--large`` for 200 sources.
"""

import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Final

from playwright.sync_api import sync_playwright

from streamer.commands.demo.embedded_servers import free_port
from tests.support.chromium import launch

PICTURE: Final = Path(__file__).parents[1] / "docs" / "images" / "page.png"
HEIGHT: Final = 860
START_SECONDS: Final = 60.0


def main(
    path: Path = PICTURE, width: int = 1280, scheme: str = "light", fleet: str = "--picture"
) -> None:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "tests.support.fleet", str(port), fleet])
    address = f"http://127.0.0.1:{port}/"
    try:
        _wait_for(address)
        with sync_playwright() as playwright:
            browser = launch(playwright.chromium)
            page = browser.new_page(viewport={"width": width, "height": HEIGHT})
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            page.goto(address)
            page.get_by_text("live", exact=True).wait_for()
            page.screenshot(path=path)
            browser.close()
    finally:
        server.kill()
        server.wait()


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{address}healthz", timeout=START_SECONDS).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


if __name__ == "__main__":
    path, width, scheme, fleet = (
        *sys.argv[1:],
        *(str(PICTURE), "1280", "light", "--picture")[len(sys.argv) - 1 :],
    )
    main(Path(path), int(width), scheme, fleet)
