"""A server with a search index: sources in the prompt, in the response and in its stream, under the token budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.serve.live_server import Running, make_state, running

from whorl.loop.search.indexer import index_url
from whorl.loop.search.reader import SearchReader
from whorl.loop.search.settings import SearchSettings, save_settings
from whorl.search.documents import Passage, SearchDocument
from whorl.search.index import open_index
from whorl.search.numbered_sources import SourcePassage, with_sources
from whorl.serve.api.sources import SourceSearch

QUESTION = 'Who plays the "oboe"?'
TEXTS = {
    "ada.md": "Ada plays the oboe.",
    "bela.md": "Bela plays the lute, not the oboe." + " He paints." * 20,
}


def write(store: Path, texts: dict[str, str], generation: int = 0) -> None:
    settings = SearchSettings(topic="notes", generation=generation)
    index = open_index(index_url(store, "notes", settings), writable=True)
    index.write([SearchDocument(name, 7, [Passage(0, text)], name) for name, text in texts.items()])
    index.close()
    save_settings(store, "notes", settings)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write(folder, TEXTS)
    return folder


@pytest.fixture(scope="module")
def searching(store: Path) -> Iterator[Running]:
    state = make_state()
    state.sources = SourceSearch(SearchReader(store, "notes"), budget=300)
    with running(state) as server:
        yield server


def ask(server: Running, path: str = "chat/completions", **fields: Any) -> Any:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "seed": 1, "temperature": 0.5}
    if path == "chat/completions":
        body["messages"] = [{"role": "user", "content": QUESTION}]
    return server.post(f"/v1/{path}", json={**body, **fields})


def prompt_of(sources: list[dict[str, Any]], question: str = QUESTION) -> str:
    return with_sources(question, [SourcePassage(one["text"], one["title"]) for one in sources])


def test_answer_has_the_sources_of_its_prompt(searching: Running) -> None:
    answer = ask(searching).json()
    first, second = answer["sources"]
    assert first == {"number": 1, "id": "ada.md", "version": 7, "title": "ada.md", "text": TEXTS["ada.md"], "start": 0,
                     "score": first["score"]}  # fmt: skip
    assert second["number"] == 2 and TEXTS["bela.md"].startswith(second["text"])
    same = ask(
        searching, sources=0, messages=[{"role": "user", "content": prompt_of([first, second])}]
    ).json()
    assert "sources" not in same and same["choices"] == answer["choices"]
    assert same["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_budget_bounds_the_tokens_of_sources(searching: Running) -> None:
    search, plain = searching.api.sources, ask(searching, sources=0).json()["usage"]["prompt_tokens"]
    assert search is not None
    for budget, n in ((300, 2), (90, 1), (16, 0)):
        search.budget = budget
        answer = ask(searching).json()
        assert answer["usage"]["prompt_tokens"] - plain <= budget + 2 and len(answer.get("sources", [])) == n
    search.budget = 300
    long = [{"role": "user", "content": "x " * 440}, {"role": "user", "content": QUESTION}]
    answer = ask(searching, messages=long, max_tokens=32).json()  # a context of 1,024 has little room left
    assert len(answer.get("sources", [])) <= 1 and answer["usage"]["prompt_tokens"] <= 992


def test_question_is_the_last_message_of_the_user(searching: Running) -> None:
    talk = [
        {"role": "user", "content": "paints"}, {"role": "assistant", "content": "Bela."},
        {"role": "user", "content": [{"type": "text", "text": "lute"}]}, {"role": "assistant", "content": "lute"},
    ]  # fmt: skip
    sources = ask(searching, messages=talk).json()["sources"]
    assert [one["id"] for one in sources] == ["bela.md"]
    assert "sources" not in ask(searching, messages=[{"role": "system", "content": "oboe"}]).json()
    assert "sources" not in ask(searching, messages=[{"role": "user", "content": "zzzz"}]).json()


def test_completion_has_sources_too(searching: Running) -> None:
    answer = ask(searching, "completions", prompt="oboe", sources=1).json()
    assert [one["id"] for one in answer["sources"]] == ["ada.md"]
    same = ask(searching, "completions", prompt=prompt_of(answer["sources"], "oboe"), sources=0).json()
    assert same["choices"] == answer["choices"]
    assert "sources" not in ask(searching, "completions", prompt=["oboe", "lute"]).json()
    assert "sources" not in ask(searching, "completions", prompt=[100, 101]).json()


def test_response_api_has_sources_too(searching: Running) -> None:
    answer = searching.post("/v1/responses", json={"model": "tiny", "input": QUESTION, "sources": 1}).json()
    assert [one["id"] for one in answer["sources"]] == ["ada.md"]


def test_first_chunk_of_a_stream_has_the_sources(searching: Running) -> None:
    lines = ask(searching, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [one["id"] for one in chunks[0]["sources"]] == ["ada.md", "bela.md"]
    assert not any("sources" in chunk for chunk in chunks[1:])


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"messages": [{"role": "system", "content": "x"}]}, "only for a prompt"),
        ("completions", {"prompt": [[100]]}, "only for a prompt"),
        ("chat/completions", {"sources": 21}, "less than or equal to 20"),
    ],
)
def test_impossible_sources_are_rejected(
    searching: Running, path: str, fields: dict[str, Any], message: str
) -> None:
    answer = ask(searching, path, **{"sources": 2, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "sources"
    assert message in answer.json()["error"]["message"]


def test_sources_need_an_index(server: Running) -> None:
    answer = ask(server, sources=2)
    assert answer.status_code == 400 and "whorl serve --search" in answer.json()["error"]["message"]
    assert ask(server, sources=0).status_code == 200


def test_index_that_fails_is_named(searching: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("connection refused")

    monkeypatch.setattr(searching.api.sources.reader, "search", fail)
    answer = ask(searching)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "search_failed"
    assert "connection refused" in answer.json()["error"]["message"]
    assert ask(searching, sources=0).status_code == 200


def test_changed_and_rebuilt_index_is_read_at_once(searching: Running, store: Path) -> None:
    write(store, {"cara.md": "Cara plays the theremin."})
    assert [
        one["id"]
        for one in ask(searching, messages=[{"role": "user", "content": "theremin"}]).json()["sources"]
    ] == ["cara.md"]
    write(store, {**TEXTS, "dora.md": "Dora plays the tuba."}, generation=1)
    found = [
        ask(searching, messages=[{"role": "user", "content": word}]).json() for word in ("tuba", "theremin")
    ]
    assert found[0]["sources"][0]["id"] == "dora.md" and "sources" not in found[1]
