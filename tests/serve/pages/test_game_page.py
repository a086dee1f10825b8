"""The page of a game against an agent: clicks, replies, the search, taking back, and its API."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from tests.support.serve.browser_pages import PATIENCE, PHONE, expect, expect_fits

from whorl.agents.methods.registration import make_config
from whorl.agents.search.play import TrainedPlayer
from whorl.agents.task import open_method
from whorl.http.draining_server import server_config
from whorl.serve.config import ServeConfig
from whorl.serve.game import create_game_app
from whorl.serve.server import bind_socket


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = make_config("alphazero", "connect4", hidden=(8,))
    agent = TrainedPlayer.open("beginner", config, open_method(config)[1], 16)
    sock = bind_socket(ServeConfig(port=0))
    server = uvicorn.Server(server_config(create_game_app(agent)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/game/position", json=body, timeout=60)


def test_position_has_board_search_and_end(url: str) -> None:
    about = httpx.get(f"{url}/v1/game", timeout=60).json()
    assert about == {
        "agent": "beginner", "game": "connect4", "simulations": 16, "rows": 6, "columns": 7, "gravity": True,
    }  # fmt: skip
    found = ask(url, moves=[3, 3, 0]).json()
    assert found["board"][5] == ["X", "", "", "X", "", "", ""] and found["board"][4][3] == "O"
    assert found["turn"] == "O" and found["winner"] == "" and not found["ended"]
    search = found["search"]
    assert (
        sum(search["visits"]) == 16
        and sum(search["prior"]) == pytest.approx(1)
        and search["visits"][search["move"]]
    )
    ended = ask(url, moves=[0, 1, 0, 1, 0, 1, 0]).json()
    assert ended["winner"] == "X" and ended["ended"] and ended["search"] is None and not any(ended["legal"])


def test_illegal_moves_are_refused(url: str) -> None:
    full = ask(url, moves=[0] * 7)
    assert full.status_code == 400 and "the move 1 is illegal" in full.json()["error"]["message"]
    assert ask(url, moves=[7]).status_code == 400 and ask(url, moves=[-1]).status_code in (400, 422)
    after = ask(url, moves=[0, 1, 0, 1, 0, 1, 0, 2])
    assert after.status_code == 400 and "illegal" in after.json()["error"]["message"]


@pytest.mark.browser
@pytest.mark.parametrize("device", [{}, PHONE], ids=["desktop", "phone"])
def test_a_person_plays_on_the_page(browser: Any, url: str, device: dict[str, Any]) -> None:
    page = browser.new_context(**device).new_page()
    page.set_default_timeout(PATIENCE)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.goto(url)
    state, stones = page.locator("#state"), page.locator("circle[data-sign]")
    expect(page.locator("#about")).to_have_text("beginner, 16 simulations")
    expect(state).to_have_text("Your move: X.")
    page.get_by_label("Move 4").last.click()
    expect(state).to_have_text("Your move: X.")
    expect(stones).to_have_count(2)
    expect(page.locator("#visits tr.chosen")).to_have_count(1)
    expect(page.locator("#value")).to_contain_text("Value for O")
    page.click("#back")
    expect(stones).to_have_count(0)
    page.click("#agent")  # the agent begins
    expect(stones).to_have_count(1)
    expect(state).to_have_text("Your move: O.")
    page.check("#hints")
    expect(page.locator("#value")).to_contain_text("Value for O")
    page.click("#new")
    expect(state).to_have_text("Your move: X.")
    page.get_by_label("Move 1").last.focus()
    page.keyboard.press("Enter")
    expect(stones).to_have_count(2)
    expect_fits(page, page.viewport_size["width"])
    assert errors == []
    page.context.close()
