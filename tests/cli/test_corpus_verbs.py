"""`whorl corpus`: the verbs make the artifacts of a corpus, and explain them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.support.cli import refuse as refuse_in
from tests.support.cli import succeed as succeed_in

from whorl.store import Store


def succeed(*words: object) -> str:
    return succeed_in(Path.cwd(), *words).stdout


def refuse(*words: object, code: int = 2) -> str:
    return refuse_in(Path.cwd(), *words, code=code)


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = random.Random(0)
    (tmp_path / "pages").mkdir()
    for i in range(40):
        words = ("".join(rng.choices("abcdefgh", k=5)) for _ in range(150))
        (tmp_path / "pages" / f"{i:02d}.txt").write_text(" ".join(words))
    (tmp_path / "pages" / "short.txt").write_text("little")
    near = (tmp_path / "pages" / "00.txt").read_text() + " end"
    (tmp_path / "pages" / "near.txt").write_text(near)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pages"


def test_verbs_make_and_explain_a_corpus(pages: Path) -> None:
    succeed("corpus", "ingest", "pages")
    store = Store()
    assert store.open("corpus/ingest").summary["documents"] == 42
    assert "not curated yet" in succeed("corpus", "stats")
    assert "not curated" in succeed("corpus", "why", "short.txt")
    succeed("corpus", "filter", "--set", "validation_bytes=2000")
    first = store.open("corpus/curate")
    assert first.config["validation_bytes"] == 2000 and "near_duplicate" not in first.summary["dropped"]
    succeed("corpus", "dedup", "--similarity", "0.8")
    second = store.open("corpus/curate")
    # The settings of `filter` remain.
    assert second.config["validation_bytes"] == 2000
    assert second.summary["dropped"]["near_duplicate"]["documents"] == 1
    stats = json.loads(succeed("corpus", "stats", "--json"))
    assert stats["funnel"][0]["documents"] == 42 and 0 <= stats["gini"] < 1
    assert sum(split["documents"] for split in stats["splits"].values()) == 40
    assert "Gini coefficient" in succeed("corpus", "stats")
    shown = succeed("corpus", "show")
    assert "too_short, 1 document: n_bytes < 100" in shown and "cluster of 2 near duplicates, 1 kept" in shown
    assert "little" in succeed("corpus", "show", "too_short")
    answer = succeed("corpus", "why", "short.txt")
    assert "dropped: too_short" in answer and "n_bytes = 6" in answer
    found = json.loads(succeed("corpus", "why", "near.txt", "--json"))
    other = json.loads(succeed("corpus", "why", "00.txt", "--json"))
    dropped, kept = (found, other) if found["verdict"] == "dropped" else (other, found)
    assert dropped["duplicate"]["id"] == kept["id"] and dropped["duplicate"]["similarity"] >= 0.8


def test_query_file_replaces_the_query(pages: Path) -> None:
    Path("mine.sql").write_text(
        "SELECT row, CASE WHEN n_bytes > 902 THEN 'long' ELSE '' END AS reason FROM attributes"
    )
    succeed("corpus", "ingest", "pages", "--corpus", "mine")
    succeed("corpus", "filter", "--query", "mine.sql", "--corpus", "mine")
    answer = json.loads(succeed("corpus", "why", "near.txt", "--json"))
    assert (answer["reason"], answer["condition"], answer["values"]) == (
        "long",
        "n_bytes > 902",
        {"n_bytes": 903},
    )


def test_verbs_refuse_what_is_missing(pages: Path) -> None:
    assert "whorl corpus ingest SOURCE" in refuse("corpus", "stats", code=1)
    assert "has no corpus/ingest" in refuse("corpus", "filter", code=1)
    succeed("corpus", "ingest", "pages")
    assert "whorl corpus filter" in refuse("corpus", "show", code=1)
    assert "did you mean 'seed'" in refuse("corpus", "filter", "--set", "sed=1")
    succeed("corpus", "filter")
    assert "no document was dropped for 'short'" in refuse("corpus", "show", "short")
    assert "mine" in refuse("corpus", "stats", "--corpus", "mine", code=1)
    assert "cannot be read" in refuse("corpus", "filter", "--query", "none.sql")
