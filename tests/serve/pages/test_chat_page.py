"""The chat pane in a browser: requests, display, branches, errors, settings."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.serve.browser_pages import answered, chat, expect, expect_texts, last, send
from tests.support.serve.fake_server import Fake, Piece

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=\"document.title='ran'\"><script>document.title='ran'</script>"
BRANCHES = ".message.model .branches"


def press(page: Any, name: str, within: str = "body") -> None:
    page.locator(within).get_by_role("button", name=name).click()


def contents(fake: Fake) -> list[str]:
    """The messages of the latest request."""
    return [message["content"] for message in fake.bodies()[-1]["messages"]]


def test_response_is_shown_token_by_token(page: Any, fake: Fake) -> None:
    fake.set_output("One", " two", " three", hold=True)
    send(page, "Count!")
    fake.release()
    expect(last(page)).to_have_text("One")
    expect(page.locator("#message")).to_have_value("")
    fake.release()
    expect(last(page)).to_have_text("One two")
    fake.release()
    answered(page)
    expect(last(page)).to_have_text("One two three")
    for text in ("3 tokens", "tokens/s", "prompt 12 tokens (8 cached)"):
        expect(page.locator(".stats").first).to_contain_text(text)
    path, body, headers = fake.requests[0]
    assert path == "/v1/chat/completions" and "authorization" not in headers
    sent = {"model": "small", "messages": [{"role": "user", "content": "Count!"}], "max_tokens": 256}
    sent |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.8, "top_p": 0.95}
    assert body == sent | {"logprobs": True, "top_logprobs": 5}


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stop_closes_the_connection_and_keeps_the_text(page: Any, fake: Fake, by: str) -> None:
    fake.set_output("One", " two", " three", hold=True)
    send(page, "Count!")
    fake.release(2)
    expect(last(page)).to_have_text("One two")
    if by == "button":
        press(page, "Stop")
    else:
        page.keyboard.press("Escape")
    assert fake.gone.wait(240)
    answered(page)
    expect(last(page)).to_have_text("One two")
    expect_texts(page, {".stats": "stopped · 2 tokens", "#announcements": "Stopped."})
    # The next message continues the conversation.
    chat(page, fake, "Go on", "three")
    assert contents(fake) == ["Count!", "One two", "Go on"]


def test_edit_and_regenerate_keep_every_branch(page: Any, fake: Fake) -> None:
    chat(page, fake, "A?", "first")
    fake.set_output("second")
    press(page, "Regenerate")
    answered(page)
    expect(page.locator(BRANCHES)).to_contain_text("2 / 2")
    expect(last(page)).to_have_text("second")
    press(page, "Previous version")
    expect(last(page)).to_have_text("first")
    # An edited message starts a branch with a new response.
    fake.set_output("third")
    page.locator(".message.user .edit").click()
    page.get_by_label("Edit your message").fill("B?")
    page.locator("form.editor button[type=submit]").click()
    answered(page)
    assert fake.bodies()[-1]["messages"] == [{"role": "user", "content": "B?"}]
    expect(page.locator(".message .text")).to_have_text(["B?", "third"])
    expect(page.locator(BRANCHES)).to_have_text("")
    press(page, "Previous version", within=".message.user")
    expect(page.locator(".message .text")).to_have_text(["A?", "first"])
    expect(page.locator(BRANCHES)).to_contain_text("1 / 2")
    # The request contains the shown path.
    chat(page, fake, "C?", "fourth")
    assert contents(fake) == ["A?", "first", "C?"]


def test_response_can_be_edited(page: Any, fake: Fake) -> None:
    chat(page, fake, "A?", "No.")
    page.locator(".message.model .edit").click()
    page.get_by_label("Edit the response").fill("Yes.")
    page.keyboard.press("Control+Enter")
    expect(last(page)).to_have_text("Yes.")
    assert len(fake.requests) == 1
    chat(page, fake, "B?", "Fine.")
    assert contents(fake) == ["A?", "Yes.", "B?"]


def test_conversation_survives_reload_and_can_be_cleared(page: Any, fake: Fake) -> None:
    chat(page, fake, "A?", "first")
    page.reload()
    answered(page)
    expect(page.locator(".message .text")).to_have_text(["A?", "first"])
    press(page, "New")
    expect(page.locator(".message")).to_have_count(0)
    page.reload()
    answered(page)
    expect(page.locator(".message")).to_have_count(0)


def test_model_output_is_never_markup(visit: Any, fake: Fake) -> None:
    fake.models = [{"id": EVIL}]
    page = visit()
    title = page.title()
    chat(page, fake, EVIL, "Look: ", Piece(EVIL.encode(), -0.5, ((EVIL.encode(), -0.5),)))
    expect(last(page)).to_have_text("Look: " + EVIL)
    page.locator(".t").nth(1).hover()
    expect(page.locator("#tooltip")).to_contain_text("<img·src=x")
    fake.fail = (500, {"error": {"message": EVIL}}, {})
    page.expected = ("status of 500",)
    press(page, "Regenerate")
    expect(page.locator(".message.model .error")).to_contain_text(EVIL)
    assert page.title() == title
    assert page.locator("main img, main script, #tooltip img").count() == 0


@pytest.mark.parametrize(
    ("status", "error", "headers", "words"),
    [
        (500, {"message": "no page left"}, {}, "The server failed (500). Message: no page left"),
        (429, {"message": "slow down"}, {"Retry-After": "7"}, "retry in 7 s"),
        (400, {"message": "min_p is 3", "param": "min_p"}, {}, "min_p is 3"),
        (502, None, {}, "The server failed (502)."),
    ],
)
def test_error_message_is_shown_and_retry_works(
    page: Any, fake: Fake, status: int, error: Any, headers: dict[str, str], words: str
) -> None:
    page.expected = (f"status of {status}",)
    fake.fail = (status, {"error": error} if error else {}, headers)
    send(page, "A?")
    expect(page.locator(".message.model .error")).to_contain_text(words)
    fake.set_output("fine")
    press(page, "Try again", within=".message.model .error")
    answered(page)
    expect(page.locator(".message .text")).to_have_text(["A?", "fine"])
    expect(page.locator(BRANCHES)).to_have_text("")  # the empty failed response was removed
    assert fake.bodies()[-1]["messages"] == [{"role": "user", "content": "A?"}]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("break_after", "before the response was complete"),
        ("error_after", "The server aborted the response: out of pages"),
    ],
)
def test_broken_stream_keeps_partial_text(page: Any, fake: Fake, how: str, words: str) -> None:
    fake.set_output("One", " two", " three")
    setattr(fake, how, 2)
    send(page, "Count!")
    expect(page.locator(".message.model .error")).to_contain_text(words)
    expect(last(page)).to_have_text("One two")
    fake.set_output("whole")
    press(page, "Try again", within=".message.model .error")
    answered(page)
    expect(last(page)).to_have_text("whole")
    expect(page.locator(BRANCHES)).to_contain_text("2 / 2")


def test_api_key_is_requested_and_kept_in_session_storage(visit: Any, fake: Fake) -> None:
    fake.key = "wh-1"
    page = visit()
    page.expected = ("status of 401",)
    expect(page.locator("#error")).to_contain_text("requires an API key")
    press(page, "Settings", within="#error")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("wh-1")
    page.keyboard.press("Tab")
    answered(page)
    expect(page.locator("#error")).to_be_hidden()
    chat(page, fake, "A?", "yes")
    assert fake.requests[0][2]["authorization"] == "Bearer wh-1"
    assert page.evaluate("JSON.stringify(localStorage)").count("wh-1") == 0
    assert "wh-1" in page.evaluate("JSON.stringify(sessionStorage)")


def test_unreachable_server_is_reported_and_retried(visit: Any, fake: Fake) -> None:
    page = visit(before=lambda page: page.route("**/v1/models", lambda route: route.abort()))
    page.expected = ("ERR_FAILED",)
    expect(page.locator("#error")).to_contain_text("The server is unreachable")
    page.unroute("**/v1/models")
    page.locator("#error button").click()
    answered(page)
    expect(page.locator("#error")).to_be_hidden()


def test_settings_are_stored_validated_and_sent(page: Any, fake: Fake) -> None:
    page.click("#open")
    numbers = {"top_p": 0.5, "top_k": 40, "min_p": 0.1, "seed": 7, "max_tokens": 9}
    texts = {"temperature": "", "stop": "END\n\\n\\n\n\\\\n", "system": "Be brief."}
    for name, value in (numbers | texts).items():
        page.fill(f"#{name}", str(value))
    page.uncheck("#probabilities")
    page.reload()
    answered(page)
    chat(page, fake, "A?", "ok")
    body = fake.bodies()[-1]
    assert body.pop("messages")[0] == {"role": "system", "content": "Be brief."}
    sent = {k: v for k, v in body.items() if k not in ("model", "stream", "stream_options")}
    assert sent == {**numbers, "stop": ["END", "\n\n", "\\n"]}
    # An invalid value is reported at its field, and no request is sent.
    page.click("#open")
    page.fill("#top_k", "-1")
    send(page, "B?")
    expect(page.locator("#top_k")).to_be_focused()
    message = "Enter an integer of at least 0, or leave the field empty."
    expect(page.locator("#top_k-error")).to_have_text(message)
    expect(page.locator("#message")).to_have_value("B?")
    assert len(fake.requests) == 1
    page.click(".reset")
    expect(page.locator("#temperature")).to_have_value("0.8")
    expect(page.locator("#top_k-error")).to_have_count(0)


def test_page_works_with_forbidden_or_corrupt_storage(visit: Any, fake: Fake) -> None:
    forbid = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('forbidden') }})"
    nonsense = "sessionStorage.setItem('whorl.talk', '[1, {'); sessionStorage.setItem('whorl.sheet', '{}')"
    page = visit(before=lambda page: page.add_init_script(f"{forbid};{nonsense}"))
    chat(page, fake, "A?", "ok")
    expect(last(page)).to_have_text("ok")


def test_draws_once_per_frame_and_announces_sentences(visit: Any, fake: Fake) -> None:
    counters = """
        window.frames_ = 0; window.draws = 0; window.announced = [];
        const frame = window.requestAnimationFrame.bind(window), append = Element.prototype.append;
        window.requestAnimationFrame = (work) => frame((now) => { window.frames_ += 1; work(now); });
        Element.prototype.append = function (...nodes) {
          if (this.matches('.message .text') && nodes.some((node) => node.nodeType)) window.draws += 1;
          if (this.id === 'announcements') window.announced.push(nodes[0].textContent);
          return append.apply(this, nodes);
        };"""
    page = visit(before=lambda page: page.add_init_script(counters))
    pieces = [f" word {i}" if i % 10 else ". Word" for i in range(2000)]
    chat(page, fake, "Much!", *pieces)
    assert last(page).inner_text() == "".join(pieces)
    draws, frames, announced = page.evaluate("[window.draws, window.frames_, window.announced]")
    assert 1 <= draws <= frames + 1
    assert announced[-1] == "Response complete."
    assert "".join(announced[:-1]).strip() == "".join(pieces).strip()
    assert all(text.rstrip().endswith(".") for text in announced[:-2])


def test_enter_sends_and_shift_enter_breaks_the_line(page: Any, fake: Fake) -> None:
    fake.set_output("Yes.")
    page.click("#message")
    page.keyboard.type("A")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("B?")
    page.keyboard.press("Enter")
    answered(page)
    assert contents(fake) == ["A\nB?"]
    expect(last(page)).to_have_text("Yes.")


def test_code_is_a_block_with_a_copy_button(page: Any, fake: Fake) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat(page, fake, "Code?", "So:\n``", "`py\nx =", " 1\n", "```\nDone. `", "inline`")
    block = page.locator(".code-block")
    expect(block.locator(".code")).to_have_text("x = 1\n")
    assert last(page).evaluate("e => e.innerText.includes('Done.')")
    assert "monospace" in block.evaluate("e => getComputedStyle(e).fontFamily")
    block.get_by_role("button", name="Copy code").click()
    expect(block.get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1\n"
    block.locator(".t").first.hover()  # split spans keep their probabilities
    expect(page.locator("#tooltip")).to_be_visible()
    page.locator(".message.model .edit").click()
    text = page.get_by_label("Edit the response").input_value()
    assert text == "So:\n```py\nx = 1\n```\nDone. `inline`"
    page.reload()
    answered(page)
    expect(block.locator(".code")).to_have_text("x = 1\n")


@pytest.mark.parametrize("guard", [True, False])
def test_repeating_text_is_stopped(page: Any, fake: Fake, guard: bool) -> None:
    if not guard:
        press(page, "Settings")
        page.uncheck("#repeats")
        press(page, "Close")
    chat(page, fake, "Again?", *["and again\n"] * 60)
    assert (len(last(page).inner_text()) < 300) == guard
    expect(page.locator(".stats").first).to_contain_text("repeats itself" if guard else "60 tokens")


def test_untaught_model_is_said_to_be_one(visit: Any, fake: Fake) -> None:
    fake.models = [{"id": "base", "whorl": {"chat": False}}]
    page = visit()
    expect(page.locator("#untaught")).to_contain_text("not trained to chat")
    edge = "getComputedStyle(document.querySelector('#untaught')).paddingLeft"
    assert float(page.evaluate(edge).removesuffix("px")) >= 12  # the text does not touch the window's edge
    page.get_by_role("radio", name="Chat").check(force=True)
    expect(page.locator("#untaught")).to_contain_text("little sense")
