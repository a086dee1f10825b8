"""The page in Chromium: empty console, no requests, tooltips by mouse, keyboard and touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.report.report_example import example
from tests.support.serve.browser_pages import expect_fits

from whorl.corpus.deduplication.settings import MinHashConfig
from whorl.corpus.provenance.figures import SourceCount
from whorl.recipes.steps.corpus_page import source_blocks, threshold_curve
from whorl.report import ReportData, render
from whorl.report.agents import training_blocks
from whorl.report.blocks import Column, Curve, Folded, Image, Line, StepReport, Table
from whorl.report.training import parallel_blocks

pytestmark = pytest.mark.browser

# Contrast of a text with its painted background (WCAG 2.1, relative luminance).
CONTRAST = """element => {
  const scale = (text, i) => text.startsWith("color(srgb") && i < 3 ? 255 : 1;  // a mixed colour
  const numbers = (text) => text.match(/[\\d.]+/g).map((number, i) => scale(text, i) * Number(number));
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => sum + weight * linear(rgb[i] / 255), 0);
  let background = element;
  while (numbers(getComputedStyle(background).backgroundColor)[3] === 0) background = background.parentElement;
  const colour = getComputedStyle(element).color;
  const both = [colour, getComputedStyle(background).backgroundColor];
  const [a, b] = both.map((c) => light(numbers(c))).sort((x, y) => y - x);
  return { colour, contrast: (a + 0.05) / (b + 0.05) };
}"""


PIXEL: dict[str, Any] = {
    "media_type": "image/gif",
    "data": "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7",
    "alt": "one pixel",
}


class OpenPage:
    """An open page with its console messages and requests, which `close` checks."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.path, self.page = path, browser.new_context(**context).new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def tip(self) -> str:
        tip = self.page.locator("#tip")
        return tip.inner_text() if tip.evaluate("e => getComputedStyle(e).visibility") == "visible" else ""

    def close(self) -> None:
        assert self.messages == []
        assert [url for url in self.requests if not url.startswith("data:")] == [self.path.as_uri()]
        self.page.context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(example(), tmp_path_factory.mktemp("report") / "report.html")


def test_hover_shows_token_probabilities(browser: Any, report: Path) -> None:
    opened = OpenPage(browser, report)
    token = opened.page.locator(".t").nth(5)
    assert opened.tip() == ""
    token.hover()
    chance = 100 * float(token.get_attribute("data-p"))
    assert f"_items {chance:.1f} %" in opened.tip() and "·other" in opened.tip()
    opened.page.locator("h1").hover()
    assert opened.tip() == ""
    opened.close()


def test_hover_shows_curve_values(browser: Any, report: Path) -> None:
    opened = OpenPage(browser, report)
    opened.page.locator(".chart").first.hover()
    assert opened.tip().startswith("step ") and "smoothed" in opened.tip()
    opened.close()


def test_corpus_curves_and_samples_open(browser: Any, tmp_path: Path) -> None:
    sources = [SourceCount(name, 4, 4000, 3, size) for name, size in (("a/", 900), ("b/", 300), ("c/", 0))]
    folded = Folded(text="a/x.html", lines=["3f2a", "the beginning"])
    samples = Table(section="Corpus", title="Samples", columns=[Column(name="Document")], rows=[[folded]])
    blocks = [samples, threshold_curve(MinHashConfig(similarity=0.8)), *source_blocks(sources)]
    data = ReportData(reports=[("curate", StepReport(blocks=blocks))])
    opened = OpenPage(browser, render(data, tmp_path / "report.html"))
    curve, lorenz = opened.page.locator(".chart").all()
    curve.hover()
    assert opened.tip().startswith("Jaccard similarity") and "compared" in opened.tip()
    lorenz.hover()
    assert "kept bytes" in opened.tip()
    assert "Gini coefficient 0.500" in opened.page.inner_text("body")
    sample = opened.page.get_by_text("the beginning")
    assert not sample.is_visible()
    opened.page.get_by_text("a/x.html").click()
    assert sample.is_visible()
    opened.close()


