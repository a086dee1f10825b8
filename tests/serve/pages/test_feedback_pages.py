"""Consent, thumbs, edits and votes in the chat; the pages /feed and /loop; against a real server with a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.serve.browser_pages import PHONE, answered, expect, send
from tests.support.serve.live_server import Running, make_state, running

from whorl.log import open_log
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.counter import VIEWS
from whorl.loop.events import COMPLETIONS, FEEDBACK
from whorl.loop.streams.runner import run_views
from whorl.loop.streams.store import default_views
from whorl.serve.completion_log import CompletionLog

pytestmark = pytest.mark.browser
UP, DOWN = ".message.model .thumb.like", ".message.model .thumb.dislike"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def logged(home: Path) -> Iterator[Running]:
    with running(make_state(events=CompletionLog.open(home))) as server:
        yield server


@pytest.fixture
def visit(browser: Any, logged: Running) -> Iterator[Callable[..., Any]]:
    pages: list[Any] = []

    def open_page(path: str = "/", **context: Any) -> Any:
        page = browser.new_context(**context).new_page()
        page.said, page.expected = [], ()
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.goto(logged.url + path)
        pages.append(page)
        if path == "/":
            page.wait_for_selector("#model:not(:disabled)")
        return page

    yield open_page
    for page in pages:
        page.context.close()
        assert [text for text in page.said if not any(word in text for word in page.expected)] == []


def events(server: Running, topic: str) -> list[Any]:
    assert server.api.events is not None
    found = [record.event() for record in server.api.events.log.replay(topic)]
    return sorted(found, key=lambda event: event.id)


def clicks(server: Running, completion: str) -> list[str]:
    found = [event for event in events(server, FEEDBACK) if event.data["completion"] == completion]
    return [event.data["kind"] for event in sorted(found, key=lambda event: event.time)]


def chat(page: Any, text: str, keep: bool = True) -> None:
    if page.locator("#max_tokens").input_value() != "12":
        page.click("#open")
        page.fill("#max_tokens", "12")
        page.click("#settings .close")
    page.locator("#keep").set_checked(keep)
    send(page, text)
    answered(page)


def wait(page: Any, condition: str) -> None:
    """Wait until an expression is true; the page's policy forbids `wait_for_function`."""
    deadline = time.monotonic() + 120
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def wait_sent(page: Any) -> None:
    """Wait until no click is stored."""
    wait(page, "Object.keys(localStorage).every((key) => !key.startsWith('whorl.click'))")


def newest(server: Running) -> str:
    return str(max(events(server, COMPLETIONS), key=lambda event: event.time).id)


def test_thumbs_need_consent_for_each_conversation(visit: Any, logged: Running) -> None:
    page = visit()
    before = len(events(logged, COMPLETIONS))
    expect(page.locator("#keep")).not_to_be_checked()
    chat(page, "Hello", keep=False)
    expect(page.locator(".thumb")).to_have_count(0)
    chat(page, "Hello again")
    expect(page.locator(UP)).to_have_count(1)
    assert len(events(logged, COMPLETIONS)) == before + 1
    page.click(UP)
    expect(page.locator(UP)).to_have_attribute("aria-pressed", "true")
    page.click(DOWN)
    page.click(DOWN)
    expect(page.locator(".thumb[aria-pressed=true]")).to_have_count(0)
    page.click(UP)
    wait_sent(page)
    assert clicks(logged, newest(logged)) == ["like", "dislike", "none", "like"]
    page.reload()
    expect(page.locator(UP)).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="New").click()
    expect(page.locator("#keep")).not_to_be_checked()


def test_a_refused_click_is_reverted_with_a_message(visit: Any, logged: Running) -> None:
    page = visit()
    page.expected = ("403",)
    chat(page, "Hello")
    refusal = {"error": {"message": "the token was not made by this server", "param": "token"}}
    page.route("**/v1/feedback", lambda route: route.fulfill(status=403, json=refusal))
    page.click(UP)
    expect(page.locator(".thumbs .note")).to_contain_text(
        "Not counted. the token was not made by this server"
    )
    expect(page.locator(UP)).to_have_attribute("aria-pressed", "false")
    assert clicks(logged, newest(logged)) == []


