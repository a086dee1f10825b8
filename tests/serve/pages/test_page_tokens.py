"""Probabilities under the pointer, the finger and the arrow keys; text and tokens that do not fall together."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.serve.browser_pages import PHONE, expect
from tests.support.serve.fake_server import Fake, Piece

pytestmark = pytest.mark.browser
ANSWER = (
    Piece(b"One", -0.1, ((b"One", -0.1), (b"A", -2.5))),
    Piece(b" two", -1.2039728, ((b" two", -1.2039728), (b" three", -1.6094379), (b"\n", -3.0))),
    Piece(b"\n", -2.0),
    Piece(b"three", -9.0),
)


def ask(page: Any) -> None:
    page.fill("#message", "Count!")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("body:not(.busy) .message.model")


def test_hover_tells_the_token_and_what_else_was_likely(visit: Any, fake: Fake) -> None:
    page = visit()
    fake.tell(*ANSWER)
    ask(page)
    tip = page.locator("#tip")
    expect(tip).to_be_hidden()
    page.locator(".t").nth(1).hover()
    expect(tip).to_be_visible()
    assert tip.inner_text().replace("\u00a0", " ").replace("\t", " ").split("\n") == [
        "·two 30.0 %", "·two 30.0 %", "·three 20.0 %", "⏎ 4.98 %",
    ]  # fmt: skip
    expect(page.locator("#tip tr.chosen")).to_have_text("·two30.0\u00a0%")
    page.locator("h1").hover()
    expect(tip).to_be_hidden()


def test_colours_are_shown_on_demand(visit: Any, fake: Fake) -> None:
    page = visit()
    fake.tell(*ANSWER)
    ask(page)
    background = "e => getComputedStyle(e).backgroundColor"
    token = page.locator(".t").nth(3)
    plain = token.evaluate(background)
    page.get_by_label("Colour by probability").check()
    assert token.evaluate(background) != plain
    assert token.evaluate("e => e.style.getPropertyValue('--s')") == "70"
    assert page.locator(".t").first.evaluate("e => e.style.getPropertyValue('--s')") == "1"
    page.reload()
    expect(page.get_by_label("Colour by probability")).to_be_checked()


def test_all_by_keyboard(visit: Any, fake: Fake) -> None:
    page = visit()
    keys, focused = page.keyboard, page.locator(":focus")
    expect(page.locator("#message")).to_be_focused()  # on arrival
    keys.type("Count!")
    fake.tell(*ANSWER)
    keys.press("Control+Enter")
    page.wait_for_selector("body:not(.busy) .message.model")
    expect(page.locator("#message")).to_be_focused()
    for _ in range(4):  # back over Copy, Regenerate, Edit: one stop for all tokens
        keys.press("Shift+Tab")
    expect(focused).to_have_text("One")
    expect(page.locator("#tip")).to_contain_text("One")
    assert focused.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    for key, text in (("ArrowRight", "·two"), ("End", "three"), ("ArrowLeft", "⏎"), ("Home", "One")):
        keys.press(key)
        expect(page.locator("#tip b")).to_contain_text(text)
    keys.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    keys.press("Tab")
    keys.press("Enter")  # Edit
    expect(page.get_by_label("Edit the answer")).to_be_focused()
    keys.press("Escape")
    expect(focused).to_have_text("Edit")
    keys.press("Tab")
    fake.tell("Uno")
    keys.press("Enter")  # Regenerate
    expect(page.locator(".message.model .text")).to_have_text("Uno")
    page.wait_for_selector("body:not(.busy)")
    page.locator("#mode-chat, input[value=chat]").first.focus()
    keys.press("ArrowRight")
    expect(page.locator("#text")).to_be_visible()
    # Everything that takes the focus has a name.
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, a')]
            .filter((e) => !(e.innerText || e.ariaLabel || [...(e.labels || [])].some((l) => l.textContent.trim())))
            .map((e) => e.outerHTML)"""
    )
    assert nameless == []


def test_a_finger_on_a_token(visit: Any, fake: Fake) -> None:
    page = visit(**PHONE)
    fake.tell(*ANSWER)
    ask(page)
    page.locator(".t").nth(1).tap()
    tip = page.locator("#tip")
    expect(tip).to_contain_text("·three")
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
    page.locator("h1").tap()
    expect(tip).to_be_hidden()


@pytest.mark.parametrize("mode", ["chat", "complete"])
def test_a_character_cut_between_tokens(visit: Any, fake: Fake, mode: str) -> None:
    """The euro sign comes as two tokens of 1 and 2 bytes, an emoji's last byte never comes."""
    fake.models = [{"id": "small", "whorl": {"chat": mode == "chat"}}]
    page = visit()
    fake.tell(
        Piece(b"a "), Piece(b"\xe2", -0.7, text=""), Piece(b"\x82\xac", -0.1, text="€"), Piece("é!".encode()),
        Piece(b"\xf0\x9f", text="\ufffd"),
    )  # fmt: skip
    if mode == "chat":
        ask(page)
    else:
        page.fill("#text", "x")
        page.click(".go")
        page.wait_for_selector(".again:not(:disabled)")
    tokens = page.locator(".t")
    expect(tokens).to_have_text(["a ", "€", "é!", "\ufffd"])
    if mode == "chat":
        tokens.nth(1).hover()
    else:
        box = tokens.nth(1).bounding_box()
        page.mouse.move(box["x"] + 3, box["y"] + 6)
    tip = page.locator("#tip")
    expect(tip).to_contain_text("€  2 tokens")
    expect(tip.locator("tr").first).to_have_text("\\xe249.7\u00a0%")
    expect(tip.locator("tr").last).to_have_text("\\x82\\xac90.5\u00a0%")


def test_text_is_the_truth_where_a_stop_text_cuts_tokens(visit: Any, fake: Fake) -> None:
    """Tokens are told at once, their text once it cannot be the stop text; what the stop text took is never shown."""
    page = visit()
    fake.tell(
        Piece(b"One"),
        Piece(b" E", text=""),
        Piece(b"N", text=""),
        Piece(b"ergy", text=" ENergy"),
        Piece(b" done E", text=" done "),
        Piece(b"ND more", text=""),
        hold=True,
    )
    page.fill("#message", "Count!")
    page.click(".send")
    answer = page.locator(".message.model .text")
    fake.let(3)
    expect(answer).to_have_text("One")
    fake.let(3)
    page.wait_for_selector("body:not(.busy)")
    assert answer.evaluate("e => e.textContent") == "One ENergy done "
    assert answer.locator(".t").all_inner_texts() == ["One", " E", "N", "ergy", " done "]


def test_without_probabilities_the_text_stands_alone(visit: Any, fake: Fake) -> None:
    page = visit()
    page.click("#open")
    page.uncheck("#probabilities")
    fake.tell("One", " two")
    ask(page)
    expect(page.locator(".message.model .text")).to_have_text("One two")
    expect(page.locator(".t")).to_have_count(0)
    expect(page.locator(".stats").first).to_contain_text("2 tokens")
