"""The page /search and its route, over a real server with an index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.serve.browser_pages import expect
from tests.support.serve.live_server import Running, make_state, running

from whorl.loop.search.reader import SearchReader
from whorl.loop.search.settings import SearchSettings, save_settings
from whorl.search.documents import Passage, SearchDocument
from whorl.search.index import open_index
from whorl.serve.api.sources import SourceSearch

pytestmark = pytest.mark.browser
DOCUMENTS = [
    ("dates.md", "😀 How to parse a date", {"language": "en", "year": 2001}),
    ("zeit.md", "A date as a German parses it", {"language": "de", "year": 2005}),
    ("html.md", "<b>markup</b> stays a text", {"language": "en", "year": 2007}),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    store: Path = tmp_path_factory.mktemp("store")
    save_settings(store, "notes", SearchSettings(topic="notes"))
    with open_index(store / "search" / "notes" / "0" / "index", writable=True) as index:
        index.write(
            [SearchDocument(i, n, [Passage(0, text)], "", f, "d") for n, (i, text, f) in enumerate(DOCUMENTS)]
        )
    state = make_state()
    state.sources = SourceSearch(SearchReader(store, "notes"), 256)
    with running(state) as server:
        yield server


def test_page_searches_filters_and_shows_the_analysis(browser: Any, served: Running) -> None:
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(served.url)
    page.click("#search-page")
    expect(page.locator("#total")).to_have_text("3 documents in notes")
    page.fill("#query", "parsing dates")
    page.keyboard.press("Enter")
    expect(page.locator("#total")).to_have_text("2 documents in notes")
    assert page.locator(".card mark").all_text_contents() == ["parse", "date", "date", "parses"]
    page.click("summary")
    expect(page.locator("#steps tr", has_text="stem")).to_have_text("stempars date")
    page.select_option("#facet", "language")
    page.click("#facets button:has-text('de (1)')")
    expect(page.locator(".card .prompt")).to_have_text(["zeit.md"])
    page.check("#explain")
    expect(page.locator(".card td", has_text="pars")).to_have_count(1)
    page.reload()
    expect(page.locator(".card .prompt")).to_have_text(["zeit.md"])
    page.click("#filters button")
    expect(page.locator(".card")).to_have_count(2)
    page.fill("#query", "markup")
    page.keyboard.press("Enter")
    expect(page.locator(".card .text")).to_have_text(["<b>markup</b> stays a text"])
    assert said == []
    page.close()


def test_route_names_what_is_wrong(served: Running) -> None:
    def ask(query: str, **options: Any) -> httpx.Response:
        return httpx.post(f"{served.url}/v1/search", json={"query": query, **options})

    found = ask("date", facets=["language"], filters=["year=..2003"]).json()
    assert [hit["id"] for hit in found["hits"]] == ["dates.md"] and found["facets"] == {"language": {"en": 1}}
    assert found["fields"] == ["language", "year"]
    for options, word in (
        ({"filters": ["langage=en"]}, "language"), ({"filters": ["year"]}, "year=2001..2005"), ({"k": 1000}, "100"),
    ):  # fmt: skip
        response = ask("date", **options)
        assert response.status_code == 400 and word in response.json()["error"]["message"], response.text
    for text in ("date " * 10_000, '"unbalanced date -', "the a of"):
        assert ask(text).status_code == 200
