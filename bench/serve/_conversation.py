"""A person at the page while the server is attacked: headless Chromium sends a message every few seconds.

    async with conversation(url, key) as seen: ...      seen: a `Conversation`, or why it cannot be held

Each message starts from an empty page text and is complete if its stream arrives with a finish reason. The page's Complete
mode is used, since a model of random weights has no chat template.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

N_TOKENS = 48
PATIENCE = 60.0  # seconds for one answer
TEXT_IS_LONGER = "n => document.querySelector('#text').value.length > n"
HAS_ENDED = "() => !document.body.classList.contains('busy')"


@dataclass
class Conversation:
    """Messages of one page. first_token: the longest time to it in seconds. errors: of the page, its console and answers."""

    sent: int = 0
    answered: int = 0
    first_token: float = 0.0
    errors: list[str] = field(default_factory=list)


@asynccontextmanager
async def conversation(url: str, key: str, every: float) -> AsyncIterator[Conversation | str]:
    """Hold a conversation until the context ends; a message that was sent by then is awaited. every: seconds."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        yield "playwright is not installed (pip install playwright)"
        return
    if chromium is None:
        yield "no Chromium on this machine"
        return
    arguments = ["--disable-background-networking", "--disable-dev-shm-usage"]
    arguments += ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium refuses its sandbox to root
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=arguments)
        page = await _open_page(browser, url, key)
        seen, ending = Conversation(), asyncio.Event()
        page.on("console", lambda message: seen.errors.append(message.text))
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        talking = asyncio.create_task(_talk(page, seen, every, ending))
        try:
            yield seen
        finally:
            ending.set()
            await talking
            await browser.close()


async def _open_page(browser: Any, url: str, key: str) -> Any:
    page = await browser.new_page()
    page.set_default_timeout(1e3 * PATIENCE)
    await page.goto(url)
    await page.wait_for_selector("#model:not(:disabled), #error:not([hidden])")
    await page.click("#open")
    await page.fill("#max_tokens", str(N_TOKENS))
    await page.uncheck("#repeats")
    if key:
        await page.fill("#key", key)
        await page.press("#key", "Tab")
    await page.wait_for_selector("#model:not(:disabled)")
    await page.keyboard.press("Escape")
    await page.locator(".modes span", has_text="Complete").click()
    return page


async def _talk(page: Any, seen: Conversation, every: float, ending: asyncio.Event) -> None:
    while not ending.is_set():
        began = time.monotonic()
        seen.sent += 1
        try:
            await _send(page, f"def f{seen.sent}(", seen)
        except Exception as error:  # of the page: one lost message, and the next is tried
            seen.errors.append(f"{type(error).__name__}: {str(error)[:200]}")
        with suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), max(0.0, began + every - time.monotonic()))


async def _send(page: Any, text: str, seen: Conversation) -> None:
    await page.fill("#text", text)
    await page.click("#completion-pane .submit")
    began = time.monotonic()
    await page.wait_for_function(f"n => ({TEXT_IS_LONGER})(n) || ({HAS_ENDED})()", arg=len(text))
    first_token = time.monotonic() - began
    await page.wait_for_function(HAS_ENDED)
    summary = await page.locator("#completion-pane .stats").inner_text()
    shown = [text for text in await page.locator("#completion-pane .error").all_inner_texts() if text]
    if (
        " token" in summary and not shown
    ):  # the page shows an error if the stream breaks before a finish reason
        seen.answered += 1
        seen.first_token = max(seen.first_token, first_token)
    else:
        seen.errors.append(f"incomplete: {summary!r} {' '.join(shown)[:200]!r}")