def test_ranks_of_a_run_are_shown(browser: Any, tmp_path: Path) -> None:
    line = [(0.0, ""), (0.4, "tp"), *[(1.0, "pp")] * 22]
    ranks = [{"place": place, "timeline": line} for place in ("tp 0", "tp 1")]
    totals = {"tp all_gather": (8, 65_536)}
    measured = {"ranks": ranks, "seconds": 0.21, "totals": totals}
    predicted = {"holds": [["0-1", "8", "1,024"]] * 2, "seconds": 0.2, "totals": totals}
    data = ReportData(reports=[("pretrain", StepReport(blocks=[*parallel_blocks(measured, predicted)]))])
    opened = OpenPage(browser, render(data, tmp_path / "report.html"), viewport={"width": 390, "height": 800})
    tables = opened.page.locator("table")
    assert tables.nth(0).inner_text().count("1,024") == 2
    assert tables.nth(1).locator("td").count() == 48 and "0.4" in tables.nth(1).inner_text()
    assert "65.5" in tables.nth(2).inner_text() and "tp all_gather" in tables.nth(2).inner_text()
    expect_fits(opened.page, 390)
    opened.close()


def test_keyboard_moves_between_tokens(browser: Any, report: Path) -> None:
    opened = OpenPage(browser, report)
    tokens = opened.page.locator(".t")
    # One Tab stop; arrow keys move within the sample.
    assert opened.page.locator('.t[tabindex="0"]').count() == 1
    tokens.first.focus()
    assert "····" in opened.tip()
    for key, text in (("ArrowRight", "if"), ("ArrowRight", "·not"), ("ArrowLeft", "if"), ("End", "⏎⏎")):
        opened.page.keyboard.press(key)
        assert opened.tip().startswith(text)
    opened.page.keyboard.press("Escape")
    assert opened.tip() == ""
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_phone(browser: Any, report: Path, scheme: str) -> None:
    phone = {"width": 390, "height": 844}
    opened = OpenPage(browser, report, viewport=phone, has_touch=True, is_mobile=True, color_scheme=scheme)
    page = opened.page
    expect_fits(page, 390)
    assert page.locator(".chart > svg.narrow").first.is_visible()
    assert not page.locator(".chart > svg.wide").first.is_visible()
    tick = page.locator(".chart > svg.narrow .tick").first
    assert tick.evaluate("e => e.getBoundingClientRect().height") >= 11
    page.locator(".t").nth(5).tap()
    assert opened.tip().startswith("_items")
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_answers_are_side_by_side_or_stacked(browser: Any, report: Path, scheme: str) -> None:
    opened = OpenPage(browser, report, color_scheme=scheme)
    page = opened.page
    pair = page.get_by_role("figure", name="Task 1")
    before, after = pair.locator(".side").all()
    assert before.bounding_box()["y"] == after.bounding_box()["y"]
    assert before.bounding_box()["x"] < after.bounding_box()["x"]
    # The verdict is given in words; its colour has enough contrast.
    assert "not passed syntax" in before.inner_text() and "after: passed" in after.inner_text()
    colours = [side.locator(".verdict").evaluate(CONTRAST) for side in (before, after)]
    assert colours[0]["colour"] != colours[1]["colour"]
    assert all(colour["contrast"] >= 4.5 for colour in colours), colours
    page.locator("#after_pretraining .chart").nth(1).hover()
    assert opened.tip().startswith("step ") and "smoothed" in opened.tip() and "%" in opened.tip()
    page.locator("h1").hover()
    page.set_viewport_size({"width": 360, "height": 800})
    expect_fits(page, 360)
    assert after.bounding_box()["y"] >= before.bounding_box()["y"] + before.bounding_box()["height"]
    assert after.bounding_box()["x"] == before.bounding_box()["x"]
    opened.close()


