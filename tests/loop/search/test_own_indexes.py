"""The indexes `corpus`, `runs` and `responses`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.support.cli import refuse, succeed
from tests.support.loop_events import completion, open_synthetic_log
from tests.support.store.step_examples import make

from whorl.corpus.documents import document_schema
from whorl.loop.search.indexer import catch_up
from whorl.loop.search.own_indexes import sync_index
from whorl.loop.search.reader import SearchReader
from whorl.search.documents import SearchQuery
from whorl.store import Build, Store


def ids(store, name, text="") -> set[str]:
    with SearchReader(store, name) as reader:
        return {hit.id for hit in reader.search(SearchQuery(text)).hits}


def test_responses_of_an_erased_actor_are_deleted(tmp_path):
    log, keys = open_synthetic_log(tmp_path)
    for name, actor in (("c1", "ada"), ("c2", "bob"), ("c3", "ada")):
        made = completion(name, f"How does {actor} sort?", f"def {name}(): return sorted", actor=actor)
        log.append("completions", keys.seal(made.event(1e9)))
    assert not sync_index(Store(tmp_path), "responses", dict.get)
    catch_up(tmp_path, "responses")
    assert ids(tmp_path, "responses", "sorted") == {"c1", "c2", "c3"} and ids(
        tmp_path, "responses", "bob"
    ) == {"c2"}
    keys.close(), log.close()
    succeed(tmp_path, "forget", "ada", "--store", str(tmp_path))
    catch_up(tmp_path, "responses")
    assert ids(tmp_path, "responses", "sorted") == {"c2"}
    assert "c2" in succeed(tmp_path, "search", "sort", "--in", "responses", "--store", str(tmp_path)).stdout


def ingest(store: Store, texts: dict[str, str]) -> None:
    inputs = {"kind": "ingest", "parents": {}, "config": {"texts": texts}, "version": 1}
    with Build(store, name="corpus/ingest", **inputs) as build:
        fixed = {"source": "s", "path": "p", "licence": None, "offset": 0, "length": 1, "language": None}
        fixed |= dict.fromkeys(("url", "title", "time", "media_type"))
        rows = [{**fixed, "id": id, "text": text} for id, text in texts.items()]
        pq.write_table(pa.Table.from_pylist(rows, document_schema()), build.path / "documents-00000.parquet")


def test_corpus_follows_the_newest_ingest_and_may_get_vectors(tmp_path):
    store = Store(tmp_path)
    assert "no corpus" in refuse(tmp_path, "search", "x", "--in", "corpus", "--store", str(tmp_path), code=1)
    ingest(store, {"a": "one river", "b": "two rivers"})
    assert sync_index(store, "corpus", dict.get) and ids(tmp_path, "corpus", "river") == {"a", "b"}
    ingest(store, {"a": "one river", "c": "three rivers"})
    assert sync_index(store, "corpus", dict.get) and ids(tmp_path, "corpus", "river") == {"a", "c"}
    load = {
        "e": lambda texts: np.eye(2, dtype=np.float32)[[int(text.startswith("three")) for text in texts]]
    }.get
    assert sync_index(store, "corpus", load, "e")
    with SearchReader(tmp_path, "corpus", load) as reader:
        assert reader.search(SearchQuery("three", mode="vectors", k=1)).hits[0].id == "c"


def test_runs_are_the_artifacts_of_the_store(tmp_path):
    made = make(Store(tmp_path), "quick/note", "hello river")
    found = succeed(
        tmp_path, "search", "river", "--in", "runs", "--filter", "kind=note", "--store", str(tmp_path)
    ).stdout
    assert made.address in found and "\n1 document\n" in found
