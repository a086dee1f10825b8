"""Fixtures of the page tests: a browser, a scripted server, and visits that check the console and all requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.serve.fake_server import Fake, Piece, fake_server

try:
    from playwright.sync_api import expect
except ImportError:  # `browser` then skips
    expect = None  # type: ignore[assignment]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
PATIENCE = 240_000  # ms, reached only by failures; a busy machine may stall for a while


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    expect.set_options(timeout=PATIENCE)
    arguments = ["--disable-background-networking", "--disable-dev-shm-usage"]
    arguments += ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium refuses its sandbox to root
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def fake() -> Iterator[Fake]:
    with fake_server() as fake:
        yield fake


@pytest.fixture
def page(visit: Any) -> Any:
    """The page in chat mode, over the server `fake`."""
    return visit()


def answered(page: Any) -> None:
    """Wait until no generation runs."""
    page.wait_for_selector("body:not(.busy)")


def send(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.click(".send")


def chat(page: Any, fake: Fake, text: str, *tokens: Piece | str) -> None:
    """Send a message and wait for the response made of `tokens`."""
    fake.set_output(*tokens)
    send(page, text)
    answered(page)


def last(page: Any) -> Any:
    """The text of the last response."""
    return page.locator(".message.model .text").last


def expect_texts(page: Any, expected: dict[str, str]) -> None:
    """Expect that the elements of these selectors contain these texts."""
    for selector, text in expected.items():
        expect(page.locator(selector).first).to_contain_text(text)


@pytest.fixture
def visit(browser: Any, fake: Fake) -> Iterator[Callable[..., Any]]:
    """visit(path, context options...) -> page. At the end the console may contain only `page.expected`, and all requests
    must go to this server."""
    pages: list[Any] = []

    def open_page(path: str = "/", *, before: Callable[[Any], None] | None = None, **context: Any) -> Any:
        page = browser.new_context(**context).new_page()
        page.set_default_timeout(PATIENCE)
        page.said, page.asked, page.expected = [], [], ()
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        if before:
            before(page)
        page.goto(fake.url + path)
        if path == "/":
            page.wait_for_selector("#model:not(:disabled), #error:not([hidden])")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.context.close()
        assert [text for text in page.said if not any(word in text for word in page.expected)] == []
        assert [url for url in page.asked if not url.startswith((fake.url, "data:"))] == []


def expect_fits(page: Any, width: int) -> None:
    """Wait until the page is not wider than `width` pixels: charts are drawn again after a change of the window's size."""
    page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
