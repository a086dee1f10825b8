"""The engine page in a browser: values, charts, polling, errors, labels."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.serve.browser_pages import PHONE, expect
from tests.support.serve.fake_server import Fake

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=\"document.title='ran'\">"


def state(n_steps: int = 40, **changes: Any) -> dict[str, Any]:
    steps = [
        {
            "at": 1000 + i,
            "prefill_tokens": 128 if i % 10 == 0 else 0,
            "decode_tokens": 4,
            "sequences": 4,
            "seconds": 0.01 + 0.001 * (i % 3),
            "preempted": int(i == 7),
        }
        for i in range(n_steps)
    ]
    return {
        "model": "small", "version": 2, "queue": 1, "running": 4, "hit_rate": 0.25, "tokens_per_second": 400.0,
        "pages": {"total": 64, "used": 12, "cached": 20, "free": 32}, "page_map": [[3, 2], [1, 10], [-1, 20], [0, 32]],
        "sequences": [{"id": "cmpl-1", "prompt": 100, "output": 7, "state": "running", "pages": 4}],
        "batches": steps, "latencies": {"ttft": [0.1, 0.2, 0.3], "tpot": [0.01] * 5},
    } | changes  # fmt: skip


def value(page: Any, name: str) -> Any:
    return page.locator(f'[data-value="{name}"]')


def open_engine(visit: Any, **context: Any) -> Any:
    """Open the engine page with a clock that the test advances."""
    page = visit("/engine", before=lambda page: page.clock.install(time=0), **context)
    page.wait_for_selector("#timeline svg, #error:not([hidden])")
    return page


def test_engine_page_shows_all_values(visit: Any, fake: Fake) -> None:
    fake.state = state()
    page = open_engine(visit)
    expect(value(page, "speed")).to_have_text("400")
    expect(value(page, "queue")).to_have_text("1 waiting")
    expect(value(page, "ttft")).to_have_text("200\u00a0ms")
    expect(value(page, "used")).to_have_text("18.8\u00a0%")
    expect(value(page, "hits")).to_have_text("25.0\u00a0%")
    assert page.locator("#timeline rect.decode").count() == 40
    assert page.locator("#timeline rect.prefill").count() == 4
    assert page.locator("#timeline .preempted").count() == 1
    # Stacked bars: prefill above decode; 128 tokens are 32 times as tall as 4.
    box = "e => [Number(e.getAttribute('y')), Number(e.getAttribute('height'))]"
    (y, low), (top, high) = (
        page.locator(f"#timeline rect.{name}").first.evaluate(box) for name in ("decode", "prefill")
    )
    assert top + high == pytest.approx(y, abs=0.01) and high == pytest.approx(32 * low, rel=0.01)
    expect(page.locator("#map-summary")).to_have_text(
        "64 pages: 12 in use (2 shared, by at most 3), 20 cached, 32 free."
    )
    expect(page.locator("#sequences tbody tr")).to_have_text("cmpl-1running10074")
    assert page.locator("#percentiles tbody tr").first.inner_text().split("\t")[1] == "3"


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


def test_engine_page_merges_overlapping_states(visit: Any, fake: Fake) -> None:
    fake.state = state()
    page = open_engine(visit)
    later = state(50)
    later["batches"] = [
        step | {"at": step["at"] + 5e-5} for step in later["batches"][20:]
    ]  # the clocks of two states differ slightly
    fake.state = later | {"running": 9, "tokens_per_second": 555.0}
    page.clock.run_for(1000)
    expect(value(page, "running")).to_have_text("9")
    expect(value(page, "speed")).to_have_text("555")
    assert page.locator("#timeline rect.decode").count() == 50


def test_engine_page_stops_polling_when_hidden_or_paused(visit: Any, fake: Fake) -> None:
    fake.state = state()
    page = open_engine(visit)

    def hide(hidden: bool) -> None:
        page.evaluate(
            """(value) => {
              Object.defineProperty(document, 'hidden', { value, configurable: true });
              document.dispatchEvent(new Event('visibilitychange'));
            }""",
            hidden,
        )

    def polls_in_a_minute() -> int:
        before = fake.polls
        page.clock.run_for(60_000)
        page.evaluate("fetch('/v1/models').then((r) => r.text())")  # earlier requests have arrived
        return fake.polls - before

    expect(page.locator("#live")).to_contain_text("live")
    hide(True)
    assert polls_in_a_minute() == 0
    fake.state = state(running=6)
    hide(False)
    expect(value(page, "running")).to_have_text("6")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#live")).to_have_text("paused")
    assert polls_in_a_minute() == 0
    fake.state = state(running=7)
    page.get_by_role("button", name="Resume").click()
    expect(value(page, "running")).to_have_text("7")


def test_tooltip_by_pointer_and_keyboard(visit: Any, fake: Fake) -> None:
    fake.state = state()
    page = open_engine(visit)
    tip = page.locator("#tooltip")
    box = page.locator("#timeline rect.prefill").nth(2).bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 5)
    expect(tip).to_contain_text("128 tokens")
    expect(tip).to_contain_text("12.0\u00a0ms")
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
    expect(tip).to_contain_text("page 0")
    expect(tip).to_contain_text("used by 3 sequences")
    canvas.focus()
    page.keyboard.press("End")
    expect(tip).to_contain_text("page 63")
    expect(tip).to_contain_text("free")


def test_charts_have_text_labels(visit: Any, fake: Fake) -> None:
    fake.state = state()
    page = open_engine(visit)
    assert page.locator("#timeline svg").get_attribute("aria-label") == (
        "The latest 40 steps: 512 prompt tokens, 160 output tokens, 1 preemption; "
        "median duration 11.0\u00a0ms. Use the arrow keys to move between steps."
    )
    assert page.locator("#ttft svg").get_attribute("aria-label") == (
        "Time to first token, 3 samples: 50 % within 200\u00a0ms, 95 % within 290\u00a0ms, 99 % within 298\u00a0ms."
    )
    assert "Now 4 running and 1 waiting" in page.locator("#load svg").get_attribute("aria-label")
    page.locator("summary").click()
    assert page.locator("#steps tbody tr").count() == 12
    drawings = page.locator("svg, canvas")
    assert all(drawings.nth(i).get_attribute("aria-label") for i in range(drawings.count()))


def test_engine_page_shows_error_and_recovers(visit: Any, fake: Fake) -> None:
    fake.state = state()
    page = open_engine(visit)
    page.expected = ("status of 500",)
    fake.fail = (500, {"error": {"message": EVIL}}, {})
    page.clock.run_for(1000)
    error = page.locator("#error")
    expect(error).to_have_text(f"The server failed (500). Message: {EVIL}")
    expect(page.locator("#live")).to_have_text("retrying")
    expect(value(page, "running")).to_have_text("4")  # the last known value stays, grayed out
    fake.fail, fake.state = None, state(running=8, model=EVIL, sequences=[{"id": EVIL, "state": EVIL}])
    page.clock.run_for(3000)
    expect(value(page, "running")).to_have_text("8")
    expect(error).to_be_hidden()
    expect(page.locator("#sequences td.id")).to_have_text(EVIL)
    assert page.title() == "Whorl: engine"


def test_engine_page_uses_the_api_key_of_the_tab(visit: Any, fake: Fake) -> None:
    fake.state, fake.key = state(), "wh-1"
    page = open_engine(visit)
    page.expected = ("status of 401",)
    expect(page.locator("#error")).to_contain_text("Enter it under Settings on the chat page")
    page.evaluate("sessionStorage.setItem('whorl.key', JSON.stringify('wh-1'))")
    page.clock.run_for(3000)
    expect(value(page, "running")).to_have_text("4")


@pytest.mark.parametrize("empty", [False, True])
def test_engine_page_fits_a_phone(visit: Any, fake: Fake, empty: bool) -> None:
    fake.state = {} if empty else state(400, model="a-model-with-a-long-name/" * 4)
    page = open_engine(visit, **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    tick = page.locator("#timeline svg text").first
    assert tick.evaluate("e => e.getBoundingClientRect().height") >= 11
    if empty:
        expect(page.locator("#none")).to_be_visible()
        expect(value(page, "ttft")).to_have_text("–")
        return
    box = page.locator("#timeline rect.prefill").last.bounding_box()
    page.touchscreen.tap(box["x"] + 1, box["y"] + 3)
    expect(page.locator("#tooltip")).to_contain_text("128 tokens")
    tip = page.locator("#tooltip").bounding_box()
    assert tip["x"] >= 0 and tip["x"] + tip["width"] <= 360