def test_clicks_made_offline_are_sent_once_after_a_reload(visit: Any, logged: Running) -> None:
    page = visit()
    page.expected = ("ERR_", "503")
    chat(page, "Hello")
    page.route("**/v1/feedback", lambda route: route.abort())
    page.click(UP)
    expect(page.locator(".thumbs .note")).to_contain_text("Kept")
    expect(page.locator(UP)).to_have_attribute("aria-pressed", "true")
    page.unroute("**/v1/feedback")
    lost = []

    def lose(route: Any) -> None:
        """The server takes the click, and its answer is lost."""
        if not lost:
            lost.append(route.fetch().status)
            route.fulfill(status=503, json={"error": {"message": "the log is away"}})
        else:
            route.continue_()

    page.route("**/v1/feedback", lose)
    page.reload()
    wait_sent(page)
    assert lost == [202] and clicks(logged, newest(logged)) == ["like"]


def test_an_edited_answer_is_sent(visit: Any, logged: Running) -> None:
    page = visit()
    chat(page, "Hello")
    page.locator(".message.model .edit").click()
    page.get_by_label("Edit the response").fill("A better answer.")
    page.get_by_role("button", name="Save and send").click()
    expect(page.locator(".message.model .text").last).to_have_text("A better answer.")
    wait_sent(page)
    assert logged.api.events is not None
    (edit,) = [e for e in events(logged, FEEDBACK) if e.data["kind"] == "edit"]
    assert (logged.api.events.keys.open(edit) or {})["text"] == "A better answer."


def test_a_vote_between_two_answers_is_logged(visit: Any, logged: Running) -> None:
    logged.api.compare = 1.0
    page = visit()
    logged.api.compare = 0.0
    chat(page, "Hello")
    expect(page.locator(".compared .answer")).to_have_count(2)
    page.get_by_role("button", name="B is better").click()
    expect(page.locator(".compared")).to_have_count(0)
    expect(page.locator(".message.model .branches")).to_contain_text("2 / 2")
    wait_sent(page)
    (vote,) = [event for event in events(logged, FEEDBACK) if event.data["kind"] == "better"]
    made = {event.id: event.data for event in events(logged, COMPLETIONS)}
    left, right = made[vote.data["over"]], made[vote.data["completion"]]
    assert (left["side"], right["side"], left["pair"]) == ("left", "right", right["pair"])
    assert vote.data["actor"] == left["actor"] == right["actor"] != "anonymous"


def test_feed_and_loop_show_what_was_kept(visit: Any, logged: Running, home: Path) -> None:
    page = visit(**PHONE)
    chat(page, "A question for the feed")
    page.click(UP)
    wait_sent(page)
    answer = page.locator(".message.model .text").evaluate("e => e.textContent")
    log = logged.api.events.log.url  # type: ignore[union-attr]
    run_views(
        VIEWS, log, default_views(home), perform=lambda effects: None, stop=threading.Event(), once=True
    )

    feed = visit("/feed", **PHONE)
    card = feed.locator(".card").first
    expect(card.locator(".prompt")).to_have_text("A question for the feed")
    assert card.locator(".text").evaluate("e => e.textContent") == answer
    expect(card.locator(".counts")).to_have_text("1 up, 0 down")
    box = card.locator(".thumb.like").bounding_box()
    assert box["height"] >= 44 and box["width"] >= 44
    card.locator(".thumb.like").click()  # another browser, so another actor
    expect(card.locator(".counts")).to_have_text("2 up, 0 down")
    card.locator(".thumb.like").click()
    expect(card.locator(".counts")).to_have_text("1 up, 0 down")
    wait(feed, "document.documentElement.scrollWidth <= 360")

    loop = visit("/loop", **PHONE)
    expect(loop.locator("#raters")).to_contain_text("Gini coefficient")
    expect(loop.locator("#log")).to_contain_text("view answers")
    expect(loop.locator("#lorenz .curve")).to_have_count(1)
    assert loop.locator("#days rect").count() >= 1
    wait(loop, "document.documentElement.scrollWidth <= 360")


def test_an_erased_actor_leaves_the_feed(logged: Running, home: Path) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Secret"}],
        "max_tokens": 4,
        "store": True,
    }
    logged.post("/v1/chat/completions", json=body | {"user": "gone"})
    log = open_log(f"sqlite:{home / 'log' / 'events.db'}")
    run_views(
        VIEWS, log.url, default_views(home), perform=lambda effects: None, stop=threading.Event(), once=True
    )
    log.close()
    prompts = [answer["prompt"] for answer in logged.get("/v1/feed").json()["answers"]]
    assert "Secret" in prompts
    keys = ActorKeys(home / "log" / "keys.db")
    keys.erase("gone")
    keys.close()
    prompts = [answer["prompt"] for answer in logged.get("/v1/feed").json()["answers"]]
    assert "Secret" not in prompts
