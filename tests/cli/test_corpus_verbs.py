"""`whorl corpus`: the verbs make the artifacts of a corpus, and explain them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.corpus.ingest.test_own_folder import write_folder
from tests.support.cli import refuse as refuse_in
from tests.support.cli import succeed as succeed_in

from whorl.corpus import Corpus
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
    succeed("corpus", "filter", "--set", "validation_bytes=2000", "--set", "near_duplicates=keep")
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
        "long", "n_bytes > 902", {"n_bytes": 903},
    )  # fmt: skip


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


def test_folder_with_a_file_of_each_kind_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "own")
    printed = succeed("corpus", "ingest", "own")
    assert "12 documents" in printed and "records in quarantine: 4 (3 secret, 1 ragged)" in printed
    why = succeed("corpus", "why", ".env")
    assert "quarantined: secret" in why and "hunter2" not in why
    assert "hunter2" not in str([p.read_bytes() for p in (tmp_path / ".whorl").rglob("*") if p.is_file()])


NOUNS = [
    "river", "engine", "garden", "letter", "window", "market", "teacher", "village", "forest", "ship",
    "harbour", "bridge",
]  # fmt: skip
VERBS = [
    "crosses", "carries", "repairs", "finds", "paints", "reaches", "leaves", "describes", "watches", "builds",
]  # fmt: skip


def page(rng: random.Random) -> str:
    """A page of distinct sentences in paragraphs."""
    paragraphs = []
    for _ in range(6):
        sentences = []
        for _ in range(5):
            a, b, c, d, e = rng.choices(NOUNS, k=5)
            first, second = rng.choices(VERBS, k=2)
            sentences.append(
                f"The {a} of {b} {rng.randrange(100)} {first} the {c} and that {d} {second} the {e}."
            )
        paragraphs.append("<p>" + "\n".join(sentences))  # the end tag of a paragraph may be left out
    body = "\n".join(paragraphs)
    return f"<html><head><title>A page</title></head>\n<body>\n{body}\n</body></html>\n"


def test_curate_web_makes_tokens_and_a_report_from_pages(pages: Path) -> None:
    rng, web = random.Random(1), pages.parent / "web"
    web.mkdir()
    for i in range(60):
        (web / f"{i:02d}.html").write_text(page(rng))
    (web / "copy.html").write_text((web / "00.html").read_text())
    (web / "near.html").write_text(
        (web / "01.html").read_text().replace("</body>", "<p>One more line.</p></body>")
    )
    (web / "short.html").write_text("<html><body><p>little</p></body></html>")
    succeed("run", "curate-web", "--set", 'ingest.sources=["web"]', "--set", "tokenizer.vocab_size=400")
    store = Store()
    selection = store.open("curate-web/curate")
    assert store.open("curate-web/ingest").summary["equal_files"]["files"] == 1
    for split in ("train", "validation", "test"):  # the text of the pages, and no markup
        for document in Corpus(store.open("curate-web/ingest").path, selection.path).documents(split):
            assert "The " in document.text and "<" not in document.text and document.title == "A page"
    assert selection.summary["dropped"]["near_duplicate"]["documents"] == 1
    assert store.open("curate-web/tokens").kind == "tokens"
    text = store.open("curate-web/report").file("report.html").read_text()
    for title in ("Samples of dropped documents", "Largest clusters", "Pairs that are compared", "Sources"):
        assert title in text
    assert "whorl.corpus" not in text and "near.html" in text
    for document, verdict in (
        ("short.html", "dropped"),
        ("copy.html", "copy of a file"),
        ("05.html", "kept"),
    ):
        answer = json.loads(succeed("corpus", "why", document, "--json"))
        assert answer["verdict"] == verdict, answer


def test_decontaminate_names_the_test_item(pages: Path) -> None:
    words = (pages / "07.txt").read_text().split()
    Path("tests.jsonl").write_text(json.dumps({"question": " ".join(words[20:60])}) + "\n")
    succeed("corpus", "ingest", "pages")
    succeed("corpus", "decontaminate", "tests.jsonl", "--field", "question")
    answer = json.loads(succeed("corpus", "why", "07.txt", "--json"))
    assert (answer["verdict"], answer["reason"]) == ("dropped", "contaminated")
    assert answer["test_item"]["begin_word"] == 20 and answer["test_item"]["score"] > 0.9
    assert "test item" in succeed("corpus", "why", "07.txt")
    # A later call of another verb keeps the test set.
    succeed("corpus", "dedup")
    assert Store().open("corpus/curate").summary["dropped"]["contaminated"]["documents"] == 1
    succeed("corpus", "mix")
    assert Store().open("corpus/mix").parents["selection"] == Store().open("corpus/curate").address


def test_trained_classifier_selects_documents(pages: Path) -> None:
    rng = random.Random(3)
    letters = {"good": "abcdefgh", "bad": "stuvwxyz"}
    for name, alphabet in letters.items():
        texts = (" ".join("".join(rng.choices(alphabet, k=2)) for _ in range(30)) for _ in range(40))
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
        words = ["".join(rng.choices(alphabet, k=2)) for _ in range(80)]
        (pages / f"{name}.txt").write_text(" ".join(words))
    samples = ("--positive", "good.jsonl", "--negative", "bad.jsonl", "--field", "body")
    printed = succeed("corpus", "train-classifier", "quality.safetensors", *samples)
    assert "40 positive and 40 negative texts" in printed and "16 held-out texts: accuracy 1.000" in printed
    Path("mine.sql").write_text(
        "SELECT row, CASE WHEN quality_probability < 0.2 THEN 'bad' ELSE '' END AS reason FROM attributes"
    )
    succeed("corpus", "ingest", "pages")
    measure = 'measures=[{name="quality", measure="classifier", model="quality.safetensors"}]'
    succeed("corpus", "filter", "--query", "mine.sql", "--set", measure)
    assert Store().open("corpus/curate").summary["dropped"]["bad"]["documents"] == 1
    answer = json.loads(succeed("corpus", "why", "bad.txt", "--json"))
    assert (answer["reason"], answer["condition"]) == ("bad", "quality_probability < 0.2")
    assert "--positive" in refuse("corpus", "train-classifier", "quality.safetensors")
