"""Token probabilities by pointer, touch and keyboard; text that differs from the tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.serve.browser_pages import PHONE, answered, chat, expect, last, send
from tests.support.serve.fake_server import Fake, Piece

pytestmark = pytest.mark.browser
ANSWER = (
    Piece(b"One", -0.1, ((b"One", -0.1), (b"A", -2.5))),
    Piece(b" two", -1.2039728, ((b" two", -1.2039728), (b" three", -1.6094379), (b"\n", -3.0))),
    Piece(b"\n", -2.0),
    Piece(b"three", -9.0),
)


def test_hover_shows_token_and_alternatives(page: Any, fake: Fake) -> None:
    chat(page, fake, "Count!", *ANSWER)
    tip = page.locator("#tooltip")
    expect(tip).to_be_hidden()
    page.locator(".t").nth(1).hover()
    expect(tip).to_be_visible()
    lines = tip.inner_text().replace("\u00a0", " ").replace("\t", " ").split("\n")
    assert lines == ["·two 30.0 %", "·two 30.0 %", "·three 20.0 %", "⏎ 4.98 %"]
    expect(tip.locator("tr.chosen")).to_have_text("·two30.0\u00a0%")
    page.locator("h1").hover()
    expect(tip).to_be_hidden()


def test_probability_colors_can_be_switched_on(page: Any, fake: Fake) -> None:
    chat(page, fake, "Count!", *ANSWER)
    background = "e => getComputedStyle(e).backgroundColor"
    token = page.locator(".t").nth(3)
    plain = token.evaluate(background)
    page.get_by_label("Color by probability").check()
    assert token.evaluate(background) != plain
    assert token.evaluate("e => e.style.getPropertyValue('--s')") == "70"
    assert page.locator(".t").first.evaluate("e => e.style.getPropertyValue('--s')") == "1"
    page.reload()
    expect(page.get_by_label("Color by probability")).to_be_checked()


def test_page_is_usable_by_keyboard(page: Any, fake: Fake) -> None:
    keys, focused = page.keyboard, page.locator(":focus")
    expect(page.locator("#message")).to_be_focused()  # after loading
    keys.type("Count!")
    fake.set_output(*ANSWER)
    keys.press("Control+Enter")
    page.wait_for_selector("body:not(.busy) .message.model")
    expect(page.locator("#message")).to_be_focused()
    for _ in range(4):  # back over Copy, Regenerate, Edit: all tokens are one tab stop
        keys.press("Shift+Tab")
    expect(focused).to_have_text("One")
    expect(page.locator("#tooltip")).to_contain_text("One")
    assert focused.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    for key, text in (("ArrowRight", "·two"), ("End", "three"), ("ArrowLeft", "⏎"), ("Home", "One")):
        keys.press(key)
        expect(page.locator("#tooltip b")).to_contain_text(text)
    keys.press("Escape")
    expect(page.locator("#tooltip")).to_be_hidden()
    keys.press("Tab")
    keys.press("Enter")  # Edit
    expect(page.get_by_label("Edit the response")).to_be_focused()
    keys.press("Escape")
    expect(focused).to_have_text("Edit")
    keys.press("Tab")
    fake.set_output("Uno")
    keys.press("Enter")  # Regenerate
    expect(last(page)).to_have_text("Uno")
    answered(page)
    page.locator("#mode-chat, input[value=chat]").first.focus()
    keys.press("ArrowRight")
    expect(page.locator("#text")).to_be_visible()
    # Every focusable element has a label.
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, a')]
            .filter((e) => !(e.innerText || e.ariaLabel || [...(e.labels || [])].some((l) => l.textContent.trim())))
            .map((e) => e.outerHTML)"""
    )
    assert nameless == []


def test_tap_shows_the_token_tooltip(visit: Any, fake: Fake) -> None:
    page = visit(**PHONE)
    chat(page, fake, "Count!", *ANSWER)
    page.locator(".t").nth(1).tap()
    tip = page.locator("#tooltip")
    expect(tip).to_contain_text("·three")
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
    page.locator("h1").tap()
    expect(tip).to_be_hidden()


@pytest.mark.parametrize("mode", ["chat", "complete"])
def test_character_split_between_tokens_is_one_span(visit: Any, fake: Fake, mode: str) -> None:
    """The euro sign is split into tokens of 1 and 2 bytes; the last byte of an emoji is missing."""
    fake.models = [{"id": "small", "whorl": {"chat": mode == "chat"}}]
    page = visit()
    euro = Piece(b"\xe2", -0.7, text=""), Piece(b"\x82\xac", -0.1, text="€")
    pieces = "a ", *euro, "é!", Piece(b"\xf0\x9f", text="\ufffd")
    if mode == "chat":
        chat(page, fake, "Count!", *pieces)
    else:
        fake.set_output(*pieces)
        page.fill("#text", "x")
        page.click(".submit")
        page.wait_for_selector(".regenerate:not(:disabled)")
    tokens = page.locator(".t")
    expect(tokens).to_have_text(["a ", "€", "é!", "\ufffd"])
    if mode == "chat":
        tokens.nth(1).hover()
    else:
        box = tokens.nth(1).bounding_box()
        page.mouse.move(box["x"] + 3, box["y"] + 6)
    tip = page.locator("#tooltip")
    expect(tip).to_contain_text("€  2 tokens")
    expect(tip.locator("tr").first).to_have_text("\\xe249.7\u00a0%")
    expect(tip.locator("tr").last).to_have_text("\\x82\\xac90.5\u00a0%")


def test_text_wins_over_tokens_at_a_stop_string(page: Any, fake: Fake) -> None:
    """Tokens arrive at once, their text only when it cannot be part of the stop string."""
    first = "One", Piece(b" E", text=""), Piece(b"N", text="")
    rest = Piece(b"ergy", text=" ENergy"), Piece(b" done E", text=" done "), Piece(b"ND more", text="")
    fake.set_output(*first, *rest, hold=True)
    send(page, "Count!")
    answer = last(page)
    fake.release(3)
    expect(answer).to_have_text("One")
    fake.release(3)
    answered(page)
    assert answer.evaluate("e => e.textContent") == "One ENergy done "
    assert answer.locator(".t").all_inner_texts() == ["One", " E", "N", "ergy", " done "]


def test_text_without_probabilities_has_no_spans(page: Any, fake: Fake) -> None:
    page.click("#open")
    page.uncheck("#probabilities")
    chat(page, fake, "Count!", "One", " two")
    expect(last(page)).to_have_text("One two")
    expect(page.locator(".t")).to_have_count(0)
    expect(page.locator(".stats").first).to_contain_text("2 tokens")
