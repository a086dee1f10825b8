"""Speed of the embedded index: queries against bare tantivy and SQLite's FTS5, hybrid latency while indexing, indexing.

    python bench/loop/search_speed.py [--rounds 5]

Documents are passages of at most 1,000 characters of this interpreter's standard library with its tests; queries are first
sentences of docstrings. Contenders take turns on the same texts and queries, in one thread, and return the ten best with
title and text.

1. text queries/s: at least 0.8 times tantivy (stems, its query parser), without highlights on both sides;
2. text queries/s: at least twice SQLite FTS5 (porter stems, `ORDER BY rank`, any of the words);
3. hybrid queries, p99 while another process writes 250 documents each half second: at most twice that without it. Vectors
   are random, and so is that of a query, which costs nothing;
4. indexing without vectors: at least half the documents/s of tantivy with its stems and stored fields, commits of 5,000.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tantivy

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse, sized
from bench.loop.search_quality import functions

from whorl.loop.search.passages import cut
from whorl.search.analysis import Analysis
from whorl.search.documents import Passage, SearchDocument, SearchQuery, Vectors
from whorl.search.index import open_index

K, BATCH, DIM = 10, sized(5000, 200), 128
Text = tuple[str, str, str]  # id, title, text
WRITER = """
import sys, time
from bench.loop.search_speed import encode, passages
from whorl.search.documents import Passage, SearchDocument
from whorl.search.index import open_index
texts, number = passages(), 10**9
index = open_index(sys.argv[1], writable=True)
print("ready", flush=True)
while True:
    began = time.monotonic()
    some = [texts[(number + n) % len(texts)] for n in range(250)]
    vectors = encode([each[2] for each in some])
    index.write([
        SearchDocument(f"new {number + n}", number + n, [Passage(0, text, {"e": vectors[n]})], title)
        for n, (_, title, text) in enumerate(some)
    ])
    number += 250
    time.sleep(max(0, 0.5 - (time.monotonic() - began)))
"""


def passages() -> list[Text]:
    """Passages of the standard library."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), list[Text]()
    for path in sorted(root.rglob("*.py"))[: sized(None, 60)]:
        if "site-packages" not in path.parts:
            name = str(path.relative_to(root))
            text = path.read_text("utf-8", errors="replace")
            found += [(f"{name}:{start}", name, part) for start, part in cut(text, 1000)]
    return found


