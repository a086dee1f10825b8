"""The arena page in a browser: blind, random sides, keyboard, phone, ties, a vote that moves a rating."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.serve.arena_server import ANSWERS, NAMES, RunningArena, arena_server
from tests.support.serve.browser_pages import PATIENCE, PHONE, expect, expect_fits

from whorl.serve.middleware.auth import KeyFile


@pytest.fixture
def server(browser: Any, tmp_path: Path) -> Iterator[RunningArena]:
    answers = {**ANSWERS, "<b>owl</b>": lambda text: "<img src=x onerror=alert(1)>\n" + "long " * 400}
    with arena_server(tmp_path, answers, prompts=["Name a river.", "Name a lake."]) as running:
        yield running


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """open_page(url, context options...) -> page. At the end the console is empty, and all requests went to the server."""
    pages: list[tuple[str, Any]] = []

    def start(url: str, **context: Any) -> Any:
        page = browser.new_context(**context).new_page()
        page.set_default_timeout(PATIENCE)
        page.said, page.asked, page.expected = [], [], ()
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(url)
        pages.append((url, page))
        return page

    yield start
    for url, page in pages:
        page.context.close()
        assert [text for text in page.said if not any(word in text for word in page.expected)] == []
        assert [asked for asked in page.asked if not asked.startswith((url, "data:"))] == []


def test_vote_shows_names_and_moves_a_rating(server: RunningArena, open_page: Any) -> None:
    page = open_page(server.url)
    expect(page.locator("#about")).to_have_text("3 models, 0 votes")
    page.fill("#prompt", "Hello <i>you</i>")
    page.click(".send")
    expect(page.locator(".answer")).to_have_count(2)
    assert not any(name in page.content() for name in (*NAMES, "owl"))  # blind
    page.click("[data-choice=left]")
    expect(page.locator("#outcome .left .up")).to_contain_text("1000 → 1")
    expect(page.locator("#outcome .right .down")).to_contain_text("1000 → 9")
    [stored] = server.arena.log.battles()
    assert stored.vote is not None and stored.vote.choice == "left" and len(stored.vote.voter) == 24
    assert page.locator("#outcome .left .model").text_content() == stored.left
    assert page.locator(".answer.left .text").text_content() == stored.turns[0].left
    assert page.locator(".prompt").text_content() == "Hello <i>you</i>"
    page.click("text=Ratings")
    expect(page.locator("#ratings tbody tr")).to_have_count(3)
    expect(page.locator("#ratings tbody tr").first).to_contain_text(stored.left)
    expect(page.locator("#verdict")).to_contain_text("Provisional")
    expect(page.locator("#about")).to_have_text("3 models, 1 vote")
    expect(page.locator("#meetings tbody td", has_text="%")).to_have_count(6)


def test_keyboard_votes_and_starts_battles(server: RunningArena, open_page: Any) -> None:
    page = open_page(server.url)
    page.fill("#prompt", "First 1234")
    assert server.arena.log.n_votes() == 0  # digits in the prompt are text
    page.keyboard.press("Control+Enter")
    for number, (key, choice) in enumerate(
        (("1", "left"), ("ArrowRight", "right"), ("3", "tie"), ("4", "both bad"), ("ArrowLeft", "left"))
    ):
        expect(page.locator("#choices:not([hidden]) button:not(:disabled)")).to_have_count(4)
        page.keyboard.press(key)
        expect(page.locator("#next:not(:disabled)")).to_be_visible()
        page.keyboard.press("2")  # a vote is final
        assert server.arena.log.votes()[-1].choice == choice and server.arena.log.n_votes() == number + 1
        name = page.locator(f"[data-choice='{choice}'] span").text_content()
        expect(page.locator("#outcome .note")).to_have_text(f"Your vote: {name}.")
        page.keyboard.press("n")
    prompts = [b.turns[0].prompt for b in server.arena.log.battles()]
    assert prompts[0] == "First 1234" and set(prompts[1:]) <= {"Name a river.", "Name a lake."}


def test_prompt_sent_while_the_page_loads_is_answered(server: RunningArena, browser: Any) -> None:
    page, held = browser.new_context().new_page(), list[Any]()
    page.set_default_timeout(PATIENCE)
    page.route("**/v1/arena", lambda route: held.append(route))
    page.goto(server.url)
    page.fill("#prompt", "Early")
    page.keyboard.press("Control+Enter")
    while not held:
        page.wait_for_timeout(10)
    held[0].continue_()
    expect(page.locator("#choices:not([hidden]) button:not(:disabled)")).to_have_count(4)
    assert [battle.turns[0].prompt for battle in server.arena.log.battles()] == ["Early"]
    page.context.close()


def test_sides_are_drawn(server: RunningArena, open_page: Any) -> None:
    page = open_page(server.url)
    expect(page.locator("#about")).to_have_text("3 models, 0 votes")
    page.keyboard.press("n")  # the first battle, with a drawn prompt
    for _ in range(14):
        expect(page.locator("#choices button:not(:disabled)")).to_have_count(4)
        page.keyboard.press("3")
        expect(page.locator("#next:not(:disabled)")).to_be_visible()
        page.keyboard.press("n")
    sides = {(b.left, b.right) for b in server.arena.log.battles()}
    assert any((b, a) in sides for a, b in sides)


def test_conversation_continues_before_the_vote(server: RunningArena, open_page: Any) -> None:
    page = open_page(server.url)
    for n, text in enumerate(("One", "Two")):
        page.fill("#prompt", text)
        page.click(".send")
        expect(page.locator(".turn")).to_have_count(n + 1)
    page.click("[data-choice='both bad']")
    expect(page.locator("#composer")).to_be_hidden()
    [battle] = server.arena.log.battles()
    assert [t.prompt for t in battle.turns] == ["One", "Two"] and battle.vote is not None


def test_phone_has_answers_below_each_other(server: RunningArena, open_page: Any) -> None:
    page = open_page(server.url, **PHONE)
    page.tap(".draw")
    expect(page.locator(".answer")).to_have_count(2)
    left, right = (page.locator(f".answer.{side}").bounding_box() for side in ("left", "right"))
    assert left["x"] == right["x"] and left["y"] + left["height"] <= right["y"]
    expect_fits(page, 360)
    for box in (b.bounding_box() for b in page.locator("#choices button").all()):
        assert box["height"] >= 44 and 0 <= box["y"] <= 740 - box["height"]  # in reach without scrolling
    page.tap("[data-choice=tie]")
    expect(page.locator("#next")).to_be_visible()
    box = page.locator("#next").bounding_box()
    assert box["height"] >= 44 and box["y"] <= 740 - box["height"]
    page.goto(server.url + "#ratings")
    expect(page.locator("#ratings tbody tr")).to_have_count(3)
    expect_fits(page, 360)


def test_failed_vote_is_sent_again_and_counts_once(server: RunningArena, open_page: Any) -> None:
    page = open_page(server.url)
    page.expected = ("Failed to load resource",)
    page.click(".draw")
    expect(page.locator("#choices button:not(:disabled)")).to_have_count(4)

    def lose_response(route: Any) -> None:
        route.fetch()
        route.abort()

    page.route("**/vote", lose_response)
    page.click("[data-choice=right]")
    expect(page.locator("#error")).to_contain_text("unreachable")
    assert server.arena.log.n_votes() == 1
    page.unroute("**/vote")
    page.click("#error .retry")
    expect(page.locator("#outcome")).to_contain_text("counts once")
    assert [v.choice for v in server.arena.log.votes()] == ["right"]


def test_page_has_a_field_for_the_key(browser: Any, tmp_path: Path, open_page: Any) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("alice")
    with arena_server(tmp_path, key_file=keys.path) as server:
        page = open_page(server.url)
        page.expected = ("401",)
        page.fill("#key", key)
        page.click("#key-form button")
        expect(page.locator("#about")).to_have_text("2 models, 0 votes")
        page.fill("#prompt", "Hi")
        page.click(".send")
        expect(page.locator(".answer")).to_have_count(2)
