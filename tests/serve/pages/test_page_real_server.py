"""Both pages against the real server, with a model of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.serve.browser_pages import expect

pytestmark = pytest.mark.browser


@pytest.fixture
def page(browser: Any, server: Any) -> Iterator[Any]:
    page = browser.new_context().new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(server.url)
    page.wait_for_selector("#model:not(:disabled)")
    yield page
    page.context.close()
    assert [text for text in said if "status of 400" not in text] == []


def written(page: Any) -> list[int]:
    """Tokens of each span."""
    page.wait_for_selector("body:not(.busy)")
    return page.evaluate(
        """async () => {
          const tip = { show: (parts) => { tip.rows = parts[0].textContent.match(/ (\\d+) tokens$/)?.[1] ?? 1; } };
          const { showTokenTip } = await import('/static/tokenview.js');
          return [...document.querySelectorAll('.t')].map((span) => { showTokenTip(tip, span); return Number(tip.rows); });
        }"""
    )


def test_chat_page_shows_the_api_response(page: Any, server: Any) -> None:
    """The tiny model mostly generates invalid UTF-8, which is held back and replaced."""
    page.click("#open")
    page.fill("#max_tokens", "40")
    for seed in range(3):
        page.fill("#seed", str(seed))
        page.get_by_role("button", name="New").click()
        page.fill("#message", "Hello é")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(".message.model")
        tokens = written(page)
        body = {
            "model": "tiny", "messages": [{"role": "user", "content": "Hello é"}], "seed": seed, "max_tokens": 40,
            "temperature": 0.8, "top_p": 0.95,
        }  # fmt: skip
        answer = page.request.post(f"{server.url}/v1/chat/completions", data=body).json()
        text = answer["choices"][0]["message"]["content"]
        assert page.locator(".message.model .text").evaluate("e => e.textContent") == text
        # At the end every token with text is in a span.
        assert answer["usage"]["completion_tokens"] - sum(tokens) in (0, 1)
        expect(page.locator(".message .stats")).to_contain_text(
            f"{answer['usage']['completion_tokens']} tokens"
        )


def test_completion_page_shows_the_api_response(page: Any, server: Any) -> None:
    page.locator(".modes span", has_text="Complete").click()
    page.click("#open")
    page.fill("#max_tokens", "40")
    page.fill("#seed", "3")
    page.fill("#text", "def add(a, b):\n    ret")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#completion-pane .regenerate:not(:disabled)")
    tokens = written(page)
    body = {
        "model": "tiny", "prompt": "def add(a, b):\n    ret", "seed": 3, "max_tokens": 40, "temperature": 0.8, "top_p": 0.95,
    }  # fmt: skip
    answer = page.request.post(f"{server.url}/v1/completions", data=body).json()
    assert page.locator("#text").input_value() == body["prompt"] + answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] - sum(tokens) in (0, 1)


def test_engine_page_draws_recent_steps(page: Any, server: Any) -> None:
    page.request.post(
        f"{server.url}/v1/completions",
        data={"model": "tiny", "prompt": "def", "max_tokens": 30, "ignore_eos": True},
    )
    page.goto(f"{server.url}/engine")
    page.wait_for_selector("#timeline rect.decode")
    state = page.request.get(f"{server.url}/v1/engine/state").json()
    expect(page.locator("#map-summary")).to_contain_text(f"{state['pages']['total']} pages")
    assert page.locator("#timeline rect.took").count() >= 20
    expect(page.locator("#model")).to_contain_text("tiny")
    assert "no data" not in page.locator("#ttft svg").get_attribute("aria-label")


def test_completion_page_shows_server_error(page: Any) -> None:
    page.locator(".modes span", has_text="Complete").click()
    page.fill("#text", "word " * 400)
    page.click(".submit")
    expect(page.locator("#completion-pane .error")).to_contain_text("tokens")
