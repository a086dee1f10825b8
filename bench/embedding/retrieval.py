"""An embedder against TF-IDF: whose vectors find the rest of a file that nobody has trained on?

    .venv/bin/python -m pip install scikit-learn
    .venv/bin/python bench/embedding/retrieval.py                 # 3 seeds of 120 seconds each
    .venv/bin/python bench/embedding/retrieval.py --quick         # 1 seed of 10 seconds

The corpus is this interpreter's standard library, curated as quickstart does; the training split teaches the tokenizer, the
embedder and TF-IDF's weights. Of each file of the test split, in both directions and for all alike:

    halves   the second half is sought among the second halves of all files, given the first
    spans    one of two disjoint spans of 16 to 64 ids is sought among all, given the other; the mean of 4 draws

One thread trains, and seconds are of its CPU time: what other work does beside it does not count. How many steps fit is
measured before, since the weights are to follow from steps and a seed.

Peers on the same texts: the same encoder untrained (a random projection of the words in a text, nearly) and scikit-learn's
`TfidfVectorizer`, as it comes (words) and as it did best on the validation split out of five settings (sublinear counts of
3 to 5 letters inside of words). Chance is 1 / N. The embedder's rates and its MLP's width were chosen on the validation
split too, by a handful of runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from whorl.embedding.embedder import embed_ids
from whorl.embedding.train import EmbedJob, SpanPairs, build_encoder, recall, train_embedder
from whorl.models.encoder import EncoderConfig
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tokens.shards import TokenSet
from whorl.tokens.tokenizer import Ids, Tokenizer
from whorl.tracking.progress import Progress
from whorl.tracking.seeds import numpy_rng

RECIPE = """
name = "library"
[steps.ingest]
sources = ["python-stdlib"]
[steps.curate]
parents = ["ingest"]
validation_bytes = 4000000
test_bytes = 4000000
max_held_out_share = 0.3
[steps.tokenizer]
parents = ["ingest", "curate"]
vocab_size = 8192
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
"""
LEAST, MOST, DRAWS = 16, 64, 4
TIMED = 15  # steps that are timed to know how many fit

Sides = tuple[list[Ids], list[Ids]]
Found = dict[str, tuple[float, float]]  # task -> recall@1, recall@10


def tasks(tokens: TokenSet, split: str) -> dict[str, list[Sides]]:
    """The pairs of each task; several draws are averaged."""
    pairs = SpanPairs(tokens.split(split), MOST, LEAST)
    whole = [pairs.split.document(number)[1:-1] for number in pairs.documents]
    halves = [ids[: len(ids) // 2] for ids in whole], [ids[len(ids) // 2 :] for ids in whole]
    spans = [pairs.spans(pairs.documents, numpy_rng(0, "bench", draw)) for draw in range(DRAWS)]
    return {"halves": [halves], "spans": [(drawn.first, drawn.second) for drawn in spans]}


def measured(embed: Callable[[list[Ids]], Any], found: dict[str, list[Sides]]) -> Found:
    """Recall@1 and @10 by task; embed: texts -> unit rows, an array or a sparse matrix."""
    result = {}
    for task, draws in found.items():
        scores = []
        for first, second in draws:
            x, y = embed(first), embed(second)
            x, y = (v.toarray() if hasattr(v, "toarray") else v for v in (x, y))
            scores.append([recall(x, y, k) for k in (1, 10)])
        result[task] = tuple(float(score) for score in np.mean(scores, axis=0))
    return result


def tf_idf(tokens: TokenSet, words: Tokenizer) -> Iterator[tuple[str, Callable[[list[Ids]], Any]]]:
    """scikit-learn's vectors, weighted by the training split. Raises: ImportError without it."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    def texts(parts: Any) -> list[str]:
        return [words.decode(ids).decode("utf-8", "replace") for ids in parts]

    train = texts(ids[1:-1] for ids in tokens.split("train").iter_documents())
    best = {
        "sublinear_tf": True,
        "analyzer": "char_wb",
        "ngram_range": (3, 5),
        "max_features": 200_000,
        "dtype": np.float32,
    }
    for name, settings in (("TF-IDF, words", {}), ("TF-IDF, letters", best)):
        vectorizer = TfidfVectorizer(**settings).fit(train)
        yield name, lambda parts, v=vectorizer: v.transform(texts(parts))


