"""The engine page in a browser: values, charts, polling, errors, labels."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.serve.browser_pages import PHONE, expect, expect_fits
from tests.support.serve.fake_server import Fake

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=\"document.title='ran'\">"


def state(n_steps: int = 40, **changes: Any) -> dict[str, Any]:
    batches = [
        {"at": 1000 + i, "prefill_tokens": 0 if i % 10 else 128, "decode_tokens": 4, "sequences": 4}
        | {"seconds": 0.01 + 0.001 * (i % 3), "preempted": int(i == 7)}
        for i in range(n_steps)
    ]
    return {
        "model": "small", "version": 2, "queue": 1, "running": 4, "hit_rate": 0.25, "tokens_per_second": 400.0,
        "pages": {"total": 64, "used": 12, "cached": 20, "free": 32}, "page_map": [[3, 2], [1, 10], [-1, 20], [0, 32]],
        "sequences": [{"id": "cmpl-1", "prompt": 100, "output": 7, "state": "running", "pages": 4}],
        "batches": batches, "latencies": {"ttft": [0.1, 0.2, 0.3], "tpot": [0.01] * 5},
    } | changes  # fmt: skip


def expect_values(page: Any, **expected: str) -> None:
    for name, text in expected.items():
        expect(page.locator(f'[data-value="{name}"]')).to_have_text(text)


def open_engine(visit: Any, **context: Any) -> Any:
    """Open the engine page with a clock that the test advances."""
    page = visit("/engine", before=lambda page: page.clock.install(time=0), **context)
    page.wait_for_selector("#timeline svg, #error:not([hidden])")
    return page


@pytest.fixture
def page(visit: Any, fake: Fake) -> Any:
    fake.state = state()
    return open_engine(visit)


def test_engine_page_shows_all_values(page: Any, fake: Fake) -> None:
    expect_values(page, speed="400", queue="1 waiting", ttft="200\u00a0ms")
    expect_values(page, used="18.8\u00a0%", hits="25.0\u00a0%")
    for mark, count in {"rect.decode": 40, "rect.prefill": 4, ".preempted": 1}.items():
        assert page.locator(f"#timeline {mark}").count() == count
    # Stacked bars: prefill above decode; 128 tokens are 32 times as tall as 4.
    box = "e => [Number(e.getAttribute('y')), Number(e.getAttribute('height'))]"
    y, low = page.locator("#timeline rect.decode").first.evaluate(box)
    top, high = page.locator("#timeline rect.prefill").first.evaluate(box)
    assert top + high == pytest.approx(y, abs=0.01) and high == pytest.approx(32 * low, rel=0.01)
    summary = "64 pages: 12 in use (2 shared, by at most 3), 20 cached, 32 free."
    expect(page.locator("#map-summary")).to_have_text(summary)
    expect(page.locator("#sequences tbody tr")).to_have_text("cmpl-1running10074")
    assert page.locator("#percentiles tbody tr").first.inner_text().split("\t") == ["Samples", "3", "5"]
    expect(page.locator("#model")).to_have_text("small \u00b7 weights updated, version 2")


def test_cache_map_colors_pages_by_state(visit: Any, fake: Fake) -> None:
    fake.state = state()
    page = visit("/engine")
    page.expected = ("willReadFrequently",)
    page.wait_for_selector("#timeline svg")
    script = """(i) => {
      const c = document.querySelector('#map canvas'), side = 16 * devicePixelRatio, across = Math.floor(c.clientWidth / 16);
      const x = (i % across + 0.4) * side, y = (Math.floor(i / across) + 0.4) * side;
      return [...c.getContext('2d').getImageData(x, y, 1, 1).data].join();
    }"""
    shared, used, cached, free = (page.evaluate(script, i) for i in (0, 5, 20, 60))
    assert len({shared, used, cached, free}) == 4
    assert used == "15,106,115,255"  # the accent
    page.emulate_media(color_scheme="dark")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate(script, 5) == "92,195,198,255"


def test_engine_page_merges_overlapping_states(page: Any, fake: Fake) -> None:
    # The clocks of two states differ slightly.
    later = [step | {"at": step["at"] + 5e-5} for step in state(50)["batches"][20:]]
    fake.state = state(batches=later, running=9, tokens_per_second=555.0)
    page.clock.run_for(1000)
    expect_values(page, running="9", speed="555")
    assert page.locator("#timeline rect.decode").count() == 50


def test_engine_page_stops_polling_when_hidden_or_paused(page: Any, fake: Fake) -> None:
    hide = """(value) => {
      Object.defineProperty(document, 'hidden', { value, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }"""

    def polls_in_a_minute() -> int:
        before = fake.polls
        page.clock.run_for(60_000)
        page.evaluate("fetch('/v1/models').then((r) => r.text())")  # earlier requests have arrived
        return fake.polls - before

    expect(page.locator("#live")).to_contain_text("live")
    page.evaluate(hide, True)
    assert polls_in_a_minute() == 0
    fake.state = state(running=6)
    page.evaluate(hide, False)
    expect_values(page, running="6")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#live")).to_have_text("paused")
    assert polls_in_a_minute() == 0
    fake.state = state(running=7)
    page.get_by_role("button", name="Resume").click()
    expect_values(page, running="7")


def test_tooltip_by_pointer_and_keyboard(page: Any, fake: Fake) -> None:
    tip = page.locator("#tooltip")
    box = page.locator("#timeline rect.prefill").nth(2).bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 5)
    expect(tip).to_contain_text(re.compile("128 tokens.*12.0\u00a0ms", re.S))
    page.mouse.move(2, 2)
    expect(tip).to_be_hidden()
    page.locator("#timeline svg").focus()
    page.keyboard.press("Home")
    expect(tip).to_contain_text("128 tokens")
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("preempted")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    canvas = page.locator("#map canvas")
    canvas.hover(position={"x": 5, "y": 5})
    expect(tip).to_contain_text(re.compile("page 0.*used by 3 sequences", re.S))
    canvas.focus()
    page.keyboard.press("End")
    expect(tip).to_contain_text(re.compile("page 63.*free", re.S))


def test_charts_have_text_labels(page: Any, fake: Fake) -> None:
    steps = "512 prompt tokens, 160 output tokens, 1 preemption; median duration 11.0\u00a0ms"
    within = "50 % within 200\u00a0ms, 95 % within 290\u00a0ms, 99 % within 298\u00a0ms"
    timeline, ttft, load = (
        page.locator(f"#{name} svg").get_attribute("aria-label") for name in ("timeline", "ttft", "load")
    )
    assert timeline == f"The latest 40 steps: {steps}. Use the arrow keys to move between steps."
    assert ttft == f"Time to first token, 3 samples: {within}."
    assert "Now 4 running and 1 waiting" in load
    page.locator("summary").click()
    assert page.locator("#steps tbody tr").count() == 12
    drawings = page.locator("svg, canvas")
    assert all(drawings.nth(i).get_attribute("aria-label") for i in range(drawings.count()))


def test_engine_page_shows_error_and_recovers(page: Any, fake: Fake) -> None:
    page.expected = ("status of 500",)
    fake.fail = (500, {"error": {"message": EVIL}}, {})
    page.clock.run_for(1000)
    error = page.locator("#error")
    expect(error).to_have_text(f"The server failed (500). Message: {EVIL}")
    expect(page.locator("#live")).to_have_text("retrying")
    expect_values(page, running="4")  # the last known value stays, grayed out
    fake.fail, fake.state = None, state(running=8, model=EVIL, sequences=[{"id": EVIL, "state": EVIL}])
    page.clock.run_for(3000)
    expect_values(page, running="8")
    expect(error).to_be_hidden()
    expect(page.locator("#sequences td.id")).to_have_text(EVIL)
    assert page.title() == "Whorl: engine"


def test_engine_page_uses_the_api_key_of_the_tab(visit: Any, fake: Fake) -> None:
    fake.state, fake.key = state(), "wh-1"
    page = open_engine(visit)
    page.expected = ("status of 401",)
    link = page.locator("#error a")
    expect(link).to_have_text("Enter a key on the chat page")
    link.click()
    expect(page.locator("#key")).to_be_focused()
    page.go_back()
    page.evaluate("sessionStorage.setItem('whorl.key', JSON.stringify('wh-1'))")
    page.clock.run_for(3000)
    expect_values(page, running="4")


@pytest.mark.parametrize("empty", [False, True])
def test_engine_page_fits_a_phone(visit: Any, fake: Fake, empty: bool) -> None:
    fake.state = {} if empty else state(400, model="a-model-with-a-long-name/" * 4)
    page = open_engine(visit, **PHONE)
    expect_fits(page, 360)
    for table in ("#percentiles", "#sequences"):  # all columns are visible
        assert page.locator(table).evaluate("e => e.scrollWidth <= e.parentElement.clientWidth")
    tick = page.locator("#timeline svg text").first
    assert tick.evaluate("e => e.getBoundingClientRect().height") >= 11
    if empty:
        expect(page.locator("#none")).to_be_visible()
        expect_values(page, ttft="–")
        return
    box = page.locator("#timeline rect.prefill").last.bounding_box()
    page.touchscreen.tap(box["x"] + 1, box["y"] + 3)
    expect(page.locator("#tooltip")).to_contain_text("128 tokens")
    tip = page.locator("#tooltip").bounding_box()
    assert tip["x"] >= 0 and tip["x"] + tip["width"] <= 360
