"""The completion pane, and both panes on a phone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.serve.browser_pages import PHONE, answered, expect, expect_fits, send
from tests.support.serve.fake_server import Fake, Piece

pytestmark = pytest.mark.browser


@pytest.fixture
def page(visit: Any, fake: Fake) -> Any:
    """The page with a base model, in Complete mode."""
    fake.models = [{"id": "code", "whorl": {"chat": False}}]
    return visit()


def complete(page: Any, fake: Fake, *tokens: Any, button: str = "Continue") -> None:
    """Generate a completion made of `tokens` and wait for its end."""
    fake.set_output(*tokens)
    page.get_by_role("button", name=button).click()
    page.wait_for_selector("body:not(.busy) .regenerate:not(:disabled)")


def layers_agree(page: Any) -> None:
    """The overlay has the same text and the same layout as the text field."""
    assert page.locator(".overlay").evaluate("e => e.textContent") == page.locator("#text").input_value()
    names = ["font", "padding", "lineHeight", "letterSpacing"]
    names += ["tabSize", "whiteSpace", "overflowWrap", "width"]
    styles = f"e => {names}.map((name) => getComputedStyle(e)[name])"
    assert page.locator(".overlay").evaluate(styles) == page.locator("#text").evaluate(styles)
    under, field = page.evaluate("['.overlay', '#text'].map((s) => document.querySelector(s).scrollHeight)")
    assert abs(under - field) <= 1


def test_base_model_opens_in_complete_mode(page: Any, fake: Fake) -> None:
    expect(page.locator("#text")).to_be_focused()
    expect(page.get_by_role("radio", name="Complete")).to_be_checked()
    fake.set_output("    return", " 1", "\n", hold=True)
    page.fill("#text", "def one():\n")
    page.keyboard.press("Control+Enter")
    fake.release(2)
    expect(page.locator("#text")).to_have_value("def one():\n    return 1")
    fake.release()
    answered(page)
    expect(page.locator("#text")).to_have_value("def one():\n    return 1\n")
    path, body, _ = fake.requests[0]
    assert path == "/v1/completions" and body["prompt"] == "def one():\n" and body["logprobs"] == 5
    layers_agree(page)
    # A second completion; both keep their token spans.
    complete(page, fake, "\n", "one()")
    assert fake.bodies()[1]["prompt"] == "def one():\n    return 1\n"
    assert page.locator(".t").all_text_contents() == ["    return", " 1", "\n", "\n", "one()"]


def test_completion_versions_and_undo(page: Any, fake: Fake) -> None:
    page.fill("#text", "x = ")
    for text, button in (("1", "Continue"), ("2", "Regenerate"), ("3", "Regenerate")):
        complete(page, fake, text, button=button)
        assert fake.bodies()[-1]["prompt"] == "x = "
    field = page.locator("#text")
    expect(field).to_have_value("x = 3")
    expect(page.locator(".bar .branches")).to_contain_text("3 / 3")
    page.get_by_role("button", name="Previous version").click()
    expect(field).to_have_value("x = 2")
    layers_agree(page)
    page.get_by_role("button", name="Undo").click()
    expect(field).to_have_value("x = ")
    expect(page.get_by_role("button", name="Regenerate")).to_be_disabled()
    layers_agree(page)


def test_edit_removes_later_token_spans(page: Any, fake: Fake) -> None:
    page.fill("#text", "x =")
    complete(page, fake, " 1", " +", " 2")
    field = page.locator("#text")
    field.evaluate("e => { e.focus(); e.setSelectionRange(6, 6); }")  # within " +"
    page.keyboard.type("-")
    expect(field).to_have_value("x = 1 -+ 2")
    assert page.locator(".t").all_text_contents() == [" 1"]
    layers_agree(page)
    expect(page.get_by_role("button", name="Regenerate")).to_be_disabled()


def test_completion_tooltip_at_pointer_and_caret(page: Any, fake: Fake) -> None:
    page.fill("#text", "x =")
    complete(page, fake, Piece(b" 1", -0.6931472), Piece(b" +", -2.3025851))
    tip = page.locator("#tooltip")
    box = page.locator(".overlay .t").nth(1).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(tip).to_contain_text("·+  10.0\u00a0%")
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()
    page.get_by_label("Color by probability").check()
    page.focus("#text")
    page.keyboard.press("Control+Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("·1  50.0\u00a0%")
    page.keyboard.press("Control+End")
    expect(tip).to_contain_text("·+  10.0\u00a0%")


def test_completion_stop_and_error(page: Any, fake: Fake) -> None:
    page.expected = ("status of 503",)
    page.fill("#text", "x =")
    fake.set_output(" 1", " +", hold=True)
    page.click(".submit")
    fake.release()
    expect(page.locator("#text")).to_have_value("x = 1")
    page.keyboard.press("Escape")
    assert fake.gone.wait(240)
    answered(page)
    expect(page.locator(".bar .stats")).to_contain_text("stopped · 1 token")
    fake.fail = (503, {"error": {"message": "draining"}}, {})
    page.click(".submit")
    error = page.locator("#completion-pane .error")
    expect(error).to_contain_text("The server is busy. Message: draining")
    expect(page.locator("#text")).to_have_value("x = 1")
    fake.set_output(" + 2")
    error.get_by_role("button").click()
    expect(page.locator("#text")).to_have_value("x = 1 + 2")
    expect(error).to_be_hidden()
    layers_agree(page)


def test_model_and_mode_are_stored(visit: Any, fake: Fake) -> None:
    fake.models = [{"id": "chat-model", "whorl": {"chat": True}}, {"id": "code", "chat": "transcript"}]
    fake.models += [{"id": "vectors", "capabilities": ["embedding"]}]
    page = visit()
    assert page.locator("#model option").all_text_contents() == ["chat-model", "code"]
    expect(page.get_by_role("radio", name="Chat")).to_be_checked()
    page.select_option("#model", "code")
    expect(page.get_by_role("radio", name="Complete")).to_be_checked()
    page.locator(".modes span", has_text="Chat").click()
    page.reload()
    page.wait_for_selector("#model:not(:disabled)")
    expect(page.locator("#model")).to_have_value("code")
    expect(page.get_by_role("radio", name="Chat")).to_be_checked()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_chat_page_fits_a_phone(visit: Any, fake: Fake, scheme: str) -> None:
    fake.models = [{"id": "a-model-with-a-very-long-name-of-its-own/pretrain", "whorl": {"chat": True}}]
    page = visit(**PHONE, color_scheme=scheme, reduced_motion="reduce")

    def fits() -> None:
        expect_fits(page, 360)
        for pane in page.locator(".scroller:visible, dialog[open]").all():
            assert pane.evaluate("e => e.scrollWidth - e.clientWidth") <= 0

    fake.set_output("word" * 60, "\n", " and" * 200, hold=True)
    send(page, "x" * 300)
    fake.release(2)
    writing = page.locator(".message.writing .text")
    expect(writing).to_contain_text("word")
    assert writing.evaluate("e => getComputedStyle(e, '::after').animationName") == "none"
    fake.release()
    answered(page)
    page.check("#tint")
    fits()
    page.click("#open")
    expect(page.locator("#settings")).to_be_visible()
    fits()
    page.click("#settings .close")
    # The on-screen keyboard covers half of the window; the input stays visible.
    page.set_viewport_size({"width": 360, "height": 380})
    # The page hears of the new height in an event, so the input may take a frame to arrive.
    visible = "() => { const box = document.querySelector('#message').getBoundingClientRect();"
    page.wait_for_function(visible + " return innerHeight === 380 && box.top >= 0 && box.bottom <= 380 }")
    page.set_viewport_size({"width": 360, "height": 740})
    page.locator(".modes span", has_text="Complete").click()
    page.fill("#text", "y" * 500)
    fits()
    for target in page.locator("button:visible, select:visible").all():
        assert target.bounding_box()["height"] >= 30
