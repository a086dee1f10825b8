"""Training an embedder: span pairs, learning, determinism and resume."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.support.models.initialization import add_noise, generator
from tests.support.tiny import make_document

from whorl.embedding.embedder import embed_ids
from whorl.embedding.job import EmbedJob
from whorl.embedding.objective import build_update, collate, encode_in_buckets
from whorl.embedding.span_pairs import SpanPairs, open_pairs, recall
from whorl.embedding.train import EmbedTask, build_encoder, train_embedder
from whorl.errors import CheckpointError, ConfigError, DataError
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.objectives.contrastive import info_nce
from whorl.tokens.shards import TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import numpy_rng
from whorl.train.config import ScheduleConfig
from whorl.train.optim.lr_schedule import lr_scale

TOPICS, SYNONYMS = 24, 30


def make_topics(folder: Path, *, train: int = 240, splits: tuple[str, ...] = ("train", "validation")) -> Path:
    """Write documents about 24 topics of 30 words each, one held-out document per topic; six documents are too short.

    Two spans of a document share few words or none, so the model must learn the topics.
    """
    rng = np.random.default_rng(0)
    words = [" " + "".join(rng.choice(list("abcdefghijkl"), 5)) for _ in range(TOPICS * SYNONYMS)]

    def text(topic: int) -> str:
        return "".join(words[topic * SYNONYMS + i] for i in rng.integers(0, SYNONYMS, rng.integers(24, 48)))

    texts = {"train": [text(i % TOPICS) for i in range(train)] + [" no"] * 6}
    texts["validation"] = [text(i) for i in range(TOPICS)]
    tokenizer = Tokenizer.train([w * 5 for w in words], 259 + 4 * len(words))
    folder.mkdir(parents=True, exist_ok=True)
    for split in splits:
        write_shards([make_document(t, i) for i, t in enumerate(texts[split])], tokenizer, folder, split)
    return folder


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_topics(tmp_path_factory.mktemp("topics"))


def job(tokens: Path, **change: Any) -> EmbedJob:
    shape = {"d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden": 32, "max_length": 12}
    encoder = EncoderConfig.model_validate({**shape, "vocab_size": TokenSet(tokens).vocab_size})
    settings = {"min_span": 4, "batch_size": 48, "steps": 12, "lr_adamw": 0.01}
    return EmbedJob.model_validate({"tokens": str(tokens), "encoder": encoder, **settings, **change})


def weights(job: EmbedJob, **more: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in train_embedder(job, **more).named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def recorder(until: Collection[int] = ()) -> tuple[Any, list[tuple[int, dict[str, float]]]]:
    """Return an observer, and the steps with metrics that it sees. It raises an error at the steps `until`."""
    seen: list[tuple[int, dict[str, float]]] = []

    def observe(step: int, metrics: dict[str, float], encoder: Encoder) -> None:
        seen.append((step, metrics))
        if step in until:
            raise InterruptedError  # like a crash: no final checkpoint

    return observe, seen


def test_spans_are_disjoint_parts_of_one_document(topics: Path) -> None:
    pairs = SpanPairs(TokenSet(topics).split("train"), 12, 4)
    assert pairs.skipped == 6 and len(pairs) == 240
    sizes, earlier = [], 0
    numbered = np.arange(len(pairs.split), dtype=np.int64)  # ids that equal their position in the stream

    class Numbered:
        lengths, starts = pairs.split.lengths, pairs.split.starts

        def __getitem__(self, where: slice) -> Any:
            return numbered[where]

    where = copy.copy(pairs)
    where.split = Numbered()  # type: ignore[assignment]
    for step in range(20):
        ids, places = pairs.batch(5, step, 48), where.batch(5, step, 48)
        for x, y, px, py, d in zip(*ids[:2], *places[:2], ids.documents, strict=True):
            begin, n = int(pairs.split.starts[d]), int(pairs.split.lengths[d])
            inside = range(begin + 1, begin + n - 1)  # without bos and eos
            for span, at in ((x, px), (y, py)):
                assert 4 <= len(at) <= min(12, (n - 2) // 2)
                assert at[0] in inside and at[-1] in inside and (np.diff(at) == 1).all()
                np.testing.assert_array_equal(pairs.split[int(at[0]) : int(at[-1]) + 1], span)
            assert px[-1] < py[0] or py[-1] < px[0]
            earlier += int(px[0] < py[0])
            sizes += [len(x), len(y)]
    assert {4, 12} <= set(sizes) and 0.4 < earlier / (20 * 48) < 0.6
    short = np.mean([size < 7 for size in sizes])
    assert 0.35 < short < 0.7  # half of the logarithms of 4 to 13 are below 7.2


def test_each_pass_has_every_document_once(topics: Path) -> None:
    pairs = SpanPairs(TokenSet(topics).split("train"), 12, 4)
    passes = np.stack([pairs.batch(1, step, 48).documents for step in range(10)]).reshape(2, 240)
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
    tensors = collate(batch)
    found = build_update(encoder, made).objective(tensors)
    x, y = encoder.embed(tensors["ids"], tensors["mask"]).split(100)
    torch.testing.assert_close(found.total, info_nce(x, y, 20.0, torch.from_numpy(batch.documents)).total)
    assert float((found.total - info_nce(x, y, 20.0).total).detach().abs()) > 1e-3


def test_encode_in_buckets_keeps_vectors_and_gradients(topics: Path) -> None:
    made = job(topics)
    encoder = add_noise(build_encoder(made), 0.2, generator())
    batch = collate(open_pairs(made)[0].batch(0, 0, 48))
    found = []
    for embed in (partial(encode_in_buckets, encoder), encoder.embed):
        encoder.zero_grad()
        vectors = embed(batch["ids"], batch["mask"])
        vectors.pow(3).sum().backward()
        found.append((vectors.detach(), {n: p.grad for n, p in encoder.named_parameters()}))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)


def test_recall_matches_counting() -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((30, 4)).astype(np.float32) for _ in range(2))
    for k in (1, 3, 10):
        ranks = [(scores > scores.diagonal()[:, None]).sum(axis=1) for scores in (x @ y.T, y @ x.T)]
        assert recall(x, y, k) == pytest.approx(np.mean(np.stack(ranks) < k))
    assert recall(np.ones_like(x), np.ones_like(y), 10) == 0.0  # equal vectors have recall 0
    assert recall(x * np.nan, y, 10) == 0.0


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_raises_recall(optimizer: str, topics: Path) -> None:
    for seed in (0, 1):
        made = job(topics, optimizer=optimizer, steps=80, seed=seed, evaluations=2)
        evaluator = open_pairs(made)[1]
        assert evaluator is not None and len(evaluator) == TOPICS
        before = build_encoder(made)
        untrained = evaluator(partial(embed_ids, before))
        observe, seen = recorder()
        after = dict(train_embedder(made, observe).named_parameters())
        evaluations = {step: metrics for step, metrics in seen if "recall_at_1" in metrics}
        assert list(evaluations) == [40, 80]
        assert untrained["recall_at_1"] < 0.35 and evaluations[80]["recall_at_1"] > 0.8
        assert evaluations[80]["recall_at_10"] > 0.95 and evaluations[80]["correct"] > 0.3
        assert not any(torch.equal(p, after[n]) for n, p in before.named_parameters())


def test_learning_rate_follows_the_schedule(topics: Path) -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_ratio=0.25, min_lr_ratio=0.0)
    task = EmbedTask(job(topics, train={"schedule": schedule}))
    assert [task.lr_scale(step) for step in range(12)] == [lr_scale(step, 12, schedule) for step in range(12)]
    assert task.lr_scale(6) != EmbedTask(job(topics)).lr_scale(6)
    with pytest.raises(ConfigError, match=r"warmup_steps is 13"):
        train_embedder(job(topics, train={"schedule": {"warmup_steps": 13}}))


def test_training_resumes_bit_for_bit(topics: Path, tmp_path: Path) -> None:
    made, lines = job(topics, optimizer="adamw"), list[str]()
    (observe, straight), (crash, _), (observe_rest, rest) = recorder(), recorder((5, 9)), recorder()
    whole = weights(made, observe=observe)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            train_embedder(made, crash, scratch=tmp_path, checkpoint_seconds=0.0, log=lines.append)
    assert same(whole, weights(made, observe=observe_rest, scratch=tmp_path, log=lines.append))
    assert [(n, m["loss"]) for n, m in rest] == [(n, m["loss"]) for n, m in straight[9:]] and len(rest) == 3
    assert [line for line in lines if "continues" in line] == [f"continues at step {n} of 12" for n in (5, 9)]
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
    train_only, (observe, seen) = make_topics(tmp_path, train=48, splits=("train",)), recorder()
    train_embedder(job(train_only, steps=1), observe, log=log_lines.append)
    assert "recall is not measured" in log_lines[-1] and "recall_at_1" not in seen[-1][1]
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
