"""One suite for every index. The oracle is a dictionary that looks at each document."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.log.servers import running
from tests.support.search.memory_index import MemoryIndex

from whorl.errors import DataError
from whorl.search.analysis import Analysis
from whorl.search.documents import (
    IndexBusyError,
    IndexUnavailableError,
    Passage,
    QueryError,
    SearchDocument,
    SearchQuery,
)
from whorl.search.index import open_index

BACK_ENDS = ("folder", "pgvector", "postgresql", "opensearch")
NO_VECTORS = {"postgresql": "this PostgreSQL has no pgvector"}
NAMES = map("index-{}".format, itertools.count())
OPENSEARCH = "WHORL_TEST_OPENSEARCH"  # host:port of a real one
WORDS = ("date", "parse", "image", "colour", "river", "stone")


def unit(*values: float):
    vector = np.array(values, np.float32)
    return vector / np.linalg.norm(vector)


def encode(texts):
    """Vectors of two words alone."""
    return np.stack([unit(text.count("north") + 1e-3, text.count("south") + 1e-3) for text in texts])


def document(id, version, text, title="", vectors=None, **fields) -> SearchDocument:
    return SearchDocument(id, version, [Passage(0, text, vectors or {})], title, fields, f"digest of {text}")


@pytest.fixture(scope="module", params=BACK_ENDS)
def server(request, tmp_path_factory):
    """The name of a back end, and the URL of its server."""
    if request.param == "folder":
        yield request.param, str(tmp_path_factory.mktemp("indexes"))
    elif request.param == "opensearch" and OPENSEARCH in os.environ:
        yield request.param, f"opensearch://{os.environ[OPENSEARCH]}"
    else:
        with running(request.param) as started:
            yield request.param, started.url


@pytest.fixture
def make(server):
    """A function that opens the index of this test."""
    kind, url = server
    place = f"{url}/{next(NAMES)}" if kind == "folder" else f"{url}#{next(NAMES)}-{os.getpid()}"
    opened = []

    def open_one(**options):
        opened.append(open_index(place, **options))
        return opened[-1]

    yield open_one
    for index in opened:
        index.close()


@pytest.fixture
def index(make):
    opened = make(writable=True)
    opened.write(
        [
            document(
                "a", 1, "def parseDate(text): return the date of a text", "dates", language="en", year=2001
            ),
            document(
                "b", 2, "render an image with colours", "images", language="en", year=2003, tags=["x", "y"]
            ),
            document("c", 3, "Zeit und Datum", "zeit", language="de", year=2005.5, tags=["y"]),
        ],
        position={"notes/0": 4},
    )
    return opened


def ids(index, text="", **options) -> list[str]:
    return [hit.id for hit in index.search(SearchQuery(text, **options)).hits]


def test_words_phrases_exclusions_and_beginnings(index):
    assert ids(index, "parsing dates") == ["a"]
    assert ids(index, '"parse date"') == ["a"] and ids(index, '"date parse"') == []
    assert ids(index, "colour") == ["b"] and ids(index, "images") == ["b"]
    assert ids(index, "date -parse") == [] and ids(index, 'date -"text return"') == []
    assert ids(index, "col*") == ["b"] and ids(index, "rendering zeit*") in (["b", "c"], ["c", "b"])
    assert ids(index, "nothing") == [] and sorted(ids(index)) == ["a", "b", "c"]


def test_more_and_rarer_words_come_first(index):
    index.write([document(f"n{i}", 10 + i, "date " * (1 + i) + "filler words here") for i in range(5)])
    index.write([document("rare", 20, "date and parse and something of that length")])
    assert ids(index, "date parse", k=2)[0] in ("a", "rare")
    assert ids(index, "date", k=20)[0] in ("n4", "n3", "a")


def test_filters_facets_and_totals(index):
    assert ids(index, filters={"language": "de"}) == ["c"]
    assert sorted(ids(index, filters={"language": ["de", "en"]})) == ["a", "b", "c"]
    assert sorted(ids(index, filters={"tags": "y"})) == ["b", "c"]
    assert sorted(ids(index, filters={"year": (2002, None)})) == ["b", "c"]
    assert ids(index, filters={"year": (None, 2001)}) == ["a"] and ids(index, filters={"year": "2003"}) == [
        "b"
    ]
    assert ids(index, filters={"year": 2005.5, "language": "de"}) == ["c"]
    found = index.search(SearchQuery("", k=1, facets=["language", "tags"], filters={"year": (2002, 2010)}))
    assert found.total == 2 and len(found.hits) == 1
    assert found.facets == {"language": {"en": 1, "de": 1}, "tags": {"y": 2, "x": 1}}
    assert index.search(SearchQuery("date", facets=["language"])).facets == {"language": {"en": 1}}


def test_one_edit_from_four_letters_and_two_from_eight(index):
    assert ids(index, "colurs") == ["b"] and ids(index, "dtae") == ["a"] and ids(index, "imgaes") == ["b"]
    assert ids(index, "xolxurs") == [] and ids(index, "colurs", typos=False) == []
    index.write([document("d", 9, "transmission")])
    assert ids(index, "tarnsmision") == ["d"] and ids(index, "trnsmsin") == []


def test_hits_have_passages_marks_and_fields(index):
    long = SearchDocument(
        "long", 8, [Passage(0, "nothing of it"), Passage(13, "the river Thames")], "T", {"n": 1}, "digest"
    )
    index.write([long])
    hit = index.search(SearchQuery("rivers")).hits[0]
    assert (hit.id, hit.version, hit.start, hit.text, hit.title) == ("long", 8, 13, "the river Thames", "T")
    assert hit.fields == {"n": 1} and [hit.text[a:b] for a, b in hit.marks] == ["river"]


def test_parts_of_a_score_add_up(index):
    hit = index.search(SearchQuery("parse a date", explain=True)).hits[0]
    assert hit.id == "a" and {"pars", "date"} <= hit.explanation.keys()
    assert hit.score == pytest.approx(sum(hit.explanation.values()), rel=1e-4)
    assert index.search(SearchQuery("parse")).hits[0].explanation == {}


def test_older_version_never_replaces_a_newer(index):
    index.write([document("a", 0, "older")], [("b", 1)])
    assert index.versions(["a", "b", "x"]).keys() == {"a", "b"} and ids(index, "older") == []
    index.write([document("a", 1, "same version, new text")])
    assert ids(index, "same") == ["a"] and ids(index, "parse") == []
    index.write([], [("a", 9)])
    index.write([document("a", 8, "late")])
    assert index.versions(["a"]) == {"a": (9, "")} and ids(index, "late") == []
    assert sorted(d[0] for d in index.documents()) == ["b", "c"]
    index.write([document("new", 5, "late")], [("new", 7), ("never seen", 7)])
    assert index.versions(["new", "never seen"]) == {"new": (7, ""), "never seen": (7, "")}
    index.write([], expire=9)
    assert index.versions(["a", "new"]) == {"a": (9, "")}


def test_position_moves_with_a_write_and_never_back(index):
    assert index.position() == {"notes/0": 4}
    index.write([], position={"notes/0": 3, "votes/1": 2})
    assert index.position() == {"notes/0": 4, "votes/1": 2}


def test_reader_sees_writes_and_a_second_writer_is_refused(index, make, server):
    reader = make()
    if server[0] == "opensearch":  # it has no sessions: the newer writer takes over
        index, before = make(writable=True), index
        with pytest.raises(IndexBusyError):
            before.write([])
    else:
        with pytest.raises(IndexBusyError):
            make(writable=True)
    index.write([document("d", 5, "a new date")])
    assert sorted(ids(reader, "date")) == ["a", "d"]
    index.close()
    again = make(writable=True)
    assert again.position() == {"notes/0": 4} and len(list(again.documents())) == 4


@pytest.mark.parametrize(
    "text",
    [
        "word " * 10_000, "the a of", '"unbalanced', 'a "b" c"', "(", "* - \" ' \\ : ! & | <->", "-", "\0", "é ß 漢字",
        "x" * 50_000,
    ],
    ids=range(10),
)  # fmt: skip
def test_any_text_is_a_query(index, text):
    index.search(SearchQuery(text, explain=True, facets=["language"]))


@pytest.mark.parametrize(
    "text", ["漢字かな", "l'été", "a'b\\c\"d", "x" * 3000, "naïve", "\0nul", "😀 smile"], ids=range(7)
)
def test_any_text_is_a_document(index, text):
    index.write([document(text[:300], 9, text, title=text, **{text[:20]: text[:200]})])
    assert {id for id, _, _ in index.documents()} - {"a", "b", "c"}
    index.search(SearchQuery(text))


def test_unknown_field_names_the_nearest(index):
    for options in ({"filters": {"langage": "en"}}, {"facets": ["langage"]}):
        with pytest.raises(QueryError, match="language"):
            index.search(SearchQuery("date", **options))


def test_synonyms_are_searched_too(make):
    index = make(writable=True, analysis=Analysis(synonyms={"car": ["motor vehicle"]}))
    index.write([document("a", 1, "a motor vehicle"), document("b", 2, "a vehicle with a motor")])
    assert ids(index, "car") == ["a"]


@pytest.fixture
def compass(make, server):
    if reason := NO_VECTORS.get(server[0]):
        pytest.skip(reason)
    index = make(writable=True, encode=encode, encoder="compass")
    index.write(
        [
            document(f"d{i}", i, f"text {i}", vectors={"compass": unit(20 - i, i)}, group=str(i % 2))
            for i in range(1, 20)
        ]
    )
    return index


def test_vectors_are_searched_with_filters_inside(compass):
    assert ids(compass, "north", mode="vectors", k=3) == ["d1", "d2", "d3"]
    assert ids(compass, "south", mode="vectors", k=2, filters={"group": "0"}) == ["d18", "d16"]
    compass.write([document("d1", 30, "text 1", vectors={"compass": unit(0.1, 1)})], [("d2", 30)])
    assert ids(compass, "north", mode="vectors", k=2) == ["d3", "d4"]


def test_hybrid_fuses_both_rankings(compass):
    compass.write([document("word", 40, "the north pole", vectors={"compass": unit(0, 1)}, group="0")])
    hit = compass.search(SearchQuery("north", k=1, explain=True)).hits[0]
    assert hit.id in ("word", "d1") and hit.score == pytest.approx(
        sum(v for part, v in hit.explanation.items() if not part.startswith("bm25"))
    )
    assert {"word", "d1"} <= set(ids(compass, "north", k=3))
    assert ids(compass, "north", mode="text") == ["word"]


def test_two_encoders_stay_apart(compass, make):
    compass.write([document("d5", 50, "text", vectors={"compass": unit(1, 0), "other": unit(0, 1, 0)})])
    other = make(encode=lambda texts: np.stack([unit(0, 1, 0)] * len(texts)), encoder="other")
    assert ids(other, "north", mode="vectors") == ["d5"]
    for size in (3, 1):
        with pytest.raises(DataError, match="compass"):
            compass.write([document("bad", 60, "x", vectors={"compass": unit(*[1] * size)})])
    wrong = make(encode=lambda texts: np.stack([unit(1, 1, 1)] * len(texts)), encoder="compass")
    with pytest.raises(QueryError, match="encoder"):
        ids(wrong, "north")


def test_killed_postgresql_is_named_and_reached_again():
    with running("postgresql") as started:
        index = open_index(f"{started.url}#killed", writable=True)
        index.write([document("a", 1, "a river")], position={"t/0": 2})
        started.kill()
        with pytest.raises(IndexUnavailableError):
            index.write([document("b", 2, "a stone")], position={"t/0": 3})
        started.start()
        index.write([document("b", 2, "a stone")], position={"t/0": 3})
        assert (
            ids(index, "river") == ["a"] and ids(index, "stone") == ["b"] and index.position() == {"t/0": 3}
        )
        index.close()


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d/é"]), st.integers(0, 9),
        st.none() | st.lists(st.sampled_from(WORDS), max_size=4),
    ),
    max_size=6,
)  # fmt: skip


@given(st.lists(st.tuples(CHANGES, st.integers(0, 3), st.sampled_from([0, 0, 5])), max_size=5))
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
def test_index_equals_the_oracle_after_any_writes(server, writes):
    kind, url = server
    name = f"{next(NAMES)}-{os.getpid()}"
    index = open_index(f"{url}/{name}" if kind == "folder" else f"{url}#{name}", writable=True)
    oracle = MemoryIndex()
    try:
        floor = 0  # below it, as it promised by `expire`, no version arrives
        for changes, offset, expire in writes:
            newest = {}
            for id, version, words in changes:  # of equal versions in one write the order is free
                newest.setdefault((id, max(version, floor)), words)
            floor = max(floor, expire)
            puts = [document(i, v, " ".join(w), n=len(w)) for (i, v), w in newest.items() if w is not None]
            deletes = [key for key, words in newest.items() if words is None]
            for each in (index, oracle):
                each.write(puts, deletes, {"t/0": offset}, expire)
            assert index.versions(["a", "b", "c", "d/é"]) == oracle.versions(["a", "b", "c", "d/é"])
            assert sorted(index.documents()) == sorted(oracle.documents())
            assert index.position() == oracle.position()
        for text in (*WORDS, '"date parse"', "river -stone"):
            found, wanted = (each.search(SearchQuery(text, typos=False)) for each in (index, oracle))
            assert {hit.id for hit in found.hits} == {
                hit.id for hit in wanted.hits
            } and found.total == wanted.total
    finally:
        index.close()
