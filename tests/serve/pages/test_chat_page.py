"""The conversation in a real browser: what is sent, what is shown, what can be taken back."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.serve.browser_pages import expect
from tests.support.serve.fake_server import Fake, Piece

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=\"document.title='ran'\"><script>document.title='ran'</script>"


def send(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.click(".send")


def answered(page: Any) -> None:
    """Until nothing is being written."""
    page.wait_for_selector("body:not(.busy)")


def last(page: Any) -> Any:
    return page.locator(".message.model .text").last


def test_a_message_is_answered_token_by_token(visit: Any, fake: Fake) -> None:
    page = visit()
    fake.tell("One", " two", " three", hold=True)
    send(page, "Count!")
    fake.let()
    expect(last(page)).to_have_text("One")
    expect(page.locator("#message")).to_have_value("")
    fake.let()
    expect(last(page)).to_have_text("One two")
    fake.let()
    answered(page)
    expect(last(page)).to_have_text("One two three")
    stats = page.locator(".stats").first
    expect(stats).to_contain_text("3 tokens")
    expect(stats).to_contain_text("tokens/s")
    expect(stats).to_contain_text("prompt 12 tokens (8 from the cache)")
    path, body, headers = fake.asked[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "small",
        "messages": [{"role": "user", "content": "Count!"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "top_p": 0.95,
        "max_tokens": 256,
        "logprobs": True,
        "top_logprobs": 5,
    }
    assert "authorization" not in headers


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stop_closes_the_connection_and_keeps_what_stands(visit: Any, fake: Fake, by: str) -> None:
    page = visit()
    fake.tell("One", " two", " three", hold=True)
    send(page, "Count!")
    fake.let(2)
    expect(last(page)).to_have_text("One two")
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    assert fake.gone.wait(240)
    answered(page)
    expect(last(page)).to_have_text("One two")
    expect(page.locator(".stats").first).to_contain_text("stopped · 2 tokens")
    expect(page.locator("#said")).to_contain_text("Stopped.")
    # The next message goes on from there.
    fake.tell("three")
    send(page, "Go on")
    answered(page)
    assert [m["content"] for m in fake.bodies()[-1]["messages"]] == ["Count!", "One two", "Go on"]


def test_edit_and_regenerate_keep_every_branch(visit: Any, fake: Fake) -> None:
    page = visit()
    fake.tell("first")
    send(page, "A?")
    answered(page)
    fake.tell("second")
    page.get_by_role("button", name="Regenerate").click()
    answered(page)
    expect(page.locator(".message.model .branches")).to_contain_text("2 / 2")
    expect(last(page)).to_have_text("second")
    page.get_by_role("button", name="Earlier version").click()
    expect(last(page)).to_have_text("first")
    # An edited message begins a branch of its own, with its own answer.
    fake.tell("third")
    page.locator(".message.user .edit").click()
    page.get_by_label("Edit your message").fill("B?")
    page.locator("form.editor button[type=submit]").click()
    answered(page)
    assert fake.bodies()[-1]["messages"] == [{"role": "user", "content": "B?"}]
    expect(page.locator(".message.user .text")).to_have_text("B?")
    expect(last(page)).to_have_text("third")
    expect(page.locator(".message.model .branches")).to_have_text("")
    page.locator(".message.user").get_by_role("button", name="Earlier version").click()
    expect(page.locator(".message.user .text")).to_have_text("A?")
    expect(last(page)).to_have_text("first")
    expect(page.locator(".message.model .branches")).to_contain_text("1 / 2")
    # What is sent is the path that is shown.
    fake.tell("fourth")
    send(page, "C?")
    answered(page)
    assert [m["content"] for m in fake.bodies()[-1]["messages"]] == ["A?", "first", "C?"]


def test_an_answer_can_be_rewritten_by_hand(visit: Any, fake: Fake) -> None:
    page = visit()
    fake.tell("No.")
    send(page, "A?")
    answered(page)
    page.locator(".message.model .edit").click()
    page.get_by_label("Edit the answer").fill("Yes.")
    page.keyboard.press("Control+Enter")
    expect(last(page)).to_have_text("Yes.")
    assert len(fake.asked) == 1
    fake.tell("Fine.")
    send(page, "B?")
    answered(page)
    assert [m["content"] for m in fake.bodies()[-1]["messages"]] == ["A?", "Yes.", "B?"]


def test_the_conversation_outlives_a_reload_and_can_be_dropped(visit: Any, fake: Fake) -> None:
    page = visit()
    fake.tell("first")
    send(page, "A?")
    answered(page)
    page.reload()
    answered(page)
    expect(page.locator(".message .text")).to_have_text(["A?", "first"])
    page.get_by_role("button", name="New").click()
    expect(page.locator(".message")).to_have_count(0)
    page.reload()
    answered(page)
    expect(page.locator(".message")).to_have_count(0)


def test_model_output_is_never_markup(visit: Any, fake: Fake) -> None:
    fake.models = [{"id": EVIL}]
    page = visit()
    title = page.title()
    token = Piece(EVIL.encode(), -0.5, ((EVIL.encode(), -0.5),))
    fake.tell("Look: ", token)
    send(page, EVIL)
    answered(page)
    expect(last(page)).to_have_text("Look: " + EVIL)
    page.locator(".t").nth(1).hover()
    expect(page.locator("#tip")).to_contain_text("<img·src=x")
    fake.fail = (500, {"error": {"message": EVIL}}, {})
    page.expected = ("status of 500",)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message.model .trouble")).to_contain_text(EVIL)
    assert page.title() == title
    assert page.locator("main img, main script, #tip img").count() == 0


ERRORS = {
    "failed": (
        500,
        {"error": {"message": "no page left"}},
        {},
        "The server failed (500). It says: no page left",
    ),
    "busy": (429, {"error": {"message": "slow down"}}, {"Retry-After": "7"}, "it will again in 7 s"),
    "refused": (400, {"error": {"message": "min_p is 3", "param": "min_p"}}, {}, "min_p is 3"),
    "proxy": (502, {}, {}, "The server failed (502)."),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_told_in_words_and_can_be_tried_again(visit: Any, fake: Fake, kind: str) -> None:
    status, body, headers, words = ERRORS[kind]
    page = visit()
    page.expected = (f"status of {status}",)
    fake.fail = (status, body, headers)
    send(page, "A?")
    trouble = page.locator(".message.model .trouble")
    expect(trouble).to_contain_text(words)
    fake.tell("fine")
    trouble.get_by_role("button", name="Try again").click()
    answered(page)
    expect(page.locator(".message .text")).to_have_text(["A?", "fine"])
    expect(page.locator(".message.model .branches")).to_have_text(
        ""
    )  # the failed one, which said nothing, is gone
    assert fake.bodies()[-1]["messages"] == [{"role": "user", "content": "A?"}]


@pytest.mark.parametrize("how", ["breaks", "says"])
def test_a_stream_that_ends_early_keeps_what_came(visit: Any, fake: Fake, how: str) -> None:
    page = visit()
    fake.tell("One", " two", " three")
    if how == "breaks":
        fake.break_after = 2
    else:
        fake.error_after = 2
    send(page, "Count!")
    trouble = page.locator(".message.model .trouble")
    expect(trouble).to_contain_text(
        "before the answer was whole" if how == "breaks" else "The server broke off: out of pages"
    )
    expect(last(page)).to_have_text("One two")
    fake.tell("whole")
    trouble.get_by_role("button", name="Try again").click()
    answered(page)
    expect(last(page)).to_have_text("whole")
    expect(page.locator(".message.model .branches")).to_contain_text("2 / 2")


def test_a_key_is_asked_for_and_forgotten_with_the_tab(visit: Any, fake: Fake) -> None:
    fake.key = "wh-1"
    page = visit()
    page.expected = ("status of 401",)
    expect(page.locator("#trouble")).to_contain_text("asks for an API key")
    page.locator("#trouble").get_by_role("button", name="Settings").click()
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("wh-1")
    page.keyboard.press("Tab")
    answered(page)
    expect(page.locator("#trouble")).to_be_hidden()
    fake.tell("yes")
    send(page, "A?")
    answered(page)
    assert fake.asked[0][2]["authorization"] == "Bearer wh-1"
    assert page.evaluate("JSON.stringify(localStorage)").count("wh-1") == 0
    assert "wh-1" in page.evaluate("JSON.stringify(sessionStorage)")


def test_a_server_that_is_not_there_is_told_and_asked_again(visit: Any, fake: Fake) -> None:
    page = visit(before=lambda page: page.route("**/v1/models", lambda route: route.abort()))
    page.expected = ("ERR_FAILED",)
    expect(page.locator("#trouble")).to_contain_text("The server cannot be reached")
    page.unroute("**/v1/models")
    page.locator("#trouble button").click()
    answered(page)
    expect(page.locator("#trouble")).to_be_hidden()


def test_settings_are_kept_checked_and_sent(visit: Any, fake: Fake) -> None:
    page = visit()
    page.click("#open")
    for name, value in {
        "temperature": "",
        "top_p": "0.5",
        "top_k": "40",
        "min_p": "0.1",
        "seed": "7",
    }.items():
        page.fill(f"#{name}", value)
    page.fill("#max_tokens", "9")
    page.fill("#stop", "END\n\\n\\n\n\\\\n")
    page.fill("#system", "Be brief.")
    page.uncheck("#probabilities")
    page.reload()
    answered(page)
    fake.tell("ok")
    send(page, "A?")
    answered(page)
    body = fake.bodies()[-1]
    assert body.pop("messages")[0] == {"role": "system", "content": "Be brief."}
    assert {k: v for k, v in body.items() if k not in ("model", "stream", "stream_options")} == {
        "top_p": 0.5, "top_k": 40, "min_p": 0.1, "seed": 7, "max_tokens": 9, "stop": ["END", "\n\n", "\\n"],
    }  # fmt: skip
    # A value out of range is told where it stands, and nothing is sent.
    page.click("#open")
    page.fill("#top_k", "-1")
    page.fill("#message", "B?")
    page.click(".send")
    expect(page.locator("#top_k")).to_be_focused()
    expect(page.locator("#top_k-trouble")).to_have_text("Expected: a whole number, 0 or more, or empty.")
    expect(page.locator("#message")).to_have_value("B?")
    assert len(fake.asked) == 1
    page.click(".reset")
    expect(page.locator("#temperature")).to_have_value("0.8")
    expect(page.locator("#top_k-trouble")).to_have_count(0)


def test_storage_that_is_forbidden_or_full_of_nonsense_does_no_harm(visit: Any, fake: Fake) -> None:
    forbid = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('forbidden') }})"
    nonsense = "sessionStorage.setItem('whorl.talk', '[1, {'); sessionStorage.setItem('whorl.sheet', '{}')"
    page = visit(before=lambda page: page.add_init_script(f"{forbid};{nonsense}"))
    fake.tell("ok")
    send(page, "A?")
    answered(page)
    expect(last(page)).to_have_text("ok")


def test_drawing_is_once_a_frame_and_reading_aloud_in_sentences(visit: Any, fake: Fake) -> None:
    counters = """
        window.frames_ = 0; window.draws = 0; window.spoken = [];
        const frame = window.requestAnimationFrame.bind(window), append = Element.prototype.append;
        window.requestAnimationFrame = (work) => frame((now) => { window.frames_ += 1; work(now); });
        Element.prototype.append = function (...nodes) {
          if (this.matches('.message .text') && nodes.some((node) => node.nodeType)) window.draws += 1;
          if (this.id === 'said') window.spoken.push(nodes[0].textContent);
          return append.apply(this, nodes);
        };"""
    page = visit(before=lambda page: page.add_init_script(counters))
    pieces = [" word" if i % 10 else ". Word" for i in range(2000)]
    fake.tell(*pieces)
    send(page, "Much!")
    answered(page)
    assert last(page).inner_text() == "".join(pieces)
    draws, frames, spoken = page.evaluate("[window.draws, window.frames_, window.spoken]")
    assert 1 <= draws <= frames + 1
    assert spoken[-1] == "End of the answer."
    assert "".join(spoken[:-1]).strip() == "".join(pieces).strip()
    assert all(said.rstrip().endswith(".") for said in spoken[:-2])