def test_sections_stay_in_view_beside_the_page(browser: Any, report: Path) -> None:
    opened = OpenPage(browser, report, viewport={"width": 1440, "height": 700})
    opened.page.evaluate("scrollTo({ top: 3000, behavior: 'instant' })")
    contents, main = (opened.page.locator(name).bounding_box() for name in ("nav", "main"))
    assert (
        contents["y"] >= 0
        and contents["x"] + contents["width"] <= main["x"]
        and main["x"] + main["width"] <= 1440
    )
    opened.close()


def test_page_is_complete_without_script(browser: Any, report: Path) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(report.as_uri())
    assert page.locator(".chart > svg.wide polyline.main").first.is_visible()
    assert page.locator(".t").nth(5).get_attribute("title").endswith(" %")
    page.context.close()


def test_markup_in_data_is_not_executed(browser: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='ran'\"><script>document.title='ran'</script>"
    tokens = [{"text": evil, "probability": 0.5, "alternatives": [(evil, 0.5)]}]
    blocks = [{"kind": "sample", "section": evil, "prompt": evil, "tokens": tokens}]
    data = ReportData.model_validate({"title": evil, "about": evil, "reports": [(evil, {"blocks": blocks})]})
    opened = OpenPage(browser, render(data, tmp_path / "evil.html"))
    opened.page.locator(".t").first.hover()
    assert evil.replace(" ", "·") in opened.tip()
    assert opened.page.title() == evil
    opened.close()


def test_empty_report_opens(browser: Any, tmp_path: Path) -> None:
    opened = OpenPage(browser, render(ReportData(), tmp_path / "empty.html"))
    assert opened.page.locator(".missing").count() == 1
    opened.close()


def test_curve_page_opens(browser: Any, tmp_path: Path) -> None:
    lines = [Line(name=f"seed {s}", x=[0.0, 50.0, 100.0], y=[20.0 + s, 200.0, 480.0]) for s in range(3)]
    title, out = "PPO on <CartPole>", tmp_path / "curve.html"
    blocks = StepReport(blocks=[Curve(section=title, title="Return", lines=lines, x_label="steps")])
    opened = OpenPage(browser, render(ReportData(title=title, reports=[("ppo", blocks)]), out))
    assert opened.page.title() == opened.page.locator("h1").inner_text() == title
    assert opened.page.locator("svg.wide polyline").count() == 3
    box = opened.page.locator("svg.wide").first.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "seed 1" in opened.tip() and "200" in opened.tip()
    opened.close()


def test_agents_page_opens(browser: Any, tmp_path: Path) -> None:
    curves = [
        {"seed": s, "return": [[0, 1 + s], [90, 5 * s]], "loss": [[0, 2], [90, 3]], "lag": []} for s in (0, 1)
    ]
    grid = {"values": [[0.1, 0.9], [0.3, None]], "arrows": [["→", "↓"], ["→", "G"]]}
    result = {"steps": 100, "curves": curves, "value_map": grid}
    blocks = [*training_blocks("A <grid>", [("method", "dqn")], result, None), Image(**PIXEL)]
    opened = OpenPage(
        browser, render(ReportData(reports=[("dqn", StepReport(blocks=blocks))]), tmp_path / "a.html")
    )
    page = opened.page
    returns, loss = page.locator(".chart").all()
    assert returns.locator("svg.wide .band").count() == 1
    returns.hover()
    assert "interquartile mean" in opened.tip() and " to " in opened.tip()
    loss.hover()
    assert "seed 1" in opened.tip()
    cells = page.locator(".heatmap td").all()
    assert [cell.inner_text().split()[0] for cell in cells] == ["→", "↓", "→", "G"]
    colours = [cell.evaluate(CONTRAST) for cell in cells[:3]]
    assert all(colour["contrast"] >= 4.5 for colour in colours), colours
    assert page.get_by_alt_text("one pixel").evaluate("e => e.naturalWidth") == 1
    page.set_viewport_size({"width": 360, "height": 800})
    expect_fits(page, 360)
    opened.close()
