"""Take the picture of the page that README.md shows, from a demo that runs.

In one terminal ``make demo ARGS='--seconds 120'``, and while the shops work, in another:
``.venv/bin/python scripts/take_picture.py ADDRESS``. The demo prints the address of its page.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "page.png"


def main(address: str) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 700})
        page.goto(address)
        page.get_by_text("streaming").first.wait_for()
        page.wait_for_timeout(20_000)  # for rates and the curves of the changes
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
