"""The items of an evaluation page in Chromium: filters, virtual list, chosen item, escaping, phone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.report.evaluation_example import write_evaluation
from tests.support.serve.browser_pages import expect, expect_fits

from whorl.report.evaluation import write_page

pytestmark = pytest.mark.browser
N = 2000


class ItemsPage:
    """An open page, with its console messages and requests."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.page = browser.new_context(**context).new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]")
        self.url = path.as_uri()

    def count(self) -> int:
        return int(self.page.inner_text("#count").split(" of ")[0].replace(",", ""))

    def first_rows(self) -> list[str]:
        rows = self.page.locator(".row:not([hidden])")
        return sorted(rows.nth(i).locator(".id").inner_text() for i in range(rows.count()))

    def close(self) -> None:
        assert self.messages == []
        assert [url for url in self.requests if not url.startswith("data:")] == [self.url]
        self.page.context.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("evaluations")
    return [write_evaluation(root / name, name, N, seed=seed) for seed, name in enumerate(("small", "large"))]


@pytest.fixture
def items(browser: Any, folders: list[Path], tmp_path: Path) -> Iterator[ItemsPage]:
    opened = ItemsPage(browser, write_page(folders, tmp_path / "page.html"))
    yield opened
    opened.close()


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "items-words.jsonl").open()]


def expected(folders: list[Path], keep: Callable[[dict[str, Any], dict[str, Any]], bool]) -> int:
    return sum(keep(a, b) for a, b in zip(*map(records, folders), strict=True))


def test_compare_and_outcome_filters_count_as_the_data(items: ItemsPage, folders: list[Path]) -> None:
    assert items.count() == N
    items.page.select_option("#compare", label="A right, B wrong")
    bad = ("wrong", "not_found", "truncated", "refused", "error")
    right_wrong = expected(folders, lambda a, b: a["outcome"] == "right" and b["outcome"] in bad)
    assert items.count() == right_wrong > 100
    items.page.select_option("#outcome-b", "4")
    refused = expected(folders, lambda a, b: a["outcome"] == "right" and b["outcome"] == "refused")
    assert items.count() == refused > 0
    items.page.select_option("#compare", label="different outcomes")
    items.page.select_option("#outcome-b", "")
    items.page.select_option("#group", label="gamma")
    differ = expected(folders, lambda a, b: a["outcome"] != b["outcome"] and a["group"] == "gamma")
    assert items.count() == differ > 0


def test_text_search_finds_prompts_answers_and_reasons(items: ItemsPage, folders: list[Path]) -> None:
    items.page.fill("#text", "QUESTION 1234:")
    assert items.count() == 1 and items.first_rows() == ["item-01234"]
    items.page.fill("#text", "expected lamp")
    found = expected(folders, lambda a, b: "expected lamp" in (a["reason"], b["reason"]))
    assert items.count() == found > 0
    items.page.fill("#text", "no such text")
    assert items.count() == 0 and items.page.inner_text("#item") == ""


def test_list_holds_only_the_rows_in_view(items: ItemsPage) -> None:
    page = items.page
    assert page.locator(".row").count() < 40
    page.locator("#list").evaluate(f"e => {{ e.scrollTop = 34 * {N - 400} }}")
    page.wait_for_selector(f'.row[data-place="{N - 400}"]')
    assert page.locator(".row").count() < 60
    assert f"item-{N - 400:05d}" in items.first_rows()


def test_chosen_item_shows_both_models(items: ItemsPage, folders: list[Path]) -> None:
    page = items.page
    page.locator("#list").focus()
    for key in ("End", "Home", "ArrowDown", "PageDown", "ArrowUp"):
        page.keyboard.press(key)
    chosen = page.locator('.row[aria-selected="true"]')
    place = int(chosen.get_attribute("data-place"))
    a, b = (records(folder)[place] for folder in folders)
    expect(page.locator("#item h3")).to_contain_text(a["item"])
    sides = page.locator("#item .side").all()
    assert page.inner_text("#item .asked") == a["prompt"]
    for side, item, name in zip(sides, (a, b), ("small", "large"), strict=True):
        assert name in side.inner_text() and item["outcome"].replace("_", " ") in side.inner_text()
        assert side.locator(".t").count() == len(item["details"]["tokens"])
        assert side.locator("table tbody tr").count() == 4
    heat = [float(t.evaluate("e => e.style.getPropertyValue('--s')")) for t in sides[0].locator(".t").all()]
    surprise = [-log_prob for _, log_prob in a["details"]["tokens"]]
    assert sorted(heat) == [h for _, h in sorted(zip(surprise, heat, strict=True))]
    sides[0].locator(".t").first.hover()
    assert "%" in page.inner_text("#tip")


