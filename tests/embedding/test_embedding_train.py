"""Training an embedder: span pairs, learning, determinism and resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.support.tiny import make_document

from whorl.embedding.embedder import embed_ids
from whorl.embedding.train import (
    EmbedJob,
    SpanPairs,
    build_encoder,
    build_update,
    collate,
    encode_in_buckets,
    open_pairs,
    recall,
    train_embedder,
)
from whorl.errors import CheckpointError, DataError
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.objectives.contrastive import info_nce
from whorl.tokens.shards import TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import numpy_rng

TOPICS, SYNONYMS = 24, 30


def make_topics(folder: Path, *, train: int = 240, splits: tuple[str, ...] = ("train", "validation")) -> Path:
    """Write documents about 24 topics; each topic has 30 words of its vocabulary only.

    Two spans of a document share few words or none, so the model must learn the topics. One held-out document per topic; six
    documents are too short.
    """
    rng = np.random.default_rng(0)
    words = [" " + "".join(rng.choice(list("abcdefghijkl"), 5)) for _ in range(TOPICS * SYNONYMS)]

    def text(topic: int) -> str:
        return "".join(words[topic * SYNONYMS + i] for i in rng.integers(0, SYNONYMS, rng.integers(24, 48)))

    texts = {
        "train": [text(i % TOPICS) for i in range(train)] + [" no"] * 6,
        "validation": [text(i) for i in range(TOPICS)],
    }
    tokenizer = Tokenizer.train([w * 5 for w in words], 259 + 4 * len(words))
    folder.mkdir(parents=True, exist_ok=True)
    for split in splits:
        made = [make_document(t, i) for i, t in enumerate(texts[split])]
        write_shards(made, tokenizer, folder, split)
    return folder


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_topics(tmp_path_factory.mktemp("topics"))


def job(tokens: Path, **change: Any) -> EmbedJob:
    shape = EncoderConfig(
        vocab_size=TokenSet(tokens).vocab_size,
        d_model=32,
        n_layers=1,
        n_heads=2,
        mlp_hidden=32,
        max_length=12,
    )
    base = {
        "tokens": str(tokens),
        "encoder": shape,
        "min_span": 4,
        "batch_size": 48,
        "steps": 12,
        "lr_adamw": 0.01,
    }
    return EmbedJob.model_validate({**base, **change})


def weights(job: EmbedJob, **more: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in train_embedder(job, **more).named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def test_spans_are_disjoint_parts_of_one_document(topics: Path) -> None:
    pairs = SpanPairs(TokenSet(topics).split("train"), 12, 4)
    assert pairs.skipped == 6 and len(pairs) == 240
    sizes, earlier = [], 0
    numbered = np.arange(len(pairs.split), dtype=np.int64)  # ids that equal their position in the stream

    class Numbered:
        lengths, starts = pairs.split.lengths, pairs.split.starts

        def __getitem__(self, where: slice) -> Any:
            return numbered[where]

    where = SpanPairs(TokenSet(topics).split("train"), 12, 4)
    where.split = Numbered()  # type: ignore[assignment]
    for step in range(20):
        ids, places = pairs.batch(5, step, 48), where.batch(5, step, 48)
        for x, y, px, py, d in zip(*ids[:2], *places[:2], ids.documents, strict=True):
            begin, n = int(pairs.split.starts[d]), int(pairs.split.lengths[d])
            inside = range(begin + 1, begin + n - 1)  # without bos and eos
            for batch_tensors in (px, py):
                assert 4 <= len(batch_tensors) <= min(12, (n - 2) // 2)
                assert (
                    batch_tensors[0] in inside
                    and batch_tensors[-1] in inside
                    and (np.diff(batch_tensors) == 1).all()
                )
            assert px[-1] < py[0] or py[-1] < px[0]
            np.testing.assert_array_equal(pairs.split[int(px[0]) : int(px[-1]) + 1], x)
            np.testing.assert_array_equal(pairs.split[int(py[0]) : int(py[-1]) + 1], y)
            earlier += int(px[0] < py[0])
            sizes += [len(x), len(y)]
    assert {4, 12} <= set(sizes) and 0.4 < earlier / (20 * 48) < 0.6
    short = np.mean([size < 7 for size in sizes])
    assert 0.35 < short < 0.7  # half of the logarithms of 4 to 13 are below 7.2


def test_each_pass_has_every_document_once(topics: Path) -> None:
    pairs = SpanPairs(TokenSet(topics).split("train"), 12, 4)
    passes = [
        np.concatenate([pairs.batch(1, step, 48).documents for step in range(5 * e, 5 * e + 5)])
        for e in (0, 1)
    ]
    for order in passes:
        assert sorted(order) == list(range(240))
    assert not np.array_equal(*passes)
    again = SpanPairs(TokenSet(topics).split("train"), 12, 4).batch(1, 7, 48)  # without the earlier batches
    np.testing.assert_array_equal(again.documents, passes[1][96:144])
    assert not np.array_equal(again.documents, pairs.batch(2, 7, 48).documents)


def test_repeated_document_is_not_its_own_negative(topics: Path) -> None:
    made = job(topics, batch_size=100)
    encoder, pairs = build_encoder(made), open_pairs(made)[0]
    batch = next(b for b in (pairs.batch(0, s, 100) for s in range(2, 30)) if len(set(b.documents)) < 100)
    batch_tensors = collate(batch)
    found = build_update(encoder, made).objective(batch_tensors)
    x, y = (
        encoder.embed(batch_tensors["ids"][i : i + 100], batch_tensors["mask"][i : i + 100]) for i in (0, 100)
    )
    torch.testing.assert_close(found.total, info_nce(x, y, 20.0, torch.from_numpy(batch.documents)).total)
    assert float((found.total - info_nce(x, y, 20.0).total).detach().abs()) > 1e-3


def test_encode_in_buckets_keeps_vectors_and_gradients(topics: Path) -> None:
    made = job(topics)
    encoder = build_encoder(made)
    with torch.no_grad():
        for p in encoder.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    batch_tensors = collate(open_pairs(made)[0].batch(0, 0, 48))
    found = []
    for embed in (lambda ids, mask: encode_in_buckets(encoder, ids, mask), encoder.embed):
        encoder.zero_grad()
        vectors = embed(batch_tensors["ids"], batch_tensors["mask"])
        vectors.pow(3).sum().backward()
        found.append((vectors.detach(), {n: p.grad for n, p in encoder.named_parameters()}))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)


def test_recall_matches_counting() -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((30, 4)).astype(np.float32) for _ in range(2))
    for k in (1, 3, 10):
        hits = 0
        for a, b in ((x, y), (y, x)):
            for i in range(30):
                best = sorted(range(30), key=lambda j: -float(np.dot(a[i], b[j])))
                hits += best.index(i) < k
        assert recall(x, y, k) == pytest.approx(hits / 60)
    assert recall(np.ones_like(x), np.ones_like(y), 10) == 0.0  # equal vectors have recall 0
    assert recall(x * np.nan, y, 10) == 0.0


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_raises_recall(optimizer: str, topics: Path) -> None:
    for seed in (0, 1):
        made = job(topics, optimizer=optimizer, steps=80, seed=seed, evaluations=2)
        evaluator = open_pairs(made)[1]
        assert evaluator is not None and len(evaluator) == TOPICS
        before, evaluations = build_encoder(made), list[dict[str, float]]()
        untrained = evaluator(partial(embed_ids, before))

        def observe(step: int, metrics: dict[str, float], encoder: Encoder) -> None:
            if "recall_at_1" in metrics:
                evaluations.append({"step": step, **metrics})  # noqa: B023

        after = dict(train_embedder(made, observe).named_parameters())
        assert [evaluation["step"] for evaluation in evaluations] == [40, 80]
        assert untrained["recall_at_1"] < 0.35 and evaluations[-1]["recall_at_1"] > 0.8
        assert evaluations[-1]["recall_at_10"] > 0.95 and evaluations[-1]["correct"] > 0.3
        assert not any(torch.equal(p, after[n]) for n, p in before.named_parameters())


def test_training_repeats_bit_for_bit(topics: Path) -> None:
    made = job(topics, steps=4)
    assert same(weights(made), weights(made))
    assert not same(weights(made), weights(made.model_copy(update={"seed": 1})))
    half = job(topics, steps=4, dtype="bfloat16")
    assert same(weights(half), weights(half)) and not same(weights(half), weights(made))


class _Enough(Exception):
    pass


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_resumes_bit_for_bit(optimizer: str, topics: Path, tmp_path: Path) -> None:
    made, log_lines = job(topics, optimizer=optimizer), list[str]()
    straight: list[dict[str, float]] = []
    whole = weights(made, observe=lambda step, metrics, _: straight.append(metrics))

    def stop(step: int, metrics: dict[str, float], encoder: Encoder) -> None:
        if step in (5, 9):
            raise _Enough  # like a crash: no final checkpoint

    for _ in range(2):
        with pytest.raises(_Enough):
            train_embedder(made, stop, scratch=tmp_path, checkpoint_seconds=0.0, log=log_lines.append)
    parts: list[tuple[int, float]] = []
    last = weights(
        made,
        observe=lambda step, metrics, _: parts.append((step, metrics["loss"])),
        scratch=tmp_path,
        log=log_lines.append,
    )
    assert same(whole, last)
    assert parts == [(step, straight[step - 1]["loss"]) for step in (10, 11, 12)]
    assert [text for text in log_lines if "continues" in text] == [
        "continues at step 5 of 12",
        "continues at step 9 of 12",
    ]
    with pytest.raises(CheckpointError, match="temperature differs"):
        train_embedder(made.model_copy(update={"temperature": 0.1}), scratch=tmp_path)


def test_train_embedder_rejects_unusable_data(topics: Path, tmp_path: Path) -> None:
    log_lines: list[str] = []
    with pytest.raises(DataError, match=r"(?s)240 documents.*at least the 256.*lower batch_size or min_span"):
        train_embedder(job(topics, batch_size=256), log=log_lines.append)
    assert "6 of 246 documents skipped" in log_lines[0]
    with pytest.raises(DataError, match="ids and the encoder 300"):
        shape = job(topics).encoder.model_copy(update={"vocab_size": 300})
        train_embedder(job(topics, encoder=shape))
    with pytest.raises(ValidationError, match=r"min_span \(13\) is more than max_length \(12\)"):
        job(topics, min_span=13)
    train_only, log_lines = make_topics(tmp_path, train=48, splits=("train",)), []
    metrics: list[dict[str, float]] = []
    train_embedder(
        job(train_only, steps=1), lambda step, found, _: metrics.append(found), log=log_lines.append
    )
    assert "recall is not measured" in log_lines[-1] and "recall_at_1" not in metrics[-1]
    with pytest.raises(DataError, match="no split 'train'"):
        train_embedder(job(make_topics(tmp_path / "b", splits=("validation",))))


def test_held_out_spans_are_equal_for_all_jobs(topics: Path) -> None:
    one, other = (open_pairs(job(topics, seed=s, batch_size=b))[1] for s, b in ((0, 48), (3, 16)))
    assert one is not None and other is not None
    for a, b in zip(one.spans.first, other.spans.first, strict=True):
        np.testing.assert_array_equal(a, b)
    few = open_pairs(job(topics, held_out=10))[1]
    assert few is not None and len(few) <= 10
    assert numpy_rng(0, "held-out spans").random() != numpy_rng(1, "held-out spans").random()