def encode(texts: Sequence[str]) -> Vectors:
    made = np.random.default_rng(len(texts[0])).standard_normal((len(texts), DIM)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def ours(folder: Path, texts: Sequence[Text], vectors: Vectors | None = None) -> float:
    """Write the index; return seconds."""
    index = open_index(folder, writable=True)
    began = time.perf_counter()
    for first in range(0, len(texts), BATCH):
        index.write(
            [
                SearchDocument(
                    id_, n, [Passage(0, text, {} if vectors is None else {"e": vectors[n]})], title
                )
                for n, (id_, title, text) in enumerate(texts[first : first + BATCH], first)
            ]
        )
    took = time.perf_counter() - began
    index.close()
    return took


def bare(folder: Path, texts: Sequence[Text]) -> float:
    """Write an index of tantivy; return seconds."""
    folder.mkdir()
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw")
    for name in ("title", "text"):
        builder.add_text_field(name, stored=True, tokenizer_name="en_stem")
    index = tantivy.Index(builder.build(), path=str(folder))
    writer = index.writer(64_000_000, 1)
    began = time.perf_counter()
    for first in range(0, len(texts), BATCH):
        for id_, title, text in texts[first : first + BATCH]:
            writer.add_document(tantivy.Document(id=id_, title=title, text=text))
        writer.commit()
    took = time.perf_counter() - began
    writer.wait_merging_threads()
    return took


def query_bare(folder: Path) -> Callable[[str], object]:
    index = tantivy.Index.open(str(folder))
    searcher = index.searcher()

    def search(text: str) -> object:
        query, _ = index.parse_query_lenient(text, ["title", "text"])
        return [(score, searcher.doc(address).to_dict()) for score, address in searcher.search(query, K).hits]

    return search


def query_fts5(path: Path, texts: Sequence[Text]) -> Callable[[str], object]:
    database, analysis = sqlite3.connect(path), Analysis()
    database.execute(
        "CREATE VIRTUAL TABLE t USING fts5(id UNINDEXED, title, text, tokenize='porter unicode61')"
    )
    database.executemany("INSERT INTO t VALUES (?, ?, ?)", texts)
    database.execute("INSERT INTO t(t) VALUES ('optimize')")
    database.commit()

    def search(text: str) -> object:
        words = " OR ".join(f'"{word}"' for word in dict.fromkeys(analysis.words(text)))
        return database.execute(
            "SELECT id, title, text, rank FROM t WHERE t MATCH ? ORDER BY rank LIMIT ?", (words, K)
        ).fetchall()

    return search


def per_second(search: Callable[[str], object], queries: Sequence[str]) -> float:
    began = time.perf_counter()
    for text in queries:
        search(text)
    return len(queries) / (time.perf_counter() - began)


def latencies(search: Callable[[str], object], queries: Sequence[str]) -> list[float]:
    """Milliseconds of each query, 50 queries per second."""
    found = []
    for text in queries:
        began = time.perf_counter()
        search(text)
        found.append((time.perf_counter() - began) * 1e3)
        time.sleep(max(0.0, 0.02 - found[-1] / 1e3))
    return found


@contextmanager
def indexing(folder: Path) -> Iterator[None]:
    """A process that writes meanwhile."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )  # fmt: skip
    assert writer.stdout is not None
    writer.stdout.readline()
    try:
        yield
    finally:
        writer.kill()
        writer.wait()


def main() -> None:
    args = parse(__doc__, lambda p: p.add_argument("--rounds", type=int, default=5), smoke={"rounds": 1})
    texts = passages()
    queries = [each.sentence for each in functions()][: sized(1000, 20)]
    print(f"{len(texts):,} passages, {len(queries):,} queries", flush=True)
    with tempfile.TemporaryDirectory() as place:
        run(Path(place), texts, queries, args)


def run(place: Path, texts: Sequence[Text], queries: Sequence[str], args: argparse.Namespace) -> None:
    built: dict[str, list[float]] = {"ours": [], "bare": []}
    for turn in range(args.rounds):
        for name, build in (("ours", ours), ("bare", bare)):
            built[name].append(len(texts) / build(place / f"{name}{turn}", texts))
        print({name: f"{rates[-1]:,.0f} documents/s" for name, rates in built.items()}, flush=True)
    index = open_index(place / "ours0")
    contenders = {
        "ours": lambda text: index.search(SearchQuery(text, K, "text", marks=False)),
        "tantivy": query_bare(place / "bare0"),
        "SQLite FTS5": query_fts5(place / "fts.db", texts),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, search in contenders.items():
            rates[name].append(per_second(search, queries))
        print({name: f"{found[-1]:,.0f} queries/s" for name, found in rates.items()}, flush=True)
    index.close()
    ours(place / "vectors", texts, encode(["x" * n for n in range(len(texts))]))
    hybrid = open_index(place / "vectors", encode=encode, encoder="e")
    idle, busy = list[float](), list[float]()
    for _ in range(args.rounds):
        idle += latencies(lambda text: hybrid.search(SearchQuery(text, K)), queries)
        with indexing(place / "vectors"):
            busy += latencies(lambda text: hybrid.search(SearchQuery(text, K)), queries)
        p99 = [float(np.quantile(each, 0.99)) for each in (idle, busy)]
        print(f"hybrid p99 {p99[0]:.1f} ms, while indexing {p99[1]:.1f} ms", flush=True)
    for peer, bar in (("tantivy", 0.8), ("SQLite FTS5", 2.0)):
        mean, other = statistics.median(rates["ours"]), statistics.median(rates[peer])
        claim(
            f"text queries among {len(texts):,} passages", ours=mean, peer=other, unit="queries/s", ratio=mean / other,
            bar=bar, ok=mean >= bar * other, samples=rates["ours"], peer_name=peer, variant=peer,
        )  # fmt: skip
    claim(
        "p99 of hybrid queries while 500 documents/s are indexed", ours=p99[1], peer=p99[0], unit="ms",
        ratio=p99[1] / p99[0], bar=2.0, ok=p99[1] <= 2 * p99[0], samples=p99, peer_name="idle", variant="indexing",
    )  # fmt: skip
    mean, other = statistics.median(built["ours"]), statistics.median(built["bare"])
    claim(
        "indexing without vectors", ours=mean, peer=other, unit="documents/s", ratio=mean / other, bar=0.5,
        ok=mean >= other / 2, samples=built["ours"], peer_name="tantivy", variant="build",
    )  # fmt: skip


if __name__ == "__main__":
    main()
