"""Decontamination: planted items are found in any form, against an oracle in plain Python; bad test sets are refused."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.corpus.decontamination.items import ItemIndex, TestItem, read_test_set
from whorl.corpus.decontamination.match import Contamination, find_contamination
from whorl.corpus.decontamination.words import hash_words, split_words
from whorl.corpus.mapreduce import LocalPool
from whorl.errors import ConfigError, DataError
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress

VOCABULARY = [f"w{i}" for i in range(40)]


def items_of(*texts: str) -> list[TestItem]:
    return [TestItem("set", f"set:{i}", text) for i, text in enumerate(texts)]


def document_file(path: Path, texts: Sequence[str], group: int = 3) -> Path:
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=group)
    return path


def find(folder: Path, texts: Sequence[str], index: ItemIndex, min_score: float = 0.5) -> list[Contamination]:
    folder.mkdir(exist_ok=True, parents=True)
    return find_contamination(
        [document_file(folder / "documents.parquet", texts)], index, min_score=min_score
    )


def oracle(
    texts: Sequence[str], items: Sequence[str], n: int, min_words: int, min_score: float
) -> dict[int, tuple[int, float]]:
    """Row -> (item, score) in plain Python, over tuples of words."""

    def grams(words: list[str], length: int) -> set[tuple[str, ...]]:
        return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}

    usable = [words for words in map(split_words, items) if len(words) >= min_words]
    lengths = {min(n, len(words)) for words in usable}
    of_item = [grams(words, min(n, len(words))) for words in usable]
    of_text = [set().union(*(grams(split_words(text), length) for length in lengths)) for text in texts]
    weight: dict[tuple[str, ...], float] = defaultdict(float)
    for gram in set().union(*of_item):
        in_texts = sum(gram in found for found in of_text)
        weight[gram] = 1 / (sum(gram in found for found in of_item) * max(in_texts, 1))
    best = {}
    for row, found in enumerate(of_text):
        scores = [sum(weight[g] for g in own & found) / sum(weight[g] for g in own) for own in of_item]
        item = max(range(len(scores)), key=lambda i: (round(scores[i], 9), -i))
        if scores[item] >= min_score - 1e-9:
            best[row] = (item, scores[item])
    return best


def random_text(rng: random.Random, n: int, vocabulary: Sequence[str] = VOCABULARY) -> str:
    return " ".join(rng.choice(vocabulary) for _ in range(n))


@given(st.integers(0, 1 << 30), st.integers(2, 6))
def test_scores_equal_plain_python(tmp_path_factory: pytest.TempPathFactory, seed: int, n: int) -> None:
    rng = random.Random(seed)
    words = VOCABULARY[: rng.choice([3, 40])]  # few words: n-grams in many items and documents
    items = [random_text(rng, rng.randint(1, 12), words) for _ in range(8)]
    texts = [random_text(rng, rng.randint(0, 30), words) for _ in range(12)]
    for _ in range(6):
        texts.append(f"{random_text(rng, 4)} {rng.choice(items)}, {random_text(rng, 3)}")
    least = rng.randint(1, n)
    if not any(len(split_words(item)) >= least for item in items):
        return
    index = ItemIndex.build(items_of(*items), n, least)
    found = find(tmp_path_factory.mktemp("oracle"), texts, index, 0.4)
    expected = oracle(texts, items, n, least, 0.4)
    assert {m.row: pytest.approx(m.score) for m in found} == {row: s for row, (_, s) in expected.items()}
    for match in found:
        words_of = split_words(texts[match.row])[match.begin : match.end]
        item = split_words(index.items[match.item].text)
        assert set(words_of) & set(item)


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.sampled_from(["verbatim", "wrapped", "capitals", "embedded", "quoted"]))
def test_planted_item_is_always_found(tmp_path_factory: pytest.TempPathFactory, seed: int, form: str) -> None:
    rng = random.Random(seed)
    alphabet = "abcdefgh\u00e9\u00df\u4e2d\u6587\u0431"
    words = ["".join(rng.choices(alphabet, k=rng.randint(2, 6))) for _ in range(200)]
    item = random_text(rng, rng.randint(13, 40), words)
    parts = item.split()
    planted = {
        "verbatim": item,
        "wrapped": "\n".join(" ".join(parts[i : i + 8]) for i in range(0, len(parts), 8)),
        "capitals": item.upper(),
        "embedded": f"{random_text(rng, 50, words)} {item} {random_text(rng, 50, words)}",
        "quoted": "\u201c" + ", ".join(parts) + "\u2026\u201d",
    }[form]
    texts = [random_text(rng, 60, words) for _ in range(5)]
    texts.insert(rng.randint(0, 5), planted)
    index = ItemIndex.build(items_of("other " * 20, item))
    (match,) = find(tmp_path_factory.mktemp("planted"), texts, index)
    assert (texts[match.row], match.item) == (planted, 1)
    assert match.score == pytest.approx(1)
    assert split_words(planted)[match.begin : match.end] == split_words(item)


@given(st.lists(st.text(max_size=30), max_size=6))
def test_word_hashes_equal_reference(texts: list[str]) -> None:
    words = hash_words(texts)
    seen: dict[str, int] = {}
    for i, text in enumerate(texts):
        own = words.hashes[words.first[i] : words.first[i + 1]].tolist()
        expected = split_words(text)
        assert len(own) == len(expected)
        for word, value in zip(expected, own, strict=True):
            assert seen.setdefault(word, value) == value
    assert len(set(seen.values())) == len(seen)
    for text in texts:  # alone, perhaps as ASCII, as beside others
        alone = hash_words([text]).hashes.tolist()
        assert [seen[word] for word in split_words(text)] == alone


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Stra\u00dfe, STRASSE; str\u00adasse", ["strasse"] * 3),
        ("\ufb01ne \uff21\uff22\uff23 x\u00b2", ["fine", "abc", "x2"]),
        ("\u4f60\u597dab\u4e16", ["\u4f60", "\u597d", "ab", "\u4e16"]),
        ("don't_stop--ever\u2026now", ["don", "t", "stop", "ever", "now"]),
        ("\u0939\u093f\u0928\u094d\u0926\u0940", ["\u0939\u093f\u0928\u094d\u0926\u0940"]),
        (" \n\t!?", []),
    ],
)
def test_split_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def test_boilerplate_counts_less(tmp_path: Path) -> None:
    """A shared instruction marks no document; the item with it does, also if many documents hold the whole item."""
    rng = random.Random(0)
    boilerplate = random_text(rng, 30)
    items = [f"{boilerplate} {random_text(rng, 16, [f'x{i}_{j}' for j in range(30)])}" for i in range(20)]
    index = ItemIndex.build(items_of(*items))
    texts = [f"{boilerplate} {random_text(rng, 20, [f'y{i}' for i in range(99)])}" for _ in range(50)]
    assert find(tmp_path / "shared", texts, index, 0.2) == []
    found = find(tmp_path / "items", texts + items[:3] * 2, index)
    assert [(m.row, m.item) for m in found] == [(50 + i, i % 3) for i in range(6)]
    # A phrase of one item only, but of many documents.
    index = ItemIndex.build(items_of(items[0]))
    assert find(tmp_path / "corpus", texts, index, 0.2) == []


def test_short_items_need_min_words(tmp_path: Path) -> None:
    items = items_of("one two three four five six seven eight", "too short", "a b c d e f g h i j k l m n")
    index = ItemIndex.build(items)
    assert [item.id for item in index.too_short] == ["set:0", "set:1"]
    index = ItemIndex.build(items, min_words=8)
    assert [item.id for item in index.too_short] == ["set:1"]
    texts = ["zero ONE two three, four five\nsix seven eight nine", "one two three four five six seven"]
    assert [(m.row, m.item, m.begin, m.end) for m in find(tmp_path, texts, index)] == [(0, 0, 1, 9)]
    with pytest.raises(DataError, match="all 2 test items are shorter than 13 words, the first is set:0"):
        ItemIndex.build(items[:2])
    with pytest.raises(DataError, match="no items"):
        ItemIndex.build([])
    with pytest.raises(ConfigError, match="min_words is 14"):
        ItemIndex.build(items, min_words=14)


def test_test_sets_are_read_and_bad_ones_refused(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"question": f"text {i}"}) + "\n" for i in range(3)))
    pq.write_table(pa.table({"question": ["from Parquet"]}), tmp_path / "b.parquet")
    items = read_test_set([str(tmp_path / "*.jsonl"), str(tmp_path / "b.parquet")], "question")
    assert [item.text for item in items] == ["text 0", "text 1", "text 2", "from Parquet"]
    assert len({item.id for item in items}) == 4
    for name, content, field, words in (
        ("c.jsonl", "", "text", "c.jsonl is empty"),
        (
            "d.jsonl",
            '{"text": "x"}\n{"other": 1}\n',
            "text",
            "d.jsonl, record 2, has no text in the field 'text'",
        ),
        ("e.jsonl", '{"text": " "}\n', "text", "only white space in the field 'text'"),
        ("f.jsonl", "not JSON\n", "text", "f.jsonl, record 1, cannot be read: Expecting value"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=words):
            read_test_set([str(tmp_path / name)], field)
    with pytest.raises(DataError, match=r"missing\.jsonl cannot be read: No such file"):
        read_test_set([str(tmp_path / "missing.jsonl")], "text")


def test_workers_and_files_do_not_change_matches(tmp_path: Path) -> None:
    rng = random.Random(1)
    items = [random_text(rng, 20, [f"z{i}" for i in range(500)]) for _ in range(30)]
    texts = [random_text(rng, 40, [f"z{i}" for i in range(500)]) for _ in range(40)]
    for i in range(0, 40, 2):
        texts[i] += " " + items[i // 2]
    index = ItemIndex.build(items_of(*items))
    whole = find(tmp_path / "whole", texts, index)
    assert [m.row for m in whole] == list(range(0, 40, 2))
    files = [document_file(tmp_path / f"{i}.parquet", texts[i : i + 9]) for i in range(0, 40, 9)]
    units = tmp_path / "units"
    assert find_contamination(files, index, units=units, executor=LocalPool(2, isolate=True)) == whole
    before = {path.name: path.stat().st_ino for path in units.iterdir()}
    seen: list[int] = []
    assert find_contamination(files, index, units=units, advance=seen.append) == whole
    assert {path.name: path.stat().st_ino for path in units.iterdir()} == before
    assert seen == [9, 9, 9, 9, 4]


def test_no_documents_or_hits_give_no_matches(tmp_path: Path) -> None:
    index = ItemIndex.build(items_of("x " * 20))
    assert find(tmp_path, ["", "a b c", "\ud55c\uad6d\uc5b4"], index) == []
    assert find(tmp_path, [], index) == []
    assert np.diff(index.gram_first).tolist() == [1]


def test_curate_drops_contaminated_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(2)
    names = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(3000)]
    questions = [random_text(rng, 20, names) for _ in range(4)]
    tests = tmp_path / "tests.jsonl"
    tests.write_text("".join(json.dumps({"question": q}) + "\n" for q in [*questions, "short one"]))
    data = tmp_path / "data"
    data.mkdir()
    for i in range(40):
        (data / f"{i:02}.txt").write_text("\n".join(random_text(rng, 8, names) for _ in range(10)))
    (data / "05.txt").write_text(
        (data / "05.txt").read_text() + " " + questions[1].upper().replace(" ", "\n")
    )
    recipe = f"""
        name = "decontaminated"
        [steps.ingest]
        sources = ["{data}"]
        [steps.curate]
        parents = ["ingest"]
        validation_bytes = 500
        test_bytes = 500
        [steps.curate.decontaminate]
        tests = [{{files = ["{tests}"], field = "question"}}]
    """
    store = Store(tmp_path / "store")
    run_recipe(parse_recipe(recipe, "recipe.toml"), store, Progress())
    assert (
        "1 of 5 test items have fewer than 13 words and cannot be found: tests.jsonl:5"
        in capsys.readouterr().out
    )
    (selection,) = [a for a in store.artifacts() if a.kind == "selection"]
    expected = {"items": 5, "found": 1, "too_short": 1, "documents": 1}
    assert selection.summary["contamination"] == {"tests.jsonl": expected}
    assert selection.summary["dropped"]["contaminated"]["documents"] == 1
    (match,) = pq.read_table(selection.path / "contamination.parquet").to_pylist()
    assert (match["item"], match["row"], match["score"]) == ("tests.jsonl:2", 5, pytest.approx(1))
    # Other test items, another address.
    tests.write_text("".join(json.dumps({"question": q}) + "\n" for q in questions[2:]))
    run_recipe(parse_recipe(recipe, "recipe.toml"), store, Progress.silent())
    assert len([a for a in store.artifacts() if a.kind == "selection"]) == 2
