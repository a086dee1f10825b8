"""The choice of the vector index: recall, latency and memory of flat, HNSW and IVF-PQ, and recall of the embedded index.

    python bench/loop/vectors.py [--steps 200] [--passages 60000]

Vectors are those of passages of this interpreter's standard library (300 characters), by an embedder that is trained on its
functions; queries are first sentences of docstrings. The table has each kind at several settings, in one thread.

1. recall@10 of the embedded index at least 0.95;
2. the same under a filter that admits 1 % of the passages, and under one that admits half of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse, sized
from bench.loop.search_quality import functions, trained, words
from bench.loop.search_speed import passages

from whorl.loop.search.passages import cut
from whorl.search import vectors as segments
from whorl.search.documents import Passage, SearchDocument, SearchQuery, Vectors
from whorl.search.index import open_index

K, BATCH = 10, 5000


def best(queries: Vectors, made: Vectors, rows: np.ndarray) -> list[set[int]]:
    """The K nearest among `rows` of each query, exactly."""
    _, at = segments.faiss().knn(queries, np.ascontiguousarray(made[rows]), K, metric=0)
    return [{*rows[each].tolist()} for each in at]


def recall(found: Sequence[Sequence[int]], right: Sequence[set[int]]) -> float:
    return float(np.mean([len({*f} & r) / len(r) for f, r in zip(found, right, strict=True)]))


def study(made: Vectors, queries: Vectors) -> None:
    """Print recall, latency, build time and memory of each kind."""
    faiss = segments.faiss()
    faiss.omp_set_num_threads(1)
    n, d = made.shape
    right = best(queries, made, np.arange(n))
    print(f"{'kind':28} {'recall@10':>9} {'ms/query':>9} {'build s':>8} {'MB':>7}")

    def row(name: str, index: Any, build: float, search: Callable[[Vectors], Any]) -> None:
        began = time.perf_counter()
        found = [search(query) for query in queries]
        took = (time.perf_counter() - began) / len(queries) * 1e3
        size = len(faiss.serialize_index(index)) / 1e6
        print(f"{name:28} {recall(found, right):9.4f} {took:9.3f} {build:8.1f} {size:7.1f}", flush=True)

    flat = faiss.IndexFlatIP(d)
    flat.add(made)
    row("flat", flat, 0.0, lambda q: flat.search(q[None], K)[1][0])
    began = time.perf_counter()
    graph = faiss.IndexHNSWFlat(d, 32, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = 80
    graph.add(made)
    took = time.perf_counter() - began
    for ef in (48, 96, 192):
        found = faiss.SearchParametersHNSW(efSearch=ef)
        row(f"HNSW 32, ef {ef}", graph, took, lambda q, p=found: graph.search(q[None], K, params=p)[1][0])
    began = time.perf_counter()
    codes = segments.build(made)
    took = time.perf_counter() - began
    for part in (32, 16, 8, 4):
        for refine in (10, 20):
            params = faiss.SearchParametersIVF(nprobe=max(8, codes.nlist // part))

            def compared(query: Vectors, p: Any = params, r: int = refine) -> Any:
                at = codes.search(query[None], r * K, params=p)[1][0]
                at = at[at >= 0]
                return at[np.argsort(-(made[at] @ query))[:K]]

            row(f"IVF-PQ, 1/{part}, {refine} x {K} compared", codes, took, compared)


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=200, help="of the embedder")
        parser.add_argument("--passages", type=int, default=60_000)

    args = parse(__doc__, arguments, smoke={"steps": 3, "passages": 600})
    if sized(False, True):
        segments.FLAT = 200
    documents = functions()
    texts = [part for _, _, text in passages() for _, part in cut(text, 300) if part.strip()]
    texts = [texts[n] for n in np.random.default_rng(0).permutation(len(texts))[: args.passages]]
    with tempfile.TemporaryDirectory() as place:
        held_out = set(range(0, len(documents), 5))
        embedder = trained(Path(place), documents, held_out, args.steps)
        made = embedder.embed([words(text) or "?" for text in texts])
        sentences = [words(documents[n].sentence) for n in sorted(held_out)][: sized(300, 20)]
        queries = embedder.embed(sentences)
        study(made, queries)
        index = open_index(Path(place) / "index", writable=True, encode=embedder.embed, encoder="e")
        for first in range(0, len(texts), BATCH):
            index.write(
                [
                    SearchDocument(
                        str(n),
                        n,
                        [Passage(0, texts[n], {"e": made[n]})],
                        fields={"part": str(n % 100), "half": n % 2},
                    )
                    for n in range(first, min(first + BATCH, len(texts)))
                ]
            )
        index.close()
        reader = open_index(Path(place) / "index", encode=embedder.embed, encoder="e")
        rows = np.arange(len(texts))
        for variant, filters, fit in (
            ("all", {}, rows),
            ("one-percent", {"part": "7"}, rows[rows % 100 == 7]),
            ("half", {"half": 1}, rows[rows % 2 == 1]),
        ):  # fmt: skip
            right, began = best(queries, made, fit), time.perf_counter()
            found = [
                [
                    int(hit.id)
                    for hit in reader.search(SearchQuery(text, K, "vectors", filters, marks=False)).hits
                ]
                for text in sentences
            ]
            took = (time.perf_counter() - began) / len(sentences) * 1e3
            value = recall(found, right)
            claim(
                f"recall@10 of vectors, {len(fit):,} of {len(texts):,} passages admitted, {took:.1f} ms per query",
                ours=value, peer=1.0, unit="recall", ratio=value, bar=0.95, ok=value >= 0.95, peer_name="exact",
                variant=variant,
            )  # fmt: skip
        reader.close()


if __name__ == "__main__":
    main()