def job_of(folder: Path, vocab_size: int, a: argparse.Namespace, seed: int, steps: int) -> EmbedJob:
    """The step `embedder`'s own settings."""
    shape = EncoderConfig(
        vocab_size=vocab_size, d_model=a.width, n_layers=1, n_heads=4, mlp_hidden=64, max_length=MOST
    )
    return EmbedJob(
        tokens=str(folder), encoder=shape, min_span=LEAST, steps=steps, seed=seed, evaluations=1, dtype=a.dtype
    )  # fmt: skip


def steps_within(folder: Path, vocab_size: int, a: argparse.Namespace, seconds: float) -> int:
    """How many steps fit, by the median of a few."""
    ends: list[float] = []
    train_embedder(job_of(folder, vocab_size, a, 0, TIMED), lambda *_: ends.append(time.process_time()))
    taken = [after - before for before, after in pairwise(ends[:-1])]  # behind the last, recall is measured
    return max(1, int(seconds / statistics.median(taken)))


def main() -> None:
    from bench._run import claim

    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--split", choices=["validation", "test"], default="test")
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    seconds, seeds = (10.0, 1) if a.quick else (a.seconds, a.seeds)
    with tempfile.TemporaryDirectory() as place:
        made = run_recipe(
            parse_recipe(RECIPE, "library.toml"), Store(Path(place)), Progress.silent()
        ).artifacts
        folder = made["tokens"].path
        tokens, words = TokenSet(folder), Tokenizer.load(made["tokenizer"].path)
        found = tasks(tokens, a.split)
        n = len(found["halves"][0][0])
        print(
            f"{tokens.split('train').n_documents:,} files to learn from, {n} held out; chance {1 / n:.4f} and {10 / n:.4f}"
        )
        print(f"{'':24} {'halves: @1':>10} {'@10':>6} {'spans: @1':>11} {'@10':>6}   training")

        def row(name: str, r: Found, note: str = "") -> None:
            (h1, h10), (s1, s10) = r["halves"], r["spans"]
            print(f"{name:24} {h1:10.3f} {h10:6.3f} {s1:11.3f} {s10:6.3f}   {note}", flush=True)

        peers = {}
        for name, vectors in tf_idf(tokens, words):
            peers[name] = measured(vectors, found)
            row(name, peers[name])
        steps = steps_within(folder, tokens.vocab_size, a, seconds)
        ours = []
        for seed in range(seeds):
            job = job_of(folder, tokens.vocab_size, a, seed, steps)
            untrained = build_encoder(job)
            row(f"untrained, seed {seed}", measured(lambda ids, e=untrained: embed_ids(e, ids), found))
            began = time.process_time()
            trained = train_embedder(job)
            took = time.process_time() - began
            ours.append(measured(lambda ids, e=trained: embed_ids(e, ids), found))
            row(f"trained, seed {seed}", ours[-1], f"{steps:,} steps, {took:.0f} s")
    for task in found:
        for i, k in enumerate((1, 10)):
            samples = [each[task][i] for each in ours]
            mean, peer = sum(samples) / len(samples), max(each[task][i] for each in peers.values())
            claim(
                f"recall@{k} of the other part among {n} held-out files ({task}) after {seconds:.0f} s, "
                f"mean of {seeds} seeds, against the better TF-IDF",
                ours=mean, peer=peer, unit="recall", ratio=mean / peer, bar=1.0, ok=mean >= peer, quick=a.quick,
                samples=samples,
            )  # fmt: skip


if __name__ == "__main__":
    main()
