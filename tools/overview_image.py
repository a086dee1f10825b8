"""Make docs/overview.png and docs/report.png: the report of a run, and the completion page of its model.

    python tools/overview_image.py REPORT.html http://127.0.0.1:8000

Needs Playwright and Debian's Chromium.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
PROMPT = 'class Stack:\n    """A last-in, first-out list."""\n\n    def __init__(self, items=()):\n'
PAGE = """<body style="margin:0;display:flex;gap:24px;background:#e9ecef;padding:24px;align-items:flex-start">
<img style="width:760px;border-radius:8px" src="data:image/png;base64,{report}">
<img style="width:760px;border-radius:8px" src="data:image/png;base64,{chat}"></body>"""


def main() -> None:
    report, address = Path(sys.argv[1]).resolve(), sys.argv[2]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-quic"]
        )
        page = browser.new_page(viewport={"width": 1000, "height": 1000})
        page.goto(report.as_uri())
        shot = page.screenshot()
        page.screenshot(
            path=str(ROOT / "docs" / "report.png"),
            clip={"x": 0, "y": 0, "width": 1000, "height": 1300},
            full_page=True,
        )
        page.set_viewport_size({"width": 1000, "height": 1000})
        page.goto(address)
        page.get_by_text("Complete", exact=True).first.click()
        page.click("#open")
        page.fill("#max_tokens", "110")
        page.keyboard.press("Escape")
        page.check("#tint")
        box = page.locator("#text")
        box.fill(PROMPT)
        box.press("Control+Enter")
        page.wait_for_timeout(6000)
        chat = page.screenshot()
        page = browser.new_page(
            viewport={"width": 1592, "height": 808}
        )  # without the server's content policy
        encode = lambda image: base64.b64encode(image).decode()  # noqa: E731
        page.set_content(PAGE.format(report=encode(shot), chat=encode(chat)))
        page.screenshot(path=str(ROOT / "docs" / "overview.png"), full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
