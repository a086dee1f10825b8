"""Cached teachers: round trip, damage, and use by a student."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.align.distillation import (
    TOKENIZER,
    VOCAB,
    config_of,
    learn,
    model_of,
    network_of,
    some_texts,
)

from whorl.align.distillation.teacher import (
    MANIFEST,
    TENSORS,
    CachedTeacher,
    LiveTeacher,
    cache_teacher_logits,
    tokenizer_fingerprint,
)
from whorl.align.model.example import TokenizedExample, concat
from whorl.errors import ConfigError, DataError


def make_cache(n: int = 8, top: int = 6, **options: Any) -> CachedTeacher:
    return cache_teacher_logits(
        model_of(0), some_texts(n), pad_id=TOKENIZER.pad_id, top_k=top, teacher_name="T", **options
    )


def test_cached_teacher_roundtrip(tmp_path: Path) -> None:
    cache = make_cache(vocab_fingerprint=tokenizer_fingerprint(TOKENIZER))
    found = CachedTeacher.load(cache.save(tmp_path / "a"))
    assert [t.ids.tolist() for t in found.examples] == [t.ids.tolist() for t in cache.examples]
    assert [t.loss_mask.tolist() for t in found.examples] == [t.loss_mask.tolist() for t in cache.examples]
    assert torch.equal(found.top_ids, cache.top_ids) and torch.equal(found.log_probs, cache.log_probs)
    assert torch.equal(found.row_offsets, cache.row_offsets) and found.identity() == cache.identity()
    for name in ("vocab_size", "vocab_fingerprint", "temperature", "teacher_name"):
        assert getattr(found, name) == getattr(cache, name)
    manifest = json.loads((tmp_path / "a" / MANIFEST).read_text())
    assert manifest["top"] == 6 and manifest["texts"] == 8 and manifest["vocab_size"] == VOCAB


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 255), st.booleans()), max_size=9), min_size=1, max_size=6))
def test_cache_has_one_row_per_target(tmp_path_factory: Any, drawn: Any) -> None:
    texts = []
    for pairs in drawn:
        text = concat([257, *(i for i, _ in pairs)], [])
        texts.append(TokenizedExample(text.ids, torch.tensor([False, *(m for _, m in pairs)]).numpy()))
    model = model_of(0)
    if not any(t.loss_mask.any() for t in texts):
        with pytest.raises(DataError, match="no target of the examples"):
            cache_teacher_logits(model, texts, pad_id=258)
        return
    cache = cache_teacher_logits(model, texts, pad_id=258, top_k=3)
    found = CachedTeacher.load(cache.save(tmp_path_factory.mktemp("cache")))
    assert len(found.top_ids) == sum(int(t.loss_mask.sum()) for t in texts) == int(found.row_offsets[-1])
    assert all(
        (a.ids == b.ids).all() and (a.loss_mask == b.loss_mask).all()
        for a, b in zip(found.examples, texts, strict=True)
    )
    assert torch.equal(found.log_probs, cache.log_probs) and bool((found.log_probs.diff(dim=1) <= 0).all())


def test_cache_independent_of_batching() -> None:
    texts, model = some_texts(70), model_of(0)
    cache = cache_teacher_logits(model, texts, pad_id=TOKENIZER.pad_id, top_k=5, temperature=2.0)
    for n in (0, 35, 69):
        text = texts[n]
        logits = model.logits(model(torch.from_numpy(text.ids)[None, :-1]))[0] / 2.0
        want = logits.log_softmax(-1)[torch.from_numpy(text.loss_mask[1:])].topk(5).values
        assert torch.allclose(
            cache.log_probs[cache.row_offsets[n] : cache.row_offsets[n + 1]], want, atol=1e-5
        )


@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "manifest", "field", "format", "not json"])
def test_damaged_cache_is_rejected(tmp_path: Path, damage: str) -> None:
    folder = make_cache().save(tmp_path)
    tensors, manifest = folder / TENSORS, folder / MANIFEST
    data, record = tensors.read_bytes(), json.loads(manifest.read_text())
    if damage == "cut":
        tensors.write_bytes(data[:-7])
    elif damage == "bit":
        tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "gone":
        tensors.unlink()
    elif damage == "manifest":
        manifest.unlink()
    elif damage == "not json":
        manifest.write_text("{")
    else:
        record = (
            {**record, "format": 9}
            if damage == "format"
            else {k: v for k, v in record.items() if k != "vocab_fingerprint"}
        )
        manifest.write_text(json.dumps(record))
    with pytest.raises(DataError, match=str(tmp_path)):
        CachedTeacher.load(folder)


def test_student_learns_from_cached_top_k(tmp_path: Path) -> None:
    cache = CachedTeacher.load(make_cache(16, top=40).save(tmp_path))
    history = learn(network_of(), cache, list(cache.examples), config_of(epochs=12.0, lr_scale=1.0))
    assert history[-1]["kl"] < 0.6 * history[0]["kl"]


def test_cached_teacher_rejects_other_use() -> None:
    cache, texts = make_cache(), some_texts(8)
    with pytest.raises(ConfigError, match=r"on_policy_fraction is 0\.5"):
        learn(network_of(), cache, texts, config_of(on_policy_fraction=0.5))
    with pytest.raises(ConfigError, match="cached at 1"):
        learn(network_of(), cache, texts, config_of(temperature=2.0))
    with pytest.raises(DataError, match="other examples"):
        learn(network_of(), cache, texts[::-1], config_of())


def test_live_teacher_stays_frozen() -> None:
    teacher = model_of(0)
    live = LiveTeacher(teacher)
    before = live.identity()
    learn(network_of(), live, some_texts(8), config_of(on_policy_fraction=0.5, divergence="reverse"))
    assert live.identity() == before != LiveTeacher(model_of(3)).identity()
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
