"""Retrieval on held-out files: an embedder trained for two minutes against TF-IDF.

    python -m pip install scikit-learn
    python bench/embedding/retrieval.py                 # 3 seeds of 120 seconds each
    python bench/embedding/retrieval.py --quick         # 1 seed of 6 seconds, on a part of the files

The corpus is this interpreter's standard library, curated as in quickstart. The tokenizer, the embedder and TF-IDF's
weights are trained on the training split. Two tasks use the files of the test split, in both directions:

    halves   retrieve the second half of a file among the second halves of all files, given the first
    spans    retrieve one of two disjoint spans of 16 to 64 ids among all, given the other; mean of 4 draws

Training uses one thread, and its time is CPU time, so that other load does not matter. The number of steps that fit is
measured first, because the weights depend on steps and seed only.

Peers on the same texts: the untrained encoder, and scikit-learn's `TfidfVectorizer` twice. One has its defaults
(words). The other has the best of five settings on the validation split: sublinear counts of 3 to 5 characters within
words. Chance is 1 / N. The embedder's learning rates and MLP width were chosen on the validation split too.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from bench._run import claim, parse, sized, smoke
from bench.plan._tiny_store import small_sources

from whorl.embedding.embedder import embed_ids
from whorl.embedding.job import EmbedJob
from whorl.embedding.span_pairs import SpanPairs, recall
from whorl.embedding.train import build_encoder, train_embedder
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
sources = ["{sources}"]
include = ["*.py"]
[steps.curate]
parents = ["ingest"]
validation_bytes = {held_out}
test_bytes = {held_out}
max_held_out_fraction = 0.3
[steps.tokenizer]
parents = ["ingest", "curate"]
vocab_size = {vocab_size}
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
"""
LEAST, MOST, DRAWS = 16, 64, sized(4, 1)
TIMED = sized(15, 3)  # steps that are timed to find how many fit

Sides = tuple[list[Ids], list[Ids]]
Found = dict[str, tuple[float, float]]  # task -> recall@1, recall@10


def tasks(tokens: TokenSet, split: str) -> dict[str, list[Sides]]:
    """The text pairs of each task, one item per draw; results are averaged over draws."""
    pairs = SpanPairs(tokens.split(split), MOST, LEAST)
    whole = [pairs.split.document(number)[1:-1] for number in pairs.documents]
    halves = [ids[: len(ids) // 2] for ids in whole], [ids[len(ids) // 2 :] for ids in whole]
    spans = [pairs.spans(pairs.documents, numpy_rng(0, "bench", draw)) for draw in range(DRAWS)]
    return {"halves": [halves], "spans": [(drawn.first, drawn.second) for drawn in spans]}


def measured(embed: Callable[[list[Ids]], Any], found: dict[str, list[Sides]]) -> Found:
    """Recall@1 and @10 by task. embed: texts -> rows of unit length, an array or a sparse matrix."""
    result = {}
    for task, draws in found.items():
        scores = []
        for first, second in draws:
            x, y = embed(first), embed(second)
            x, y = (v.toarray() if hasattr(v, "toarray") else v for v in (x, y))
            scores.append([recall(x, y, k) for k in (1, 10)])
        result[task] = tuple(float(score) for score in np.mean(scores, axis=0))
    return result


def tf_idf(
    tokens: TokenSet, words: Tokenizer, every: int
) -> Iterator[tuple[str, Callable[[list[Ids]], Any]]]:
    """scikit-learn's vectorizers, fitted on each `every`-th file of the training split."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    def texts(parts: Any) -> list[str]:
        return [words.decode(ids).decode("utf-8", "replace") for ids in parts]

    train = texts(ids[1:-1] for ids in islice(tokens.split("train").iter_documents(), None, None, every))
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


def job_of(folder: Path, vocab_size: int, a: Namespace, seed: int, steps: int) -> EmbedJob:
    """The settings of one training run."""
    shape = EncoderConfig(
        vocab_size=vocab_size, d_model=a.width, n_layers=1, n_heads=4, mlp_hidden=64, max_length=MOST
    )
    return EmbedJob(
        tokens=str(folder), encoder=shape, batch_size=sized(128, 4), min_span=LEAST,
        steps=steps, seed=seed, evaluations=1, dtype=a.dtype
    )  # fmt: skip


def steps_within(folder: Path, vocab_size: int, a: Namespace, seconds: float) -> int:
    """The number of steps that fit, by the median time of a few."""
    ends: list[float] = []
    train_embedder(job_of(folder, vocab_size, a, 0, TIMED), lambda *_: ends.append(time.process_time()))
    taken = [
        after - before for before, after in pairwise(ends[:-1])
    ]  # the last interval includes the evaluation
    return max(1, int(seconds / statistics.median(taken)))


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--split", choices=["validation", "test"], default="test")
    parser.add_argument("--quick", action="store_true")


def recipe(folder: Path, quick: bool) -> str:
    """The text of the recipe; under `--smoke` for a small corpus in `folder`."""
    sources = str(small_sources(folder / "sources")) if smoke() else "python-stdlib"
    held_out, vocab_size = sized((1_000_000 if quick else 4_000_000, 8192), (20_000, 512))
    return RECIPE.format(sources=sources, held_out=held_out, vocab_size=vocab_size)


def main() -> None:
    if not find_spec("sklearn"):
        print("skipped: needs scikit-learn (pip install scikit-learn)")
        sys.exit(77)
    a = parse(__doc__, arguments, smoke={"quick": True})
    torch.set_num_threads(1)
    seconds, seeds = sized((6.0, 1) if a.quick else (a.seconds, a.seeds), (0.5, 1))
    with tempfile.TemporaryDirectory() as place:
        made = run_recipe(
            parse_recipe(recipe(Path(place), a.quick), "library.toml"),
            Store(Path(place) / "store"),
            Progress.silent(),
        ).artifacts
        folder = made["tokens"].path
        tokens, words = TokenSet(folder), Tokenizer.load(made["tokenizer"].path)
        found = tasks(tokens, a.split)
        n = len(found["halves"][0][0])
        print(
            f"{tokens.split('train').n_documents:,} training files, {n} held out; chance {1 / n:.4f} and {10 / n:.4f}"
        )
        print(f"{'':24} {'halves: @1':>10} {'@10':>6} {'spans: @1':>11} {'@10':>6}   training")

        def row(name: str, r: Found, note: str = "") -> None:
            (h1, h10), (s1, s10) = r["halves"], r["spans"]
            print(f"{name:24} {h1:10.3f} {h10:6.3f} {s1:11.3f} {s10:6.3f}   {note}", flush=True)

        peers = {}
        for name, vectors in tf_idf(tokens, words, 6 if a.quick else 1):
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
                f"recall@{k} of the other part among {n} held-out files ({task}), {seconds:.0f} s, mean of {seeds} seeds",
                ours=mean, peer=peer, unit="recall", ratio=mean / peer, bar=1.0, ok=mean >= peer, quick=a.quick,
                samples=samples, peer_name="the better TF-IDF", variant=f"{task}-{k}",
            )  # fmt: skip


if __name__ == "__main__":
    main()