def test_slash_focuses_the_search(items: ItemsPage) -> None:
    items.page.locator("#list").focus()
    items.page.keyboard.press("/")
    items.page.keyboard.type("1234:")
    assert items.count() == 1


def test_one_model_has_no_second_side(browser: Any, folders: list[Path], tmp_path: Path) -> None:
    opened = ItemsPage(browser, write_page(folders[0], tmp_path / "page.html"))
    assert opened.page.locator("#item .side").count() == 1
    for name in ("#model-b", "#compare", "#outcome-b", "#task"):
        assert not opened.page.locator(name).is_visible()
    opened.close()


def test_markup_in_answers_is_shown_as_text(browser: Any, tmp_path: Path) -> None:
    evil = "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"

    def spoil(number: int, item: dict[str, Any]) -> dict[str, Any]:
        steps = [{"role": "assistant", "tool": evil, "content": evil, "path": evil}]
        details = {
            "tokens": [[evil, -1.0]], "choices": [{evil: evil}], "trajectory": steps, evil: {evil: evil},
        }  # fmt: skip
        texts = dict.fromkeys(("prompt", "gold", "reason", "group"), evil)
        return item | texts | {"item": f"{evil}{number}", "answers": [evil], "details": details}

    folder = write_evaluation(tmp_path / "a", evil, 3, change=spoil)
    opened = ItemsPage(browser, write_page(folder, tmp_path / "page.html", title="safe"))
    page = opened.page
    page.locator(".t").first.hover()
    page.locator("#item summary").click()
    assert page.title() == "safe" and page.locator("img").count() == 0
    assert page.inner_text("#item").count(evil) >= 8
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_of_items_fits_a_phone(browser: Any, folders: list[Path], tmp_path: Path, scheme: str) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    opened = ItemsPage(browser, write_page(folders, tmp_path / "page.html"), color_scheme=scheme, **phone)
    expect_fits(opened.page, 390)
    opened.page.locator(".row").nth(2).tap()
    assert opened.page.locator('.row[aria-selected="true"]').get_attribute("data-place") == "2"
    opened.close()


def test_search_before_the_texts_are_read_waits(browser: Any, folders: list[Path], tmp_path: Path) -> None:
    page = browser.new_context().new_page()
    page.add_init_script("window.requestIdleCallback = (f) => setTimeout(f, 30)")
    page.goto(write_page(folders, tmp_path / "page.html").as_uri())
    expect(page.locator("#count")).to_contain_text("of 2,000 items")
    page.fill("#text", "question 1999:")
    assert page.inner_text("#count") == "Reading the texts…"
    expect(page.locator("#count")).to_contain_text("1 of 2,000 items")
    page.context.close()


def test_trajectories_of_all_runs_are_shown(browser: Any, tmp_path: Path) -> None:
    def act(number: int, item: dict[str, Any]) -> dict[str, Any]:
        steps = [
            {"role": "model", "tool": "python", "content": "print(1)"},
            {"role": "tool", "content": "1", "seconds": 0.1},
        ]
        other = {
            "ended": "steps",
            "tests": "failed: no file",
            "trajectory": [{"role": "model", "content": "second run"}],
        }
        return item | {"details": {"trajectory": steps, "other_runs": [other]}}

    opened = ItemsPage(
        browser, write_page(write_evaluation(tmp_path / "a", "a", 2, change=act), tmp_path / "page.html")
    )
    item = opened.page.locator("#item")
    assert "Trajectory, 2 steps" in item.inner_text() and "print(1)" in item.inner_text()
    item.locator("summary").first.click()
    expect(item).to_contain_text("Run 2: steps, tests failed: no file")
    assert item.locator("details .steps").inner_text().endswith("second run")
    opened.close()
