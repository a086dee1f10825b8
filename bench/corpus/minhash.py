"""Near duplicates by MinHash, end to end, against datatrove's four stages and against rensa's signatures and LSH.

    python bench/corpus/minhash.py --peer PYTHON [--documents 200000] [--rounds 3] [--quick] [--save]

Ours reads Parquet, signs, joins, verifies and writes the documents that stay. datatrove reads and writes the same documents
as JSONL. All have signatures of 128 hashes in 32 bands of 4 over shingles of 5 words. The words of datatrove are those of
spaCy (its default) or separated by white space. The time of rensa is that of signatures and LSH, from shingles in memory.

Synthetic documents have 150 words of a Zipf distribution. Of every eight originals, five have no copy, and the others one to
three, with one to three words changed; pairs of the same original are the planted ones. The other documents are the standard
library's sources. The similarity of every removal is computed again from sets of tuples in Python. Peers that are not
installed in PYTHON are left out. `--quick` takes 20,000 documents, once.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse
from bench.corpus.support.processes import start

from whorl.corpus.deduplication.settings import MinHashConfig

FILES = 4
WORDS = 150
WORD_KINDS = ("spaces", "spacy")
OWN = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy, pyarrow, pyarrow.parquet
from whorl.corpus.deduplication import MinHashConfig, find_near_duplicates
from whorl.corpus.deduplication.native import library
from whorl.corpus.mapreduce import LocalPool, UnitStore

class Timed(UnitStore):
    seconds = {}
    def run(self, stage, units, executor, *more):
        begin = time.perf_counter()
        found = super().run(stage, units, executor, *more)
        self.seconds[stage.function.split(":")[1]] = round(time.perf_counter() - begin, 4)
        return found

library()
folder, out, pool = Path(sys.argv[1]), Path(sys.argv[2]), LocalPool(int(sys.argv[3]))
files, store = sorted(folder.glob("documents-*.parquet")), Timed(out / "units")
begin = time.perf_counter()
found = find_near_duplicates(files, MinHashConfig(), store, pool)
(out / "kept").mkdir()

def keep(number, path):
    table = pyarrow.parquet.read_table(path)
    stays = numpy.ones(len(table), bool)
    stays[found.removed[found.removed >> 32 == number] & 0xFFFFFFFF] = False
    pyarrow.parquet.write_table(table.filter(pyarrow.array(stays)), out / "kept" / path.name, compression="zstd")

with ThreadPoolExecutor(pool.workers) as threads:
    list(threads.map(keep, range(len(files)), files))
seconds = time.perf_counter() - begin
first = numpy.cumsum([0, *found.n_documents])
rows = [(first[x >> 32] + (x & 0xFFFFFFFF)).tolist() for x in (found.removed, found.matched)]
print(json.dumps({"seconds": seconds, "stages": store.seconds,
                  "bytes": sum(p.stat().st_size for p in (out / "units").rglob("*") if p.is_file()),
                  "removed": rows[0], "matched": rows[1]}))
"""
DATATROVE = """
import json, sys, time
from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.word_tokenizers import WordTokenizer

class Spaces(WordTokenizer):
    def word_tokenize(self, text):
        return text.split()
    def sent_tokenize(self, text):
        return [text]
    def span_tokenize(self, text):
        return [(0, len(text))]

def main():
    folder, out, words, bands, rows, files = *sys.argv[1:4], *map(int, sys.argv[4:7])
    config = MinhashConfig(n_grams=5, num_buckets=bands, hashes_per_bucket=rows)
    language = "en" if words == "spacy" else Spaces()
    import numpy
    begin = time.perf_counter()
    for number, (steps, tasks) in enumerate((
        ([JsonlReader(folder, glob_pattern="*.jsonl"),
          MinhashDedupSignature(f"{out}/signatures", config=config, language=language)], files),
        ([MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config)], bands),
        ([MinhashDedupCluster(f"{out}/buckets", f"{out}/clusters", config=config, save_cluster_id=True)], 1),
        ([JsonlReader(folder, glob_pattern="*.jsonl"), MinhashDedupFilter(f"{out}/clusters"),
          JsonlWriter(f"{out}/kept", compression=None)], files),
    )):
        LocalPipelineExecutor(steps, tasks=tasks, workers=2, logging_dir=f"{out}/logs{number}").run()
    seconds = time.perf_counter() - begin
    size = sum(p.stat().st_size for name in ("signatures", "buckets", "clusters")
               for p in Path(out, name).rglob("*") if p.is_file())
    clusters = [numpy.fromfile(p, "<u4").tolist() if (p := Path(out, "clusters", f"{f:06d}.clusters")).exists() else []
                for f in range(files)]
    kept = sum(len(p.read_bytes().splitlines()) for p in Path(out, "kept").iterdir())
    print(json.dumps({"seconds": seconds, "bytes": size, "clusters": clusters, "kept": kept}))

if __name__ == "__main__":
    main()
"""
RENSA = """
import json, sys, time
from pathlib import Path
import rensa

texts = [json.loads(line)["text"] for p in sorted(Path(sys.argv[1]).glob("*.jsonl")) for line in p.open()]
bands, hashes = int(sys.argv[2]), int(sys.argv[3])
begin = time.perf_counter()
shingles = []
for text in texts:
    words = text.split()
    shingles.append([" ".join(words[i : i + 5]) for i in range(max(len(words) - 4, 1))])
ready = time.perf_counter()
matrix = rensa.RMinHash.digest_matrix_from_token_sets(shingles, hashes, 42)
index = rensa.RMinHashLSH(threshold=0.5, num_perm=hashes, num_bands=bands)
index.query_duplicate_flags_matrix_one_shot(matrix)
end = time.perf_counter()
# Which documents share a bucket, for F1: not timed.
signed = rensa.RMinHash.from_token_sets(shingles, hashes, 42)
index.insert_pairs(list(enumerate(signed)))
parent = list(range(len(texts)))
def root(i):
    while parent[i] != i:
        parent[i] = i = parent[parent[i]]
    return i
for i, others in enumerate(index.query_all(signed)):
    for j in others:
        a, b = root(i), root(j)
        parent[max(a, b)] = min(a, b)
print(json.dumps({"seconds": end - ready, "shingling": ready - begin, "labels": [root(i) for i in range(len(texts))]}))
"""


