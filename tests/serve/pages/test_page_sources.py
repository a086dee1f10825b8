"""Citations of the chat page: links to the sources below a response."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.serve.browser_pages import chat, expect, last
from tests.support.serve.fake_server import Fake, Piece

pytestmark = pytest.mark.browser
SOURCES = [
    {"number": 1, "id": "notes/ada.md", "title": "Ada", "text": "Ada plays the oboe."},
    {"number": 2, "id": "notes/<b>.md", "title": "", "text": "<b>Bela</b> plays the lute."},
]


def test_citation_opens_its_source(page: Any, fake: Fake) -> None:
    fake.sources = SOURCES
    tokens = ("The lute [", "2", "], not the oboe[1][", Piece(b"3"), "].\n```\na[1]\n```\n")
    chat(page, fake, "What does Bela play?", *tokens)
    whole = "".join(t if isinstance(t, str) else "3" for t in tokens)
    links, entries = last(page).locator("a.cite"), page.locator(".sources details")
    assert links.all_text_contents() == ["[2]", "[1]"]  # none of an unknown source, none in code
    assert page.locator(".sources summary").all_text_contents() == ["[1] Ada", "[2] notes/<b>.md"]
    assert last(page).evaluate("e => e.textContent").replace("Copy code", "") == whole
    expect(page.locator(".sources p").first).to_be_hidden()
    links.first.focus()
    page.keyboard.press("Enter")
    expect(entries.nth(1).locator("p")).to_have_text("<b>Bela</b> plays the lute.")
    expect(entries.nth(1).locator("p")).to_be_visible()
    assert page.evaluate("document.activeElement.textContent") == "[2] notes/<b>.md"
    assert entries.nth(0).get_attribute("open") is None
    assert page.locator(".text .t").count() >= len(tokens)  # tokens keep their probabilities


def test_citations_survive_a_reload(page: Any, fake: Fake) -> None:
    fake.sources = SOURCES
    chat(page, fake, "And Ada?", "The oboe [1].")
    page.reload()
    expect(last(page)).to_have_text("The oboe [1].")
    last(page).locator("a.cite").click()
    expect(page.locator(".sources p").first).to_have_text("Ada plays the oboe.")
    page.locator(".modes span", has_text="Complete").click()
    page.fill("#text", "Ada plays")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#completion-pane .sources summary")).to_have_text(["[1] Ada", "[2] notes/<b>.md"])
    page.locator(".modes span", has_text="Chat").click()
    fake.sources = []
    chat(page, fake, "Thanks", "None [1].")
    assert (
        last(page).locator("a.cite").count() == 0
        and page.locator(".message").last.locator("details").count() == 0
    )
