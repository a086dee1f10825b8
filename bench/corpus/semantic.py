"""Semantic pairs: multi-probe search against an exhaustive one, by recall and by dot products.

    python bench/corpus/semantic.py [--documents 20000] [--save]

Vectors are those of real texts: pieces of the standard library's sources of about 1,000 characters. They are TF-IDF of words
in 128 dimensions by a truncated SVD (latent semantic analysis, Deerwester et al. 1990). Every tenth piece is followed by a
reworded copy, in which a fifth of the words is left out or exchanged. A pair is semantic if its cosine reaches 0.9.

The exhaustive search computes n (n - 1) / 2 products. Those of multi-probe include the training of k-means, the assignment,
and the confirmation of pairs.
"""

from __future__ import annotations

import random
import re
import sys
import sysconfig
import time
import zlib
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np
from bench._run import claim, parse
from numpy.typing import NDArray

from whorl.corpus.deduplication.semantic.search import Pairs, similar_pairs
from whorl.corpus.deduplication.semantic.settings import SearchConfig
from whorl.corpus.deduplication.semantic.vectors import Vectors

PIECE, HASHES, WIDTH, SIMILARITY = 1000, 8192, 128, 0.9


def pieces(n: int) -> list[str]:
    """Pieces of sources, and reworded copies of every tenth."""
    rng, out = random.Random(0), list[str]()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    rng.shuffle(files)
    for file in files:
        if "site-packages" in file.parts:
            continue
        text = file.read_text(errors="replace")
        for at in range(0, len(text) - PIECE // 2, PIECE):
            out.append(text[at : at + PIECE])
            if len(out) % 11 == 10:
                words, others = out[-1].split(), out[rng.randrange(len(out))].split() or [""]
                changed = (w if rng.random() > 0.2 else rng.choice(["", rng.choice(others)]) for w in words)
                out.append(" ".join(changed))
        if len(out) >= n:
            break
    return out[:n]


def embed(texts: list[str]) -> NDArray[np.float32]:
    """Vectors of latent semantic analysis: [n, WIDTH]."""
    counts = np.zeros((len(texts), HASHES), np.float32)
    for row, text in enumerate(texts):
        for word, n in Counter(re.findall(r"\w+", text)).items():
            counts[row, zlib.crc32(word.encode()) % HASHES] += 1 + np.log(n)
    counts *= np.log(len(texts) / (1 + (counts > 0).sum(axis=0)))
    counts /= np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-6)
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(counts.T @ (counts @ rng.normal(size=(HASHES, WIDTH + 16)).astype(np.float32)))[0]
    _, _, directions = np.linalg.svd(counts @ basis, full_matrices=False)
    return np.asarray(counts @ (basis @ directions[:WIDTH].T), np.float32)


def numbers(pairs: Pairs, n: int) -> NDArray[np.int64]:
    return pairs.later * n + pairs.earlier


def timed(values: NDArray[np.float32], config: SearchConfig) -> tuple[Pairs, float]:
    begin = time.perf_counter()
    return similar_pairs(values, config), time.perf_counter() - begin


def exhaustive(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], float]:
    """Numbers of all similar pairs by a plain product of all, and the seconds it takes."""
    begin, n, found = time.perf_counter(), len(values), []
    for first in range(0, n, 1024):
        i, j = np.nonzero(values[first : first + 1024] @ values.T >= SIMILARITY - 1e-6)
        i += first
        found.append((i * n + j)[i > j])
    return np.sort(np.concatenate(found)), time.perf_counter() - begin


def main() -> None:
    args = parse(
        __doc__, lambda p: p.add_argument("--documents", type=int, default=20_000), smoke={"documents": 2000}
    )
    values = np.unique(Vectors.of(embed(pieces(args.documents)) + 1e-9, "lsa").values, axis=0)
    values = values[np.random.default_rng(1).permutation(len(values))]
    n = len(values)
    all_products = n * (n - 1) / 2
    every, seconds = exhaustive(values)
    pairs, ours_seconds = timed(values, SearchConfig(similarity=SIMILARITY))
    recall = len(np.intersect1d(numbers(pairs, n), every)) / len(every)
    products = round(pairs.n_products / all_products, 4)
    samples = [
        {"search": "exhaustive", "seconds": round(seconds, 2), "pairs": len(every), "vectors": n},
        {
            "search": "multi-probe", "recall": round(recall, 4), "products": products,
            "seconds": round(ours_seconds, 2),
        },
    ]  # fmt: skip
    claim(
        "Multi-probe finds the semantic pairs of an exhaustive search: recall, with a tenth of its products",
        ours=round(recall, 4), peer=0.95, peer_name="target", unit="recall", ratio=round(recall, 4), bar=0.95,
        ok=recall >= 0.95 and products <= 0.1, samples=samples,
    )  # fmt: skip


if __name__ == "__main__":
    main()