@dataclass(frozen=True)
class Documents:
    """A folder of documents-*.parquet and the same rows as *.jsonl. family: [n] the original of each, or None."""

    folder: Path
    texts: list[str]
    family: NDArray[np.int64] | None


def write(folder: Path, texts: list[str], family: NDArray[np.int64] | None = None) -> Documents:
    folder.mkdir()
    per = -(-len(texts) // FILES)
    for f in range(FILES):
        rows = range(f * per, min((f + 1) * per, len(texts)))
        table: Any = pa.table({"id": [f"{i:032x}" for i in rows], "text": [texts[i] for i in rows]})
        pq.write_table(table, folder / f"documents-{f:05d}.parquet", row_group_size=4096, compression="zstd")
        with (folder / f"{f:05d}.jsonl").open("w", encoding="utf-8") as out:
            for i in rows:
                out.write(json.dumps({"id": f"{i:032x}", "text": texts[i]}) + "\n")
    return Documents(folder, texts, family)


def synthetic(folder: Path, n: int) -> Documents:
    """Write n documents with planted near copies, in random order."""
    rng = np.random.default_rng(0)
    # Without digits, which datatrove replaces by default.
    digits = str.maketrans("0123456789abcdef", "ghijklmnopabcdef")
    vocabulary = np.array([f"w{i:x}".translate(digits) for i in range(50000)])
    texts, family = list[str](), list[int]()
    while len(texts) < n:
        original, number = rng.zipf(1.3, WORDS) % len(vocabulary), len(texts)
        for copy in range(int(rng.choice([1, 1, 1, 1, 1, 2, 3, 4]))):
            words = original.copy()
            if copy:
                changes = int(rng.integers(1, 4))
                words[rng.integers(0, WORDS, changes)] = rng.integers(0, len(vocabulary), changes)
            texts.append(" ".join(vocabulary[words]))
            family.append(number)
    order = rng.permutation(n)
    return write(folder, [texts[i] for i in order], np.array(family)[order])


def library_sources(folder: Path, n: int) -> Documents:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    return write(folder, [path.read_text("utf-8", "replace") for path in files[:n]])


def ours(documents: Documents, workers: int, pause: float = 0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        return start([sys.executable, "-c", OWN, str(documents.folder), out, str(workers)], pause)


def datatrove(python: str, documents: Documents, words: str) -> dict[str, Any]:
    config = MinHashConfig()
    with tempfile.TemporaryDirectory() as out:
        script = Path(out, "stages.py")
        script.write_text(DATATROVE)
        numbers = [str(config.bands), str(config.rows), str(FILES)]
        return start([python, str(script), str(documents.folder), out, words, *numbers], 0.25)


def rensa(python: str, documents: Documents) -> dict[str, Any]:
    config = MinHashConfig()
    return start([python, "-c", RENSA, str(documents.folder), str(config.bands), str(config.hashes)], 0)


def has(python: str, module: str) -> bool:
    return not subprocess.run([python, "-c", f"import {module}"], stderr=subprocess.DEVNULL).returncode


def own_labels(found: dict[str, Any], n: int) -> NDArray[np.int64]:
    labels = np.arange(n)
    labels[found["removed"]] = found["matched"]
    return labels


def datatrove_labels(found: dict[str, Any], n: int) -> NDArray[np.int64]:
    labels, per = np.arange(n), -(-n // FILES)
    for file, pairs in enumerate(found["clusters"]):
        labels[np.array(pairs[::2], np.int64) + file * per] = n + np.array(pairs[1::2], np.int64)
    return labels


def f1(labels: Any, family: NDArray[np.int64]) -> float:
    """Return F1 of the pairs with the same label against the pairs of the same family."""

    def pairs(*columns: NDArray[np.int64]) -> int:
        sizes = np.unique(np.stack(columns), axis=1, return_counts=True)[1]
        return int((sizes * (sizes - 1) // 2).sum())

    labels = np.asarray(labels)
    return 2 * pairs(labels, family) / max(pairs(labels) + pairs(family), 1)


def lowest_similarity(texts: list[str], found: dict[str, Any]) -> float:
    """Return the lowest Jaccard similarity of a removed document and the one it names, from sets of tuples."""

    def shingles(text: str) -> set[tuple[bytes, ...]]:
        words = re.findall(rb"[0-9A-Za-z_\x80-\xff]+", text.encode())
        return {tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1))}

    lowest = 1.0
    for a, b in zip(found["removed"], found["matched"], strict=True):
        first, second = shingles(texts[a]), shingles(texts[b])
        lowest = min(lowest, len(first & second) / len(first | second))
    return lowest


def claim_datatrove(
    what: str, own: list[dict[str, Any]], other: dict[str, Any], variant: str, quick: bool
) -> None:
    seconds = statistics.median(found["seconds"] for found in own)
    ratio = other["seconds"] / seconds
    claim(
        f"MinHash end to end on {what}, two workers", ours=round(seconds, 3), peer=round(other["seconds"], 2),
        peer_name="datatrove's four stages", unit="s", ratio=ratio, bar=25, ok=ratio >= 25, variant=variant, quick=quick,
        samples=[{"seconds": round(found["seconds"], 3), **found["stages"]} for found in own],
    )  # fmt: skip


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument(
                "--peer", default=sys.executable, help="interpreter with datatrove and rensa"
            ),
            parser.add_argument("--documents", type=int, default=200_000),
            parser.add_argument("--rounds", type=int, default=3),
            parser.add_argument("--quick", action="store_true", help="20,000 documents, one round"),
            parser.add_argument(
                "--words", nargs="+", choices=WORD_KINDS, default=WORD_KINDS, help="datatrove's words"
            ),
        ),
        smoke={"documents": 400, "rounds": 1},
    )
    args.rounds = 1 if args.quick else args.rounds
    n = min(args.documents, 20_000) if args.quick else args.documents
    quick = n < 200_000
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = synthetic(folder / "synthetic", n)
        sources = library_sources(folder / "sources", 100 if args.smoke else 100_000)
        assert made.family is not None
        two = [ours(made, 2) for _ in range(args.rounds)]
        on_sources = [ours(sources, 2) for _ in range(args.rounds)]
        peak = ours(made, 2, 0.02)["peak"]
        quality = {"datatrove": 0.0, "rensa": 0.0}
        if has(args.peer, "rensa"):
            began = time.perf_counter()
            one = [ours(made, 1) for _ in range(args.rounds)]
            other = min(
                (rensa(args.peer, made) for _ in range(args.rounds)), key=lambda found: found["seconds"]
            )
            quality["rensa"] = f1(other["labels"], made.family)
            seconds = statistics.median(found["seconds"] for found in one)
            claim(
                f"MinHash end to end on {n:,} synthetic documents in one process, against signatures and LSH alone",
                ours=round(seconds, 3), peer=round(other["seconds"], 3), peer_name="rensa", unit="s",
                ratio=other["seconds"] / seconds, bar=1, ok=seconds <= other["seconds"], variant="rensa", quick=quick,
                samples=[{"rensa_shingles": round(other["shingling"], 3)},
                         *({"seconds": round(found["seconds"], 3), **found["stages"]} for found in one)],
            )  # fmt: skip
            print(f"rensa: {time.perf_counter() - began:.0f} s")
        if has(args.peer, "datatrove"):
            for words in args.words:
                variant = "spaces" if words == "spaces" else ""
                told = "words by white space" if variant else "words by spaCy, its default"
                other = datatrove(args.peer, sources, words)
                claim_datatrove(
                    f"{len(sources.texts):,} sources of the standard library ({told})",
                    on_sources, other, f"sources{variant and '_' + variant}", quick,
                )  # fmt: skip
                other = datatrove(args.peer, made, words)
                quality["datatrove"] = max(quality["datatrove"], f1(datatrove_labels(other, n), made.family))
                claim_datatrove(f"{n:,} synthetic documents ({told})", two, other, variant, quick)
                print(f"datatrove, {told}: {other['seconds']:.1f} s, {other['kept']} of {n} stay")
            size = two[0]["bytes"]
            claim(
                f"Intermediate files of MinHash for {n:,} documents", ours=round(size / 1e6, 1),
                peer=round(other["bytes"] / 1e6, 1), peer_name="datatrove", unit="MB", ratio=size / other["bytes"],
                bar=1, ok=size <= other["bytes"], variant="intermediates", quick=quick,
                samples=[{"text_bytes": sum(map(len, made.texts)),
                          "parquet_bytes": sum(p.stat().st_size for p in made.folder.glob("*.parquet"))}],
            )  # fmt: skip
            claim(
                f"Peak memory of MinHash on {n:,} documents, of all processes", ours=round(peak / 2**30, 3),
                peer=round(other["peak"] / 2**30, 3), peer_name="datatrove", unit="GiB", ratio=peak / 2**30, bar=2,
                ok=peak < 2 * 2**30, variant="memory", quick=quick,
            )  # fmt: skip
        sizes, times = [n // 4, n // 2], []
        for size in sizes:
            part = synthetic(folder / f"part{size}", size)
            times.append(statistics.median(ours(part, 2)["seconds"] for _ in range(args.rounds)))
        times.append(statistics.median(found["seconds"] for found in two))
        growth = times[2] / times[0] / 4
        claim(
            f"Time per document on {n:,} documents is no more than on a quarter of them",
            ours=round(times[2] / n * 1e6, 1), peer=round(times[0] / sizes[0] * 1e6, 1), peer_name="a quarter",
            unit="us/document", ratio=growth, bar=1.1, ok=growth <= 1.1, variant="linear", quick=quick,
            samples=[[size, round(t, 3)] for size, t in zip([*sizes, n], times, strict=True)],
        )  # fmt: skip
        similarity = MinHashConfig().similarity
        lowest = [lowest_similarity(d.texts, f) for d, f in ((made, two[0]), (sources, on_sources[0]))]
        claim(
            "The lowest exact similarity of a removal reaches the threshold", ours=round(min(lowest), 4),
            peer=similarity, peer_name="the threshold", unit="Jaccard", ratio=min(lowest), bar=similarity,
            ok=min(lowest) >= similarity, variant="verified", quick=quick,
            samples=[{"synthetic": round(lowest[0], 4), "removed": len(two[0]["removed"])},
                     {"sources": round(lowest[1], 4), "removed": len(on_sources[0]["removed"])}],
        )  # fmt: skip
        own = f1(own_labels(two[0], n), made.family)
        best = max(quality.values())
        claim(
            f"F1 on planted pairs of {n:,} documents, no lower than the peers'", ours=round(own, 5), peer=round(best, 5),
            peer_name="the better of datatrove and rensa" if best else "no peer", unit="F1", ratio=own, bar=0.95,
            ok=own >= max(0.95, best), variant="f1", quick=quick, samples=[quality],
        )  # fmt: skip


if __name__ == "__main__":
    main()
