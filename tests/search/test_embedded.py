"""The embedded index: versions, deletions, filters and the position."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from whorl.errors import ConfigError, DataError
from whorl.search.analysis import Analysis, read_synonyms
from whorl.search.documents import IndexBusyError, Passage, QueryError, SearchDocument, SearchQuery
from whorl.search.index import open_index


def document(id_: str, version: int, text: str, title: str = "", **fields: object) -> SearchDocument:
    return SearchDocument(id_, version, [Passage(0, text)], title, fields, f"digest {text}")  # type: ignore[arg-type]


@pytest.fixture
def index(tmp_path: Path):
    opened = open_index(tmp_path / "index", writable=True)
    opened.write(
        [
            document(
                "a", 1, "def parseDate(text): return the date of a text", "dates", language="en", year=2001
            ),
            document("b", 2, "render an image with colours", "images", language="en", year=2003),
            document("c", 3, "Zeit und Datum", "zeit", language="de", year=2005.5),
        ],
        position={"notes/0": 4},
    )
    yield opened
    opened.close()


def ids(found) -> list[str]:
    return [hit.id for hit in found.hits]


def test_write_and_search_of_each_kind(index, tmp_path):
    assert ids(index.search(SearchQuery("parsing dates"))) == ["a"]
    assert ids(index.search(SearchQuery('"parse date"'))) == ["a"]
    assert ids(index.search(SearchQuery("colour"))) == ["b"]
    assert ids(index.search(SearchQuery("date -parse"))) == []
    assert ids(index.search(SearchQuery("col*"))) == ["b"]
    assert ids(index.search(SearchQuery("def*"))) == ["a"]
    assert ids(index.search(SearchQuery("colurs"))) == ["b"]
    assert ids(index.search(SearchQuery("colurs", typos=False))) == []
    found = index.search(SearchQuery("", filters={"year": (2002, None)}, facets=["language"]))
    assert sorted(ids(found)) == ["b", "c"] and found.total == 2
    assert found.facets == {"language": {"en": 1, "de": 1}}
    assert index.position() == {"notes/0": 4}
    reader = open_index(tmp_path / "index")
    with pytest.raises(IndexBusyError):
        open_index(tmp_path / "index", writable=True)
    index.write([document("d", 5, "a new parser")])
    assert ids(reader.search(SearchQuery("parser"))) == ["d"]


def test_older_version_never_replaces_a_newer(index):
    index.write([document("a", 0, "older")], [("b", 1)])
    assert index.versions(["a", "b", "x"]) == {
        "a": (1, index.versions(["a"])["a"][1]),
        "b": (2, index.versions(["b"])["b"][1]),
    }
    index.write([], [("a", 9)])
    index.write([document("a", 8, "late")])
    assert index.versions(["a"]) == {"a": (9, "")}
    assert sorted(d[0] for d in index.documents()) == ["b", "c"]
    index.write([], expire=9)
    assert index.versions(["a"]) == {"a": (9, "")}
    index.write([], expire=10)
    assert index.versions(["a"]) == {}


def test_score_is_bm25(tmp_path):
    """2.2 idf f / (f + 1.2 (0.25 + 0.75 length / mean)), idf = ln(1 + (N - n + 0.5) / (n + 0.5)), N with the manifest."""
    texts = [
        "Zebras eat grass.",
        "The blue door opens with code 4711.",
        "Doors are made of wood.",
        "Grass is green.",
    ]
    opened = open_index(tmp_path, writable=True)
    opened.write([document(str(n), n, text) for n, text in enumerate(texts)])
    assert ids(opened.search(SearchQuery("What is the code of the blue door?", k=2))) == ["1", "2"]
    found = opened.search(SearchQuery("grass")).hits
    expected = 2.2 * math.log(1 + (5 - 2 + 0.5) / 2.5) / (1 + 1.2 * (0.25 + 0.75 * 3 / (18 / 5)))
    assert [(h.id, h.score) for h in found] == [
        ("0", pytest.approx(expected)),
        ("3", pytest.approx(expected)),
    ]
    opened.close()


def test_unknown_field_names_the_nearest(index, tmp_path):
    with pytest.raises(QueryError, match="language"):
        index.search(SearchQuery("a", filters={"langage": "en"}))
    with pytest.raises(ConfigError):
        open_index(tmp_path / "none")


def test_explanation_adds_up_to_the_score(index):
    hit = index.search(SearchQuery("parse a date", explain=True)).hits[0]
    assert hit.score == pytest.approx(sum(hit.explanation.values()), rel=1e-4)
    assert [hit.text[a:b] for a, b in hit.marks] == ["parse", "Date", "date", "a"]


def encode(texts: list[str]) -> np.ndarray:
    """Vectors of eight random directions per letter."""
    made = np.stack([sum(np.random.default_rng(ord(c)).standard_normal(8) for c in text) for text in texts])
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def with_vector(id_: str, version: int, text: str, **fields: object) -> SearchDocument:
    passage = Passage(0, text, {"letters": encode([text])[0]})
    return SearchDocument(id_, version, [passage], fields=fields, digest=text)  # type: ignore[arg-type]


def test_vectors_find_the_nearest_that_live_and_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("whorl.search.embedded.EXACT", 5)  # so that both ways of a filter are used
    opened = open_index(tmp_path, writable=True, encode=encode, encoder="letters")
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh"), 6)) for _ in range(300)]
    for first in range(0, 300, 20):
        opened.write(
            [
                with_vector(str(i), i, texts[i], tens=str(i // 10), half=i % 2)
                for i in range(first, first + 20)
            ]
        )
    opened.write([with_vector("7", 500, "zzzz", tens="x")], [(str(i), 500) for i in range(100, 200)])
    several = SearchDocument("m", 600, [Passage(0, "many one"), Passage(5, "many two")], fields={"kind": "m"})
    alive = [i for i in range(300) if i != 7 and not 100 <= i < 200]
    for filters, admits in (
        ({}, lambda i: True),
        ({"half": 1}, lambda i: i % 2),
        ({"tens": "3"}, lambda i: i // 10 == 3),
    ):
        found = opened.search(SearchQuery("abcd", mode="vectors", filters=filters))
        fit = [i for i in alive if admits(i)]
        cosines = encode([texts[i] for i in fit]) @ encode(["abcd"])[0]
        assert [hit.score for hit in found.hits] == pytest.approx(sorted(cosines, reverse=True)[:10])
        assert found.total == len(fit) + (not filters)  # and number 7
    opened.write([several])
    counted = opened.search(SearchQuery("many", mode="text", facets=["kind"]))
    assert (counted.total, len(counted.hits), counted.facets) == (1, 1, {"kind": {"m": 1}})
    both = opened.search(SearchQuery(texts[5], explain=True))
    assert both.hits[0].id == "5" and both.hits[0].score == pytest.approx(2 / 6)
    assert [h.score for h in both.hits] == pytest.approx(
        [h.explanation.get("text", 0) + h.explanation.get("vectors", 0) for h in both.hits]
    )
    with pytest.raises(DataError, match=r"shape \[3\]"):
        opened.write([SearchDocument("y", 1, [Passage(0, "y", {"letters": np.ones(3, np.float32)})])])
    assert "y" not in opened.versions(["y"])
    opened.close()


def test_large_segments_find_what_flat_ones_do(tmp_path, monkeypatch):
    monkeypatch.setattr("whorl.search.vectors.FLAT", 500)
    rng = np.random.default_rng(0)
    made = rng.standard_normal((40, 16))[rng.integers(0, 40, 3000)] + 0.4 * rng.standard_normal((3000, 16))
    made = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    puts = [SearchDocument(str(n), n, [Passage(0, "", {"e": vector})]) for n, vector in enumerate(made)]
    opened = open_index(tmp_path, writable=True)
    for first in range(0, 3000, 600):
        opened.write(puts[first : first + 600])
    opened.close()
    queries = iter(made[:50] + 0.1)
    reader = open_index(tmp_path, encode=lambda texts: next(queries)[None], encoder="e")
    assert 0 < reader._vectors["e"].indexed < 3000  # FAISS finds some of them, the later ones are compared
    found = [ids(reader.search(SearchQuery("x", mode="vectors"))) for _ in range(50)]
    right = np.argsort(-(made[:50] + 0.1) @ made.T, axis=1)[:, :10].astype(str)
    assert np.mean([len({*f} & {*r}) for f, r in zip(found, right.tolist(), strict=True)]) >= 9.5


def test_queries_that_are_long_or_broken_have_results(index):
    assert ids(index.search(SearchQuery('date "parse'))) == ["a"]
    assert ids(index.search(SearchQuery("parse " + "word " * 10_000))) == ["a"]
    assert ids(index.search(SearchQuery("of the a"))) == ["a"]
    assert index.search(SearchQuery('"" - * ( ] ~')).hits == []
    assert index.search(SearchQuery("-date")).total == 2


def test_synonyms_and_steps_of_the_analysis(index, tmp_path):
    (tmp_path / "synonyms").write_text("picture, image  # nouns\n")
    analysis = Analysis(synonyms=read_synonyms(tmp_path / "synonyms"))
    reader = open_index(tmp_path / "index", analysis=analysis)
    assert ids(reader.search(SearchQuery("picture"))) == ["b"]
    assert reader.analyze("renderPicture colurs") == [
        ("split", ["render", "Picture", "colurs"]),
        ("lowercase", ["render", "picture", "colurs"]),
        ("typos", ["render", "picture", "colours"]),
        ("stem", ["render", "pictur", "colour"]),
        ("synonyms", ["image"]),
    ]
    (tmp_path / "synonyms").write_text("a, b\nalone\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_synonyms(tmp_path / "synonyms")


def test_scripts_without_spaces_and_accents_are_found(index):
    index.write(
        [
            document("j", 10, "日本語の文書"),
            document("g", 11, "größere Änderung"),
            document("h", 12, "HTTPServer"),
        ]
    )
    assert ids(index.search(SearchQuery('"本語"'))) == ["j"]
    assert ids(index.search(SearchQuery("grossere aenderung anderung"))) == ["g"]
    assert ids(index.search(SearchQuery("server"))) == ["h"]


def test_ranges_of_any_number_and_name(index):
    numbers = [1e300, 1e-7, -5.0, 0.0, 2**60, -1e300]
    index.write([document(f"n{i}", 20 + i, "", **{"x y.z": v}) for i, v in enumerate(numbers)])

    def found(low, high):
        return sorted(ids(index.search(SearchQuery("", filters={"x y.z": (low, high)}))))

    for low, high in (
        (1e299, None),
        (1e-8, 1e-6),
        (None, -1.0),
        (0, 0),
        (None, None),
        (2.0**60, 2.0**60),
        (-1e300, 1),
        (-5.5, 0),
        (0, 2.5),
    ):
        fit = [n for n, v in enumerate(numbers) if (low is None or low <= v) and (high is None or v <= high)]
        assert found(low, high) == [f"n{n}" for n in fit], (low, high)
    for end in (float("nan"), float("inf")):
        with pytest.raises(QueryError, match="range"):
            found(end, None)
    assert index.search(SearchQuery("\ud800 render")).total == 1
