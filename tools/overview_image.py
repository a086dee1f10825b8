"""Make the pictures of docs/: the report of a run, and the pages of a server with its model.

    whorl report quickstart -o report.html
    whorl serve quickstart/pretrain
    python tools/overview_image.py report.html http://127.0.0.1:8000

    docs/report.png         the top of the report
    docs/serve_chat.png     a text continued in Complete mode
    docs/serve_engine.png   the engine page under a load of a few seconds
    docs/overview.png       report and chat page side by side, for the README

Needs Playwright, Pillow, httpx and Debian's Chromium.
"""

from __future__ import annotations

import base64
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
PROMPT = 'class Stack:\n    """A last-in, first-out list."""\n\n    def __init__(self, items=()):\n'
DONE = """() => document.querySelector("#completion-pane .submit").textContent === "Continue"
    && document.querySelector("#completion-pane .stats").textContent.includes("tokens")"""
CLIENTS = 12  # of the load
PAGE = """<body style="margin:0;display:flex;gap:24px;background:#e9ecef;padding:24px;align-items:flex-start">
<img style="width:760px;border-radius:8px" src="data:image/png;base64,{report}">
<img style="width:760px;border-radius:8px" src="data:image/png;base64,{chat}"></body>"""


def save(name: str, screenshot: bytes) -> None:
    """Write a screenshot with 256 colors: a third of the bytes, without a visible difference."""
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(DOCS / name, optimize=True)


def complete(page: Page, address: str) -> None:
    """Continue the prompt in Complete mode, with tinted tokens, and show the alternatives of one token."""
    page.goto(address)
    page.get_by_text("Complete", exact=True).first.click()
    page.click("#open")
    page.fill("#max_tokens", "110")
    page.fill("#seed", "1")
    page.keyboard.press("Escape")
    page.check("#tint")
    box = page.locator("#text")
    box.fill(PROMPT)
    box.press("Control+Enter")
    page.wait_for_function(DONE)
    page.wait_for_timeout(500)


@contextmanager
def load(address: str) -> Iterator[None]:
    """Keep `CLIENTS` completions running, with a common prefix of their prompts."""
    stop = threading.Event()

    def client(number: int) -> None:
        for round_ in range(1_000):
            if stop.is_set():
                return
            prompt = PROMPT * 4 + f"# {number}, {round_}\n" + "    x = 1\n" * (round_ * number % 7)
            body = {"prompt": prompt, "max_tokens": 24 + 16 * (number % 5), "seed": round_}
            httpx.post(
                f"{address}/v1/completions", json={"model": model, **body}, timeout=60
            ).raise_for_status()

    model = httpx.get(f"{address}/v1/models", timeout=60).json()["data"][0]["id"]
    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def main() -> None:
    report, address = Path(sys.argv[1]).resolve(), sys.argv[2].rstrip("/")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-quic"]
        )
        page = browser.new_page(viewport={"width": 1000, "height": 1000})
        page.goto(report.as_uri())
        shot = page.screenshot()
        clip = {"x": 0, "y": 0, "width": 1000, "height": 1300}
        save("report.png", page.screenshot(clip=clip, full_page=True))
        complete(page, address)
        chat = page.screenshot()
        page.click("#settings .close")
        page.set_viewport_size({"width": 1000, "height": 690})
        for _ in range(12):  # shows the alternatives of an earlier token
            page.locator("#text").press("ArrowLeft")
        save("serve_chat.png", page.screenshot())
        page.set_viewport_size({"width": 1000, "height": 1000})
        with load(address):
            page.goto(f"{address}/engine")
            page.wait_for_timeout(8000)
            box = page.locator("section", has=page.locator("#percentiles")).bounding_box()
            assert box is not None
            clip["height"] = round(box["y"] + box["height"])
            save("serve_engine.png", page.screenshot(full_page=True, clip=clip))
        page = browser.new_page(
            viewport={"width": 1592, "height": 808}
        )  # without the server's content policy
        encode = lambda image: base64.b64encode(image).decode()  # noqa: E731
        page.set_content(PAGE.format(report=encode(shot), chat=encode(chat)))
        save("overview.png", page.screenshot(full_page=True))
        browser.close()


if __name__ == "__main__":
    main()
