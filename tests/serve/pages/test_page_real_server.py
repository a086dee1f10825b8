"""Both pages against the real server, with a model of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.serve.browser_pages import answered, expect, last

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
    assert said == []


TOKENS_OF_SPANS = """async () => {
  const tip = { show: (parts) => { tip.rows = parts[0].textContent.match(/ (\\d+) tokens$/)?.[1] ?? 1; } };
  const { showTokenTip } = await import('/static/tokenview.js');
  return [...document.querySelectorAll('.t')].map((span) => { showTokenTip(tip, span); return Number(tip.rows); });
}"""


def response(page: Any, server: Any, path: str, **fields: Any) -> tuple[dict[str, Any], int]:
    """The API's choice for the page's settings and its number of tokens. Each token with text is in a span."""
    answered(page)
    shown = sum(page.evaluate(TOKENS_OF_SPANS))
    body = {"model": "tiny", "max_tokens": 40, "temperature": 0.8, "top_p": 0.95, **fields}
    answer = page.request.post(f"{server.url}/v1/{path}", data=body).json()
    tokens = answer["usage"]["completion_tokens"]
    assert tokens - shown in (0, 1)
    return answer["choices"][0], tokens


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
        messages = [{"role": "user", "content": "Hello é"}]
        choice, tokens = response(page, server, "chat/completions", messages=messages, seed=seed)
        assert last(page).evaluate("e => e.textContent") == choice["message"]["content"]
        expect(page.locator(".message .stats")).to_contain_text(f"{tokens} tokens")


def test_completion_page_shows_the_api_response(page: Any, server: Any) -> None:
    prompt = "def add(a, b):\n    ret"
    page.locator(".modes span", has_text="Complete").click()
    page.click("#open")
    for name, value in {"max_tokens": "40", "seed": "3", "text": prompt}.items():
        page.fill(f"#{name}", value)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#completion-pane .regenerate:not(:disabled)")
    choice, _ = response(page, server, "completions", prompt=prompt, seed=3)
    assert page.locator("#text").input_value() == prompt + choice["text"]


def test_engine_page_draws_recent_steps(page: Any, server: Any) -> None:
    body = {"model": "tiny", "prompt": "def", "max_tokens": 30, "ignore_eos": True}
    page.request.post(f"{server.url}/v1/completions", data=body)
    page.goto(f"{server.url}/engine")
    page.wait_for_selector("#timeline rect.decode")
    state = page.request.get(f"{server.url}/v1/engine/state").json()
    expect(page.locator("#map-summary")).to_contain_text(f"{state['pages']['total']} pages")
    assert page.locator("#timeline rect.took").count() >= 20
    expect(page.locator("#model")).to_contain_text("tiny")
    assert "no data" not in page.locator("#ttft svg").get_attribute("aria-label")
