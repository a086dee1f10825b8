"""What a teacher said, kept in a folder: it comes back as it was, or not at all."""

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


def told_of(n: int = 8, top: int = 6, **options: Any) -> CachedTeacher:
    return cache_teacher_logits(
        model_of(0), some_texts(n), pad_id=TOKENIZER.pad_id, top_k=top, teacher_name="T", **options
    )


def test_cached_teacher_roundtrip(tmp_path: Path) -> None:
    told = told_of(vocab_fingerprint=tokenizer_fingerprint(TOKENIZER))
    found = CachedTeacher.load(told.save(tmp_path / "a"))
    assert [t.ids.tolist() for t in found.examples] == [t.ids.tolist() for t in told.examples]
    assert [t.loss_mask.tolist() for t in found.examples] == [t.loss_mask.tolist() for t in told.examples]
    assert torch.equal(found.top_ids, told.top_ids) and torch.equal(found.log_probs, told.log_probs)
    assert torch.equal(found.row_offsets, told.row_offsets) and found.identity() == told.identity()
    for name in ("vocab_size", "vocab_fingerprint", "temperature", "teacher_name"):
        assert getattr(found, name) == getattr(told, name)
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
    told = cache_teacher_logits(model, texts, pad_id=258, top_k=3)
    found = CachedTeacher.load(told.save(tmp_path_factory.mktemp("told")))
    assert len(found.top_ids) == sum(int(t.loss_mask.sum()) for t in texts) == int(found.row_offsets[-1])
    assert all(
        (a.ids == b.ids).all() and (a.loss_mask == b.loss_mask).all()
        for a, b in zip(found.examples, texts, strict=True)
    )
    assert torch.equal(found.log_probs, told.log_probs) and bool((found.log_probs.diff(dim=1) <= 0).all())


def test_cache_independent_of_batching() -> None:
    texts, model = some_texts(70), model_of(0)
    told = cache_teacher_logits(model, texts, pad_id=TOKENIZER.pad_id, top_k=5, temperature=2.0)
    for n in (0, 35, 69):
        text = texts[n]
        said = model.logits(model(torch.from_numpy(text.ids)[None, :-1]))[0] / 2.0
        want = said.log_softmax(-1)[torch.from_numpy(text.loss_mask[1:])].topk(5).values
        assert torch.allclose(told.log_probs[told.row_offsets[n] : told.row_offsets[n + 1]], want, atol=1e-5)


@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "manifest", "field", "format", "not json"])
def test_damaged_cache_is_rejected(tmp_path: Path, damage: str) -> None:
    folder = told_of().save(tmp_path)
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
            {**record, "format": 9} if damage == "format" else {k: v for k, v in record.items() if k != "vocab_fingerprint"}
        )
        manifest.write_text(json.dumps(record))
    with pytest.raises(DataError, match=str(tmp_path)):
        CachedTeacher.load(folder)


def test_student_learns_from_cached_top_k(tmp_path: Path) -> None:
    told = CachedTeacher.load(told_of(16, top=40).save(tmp_path))
    figures = learn(network_of(), told, list(told.examples), config_of(epochs=12.0, lr_scale=1.0))
    assert figures[-1]["kl"] < 0.6 * figures[0]["kl"]


def test_cached_teacher_rejects_other_use() -> None:
    told, texts = told_of(), some_texts(8)
    with pytest.raises(ConfigError, match=r"on_policy_fraction is 0\.5"):
        learn(network_of(), told, texts, config_of(on_policy_fraction=0.5))
    with pytest.raises(ConfigError, match="cached at 1"):
        learn(network_of(), told, texts, config_of(temperature=2.0))
    with pytest.raises(DataError, match="other examples"):
        learn(network_of(), told, texts[::-1], config_of())


def test_live_teacher_stays_frozen() -> None:
    teacher = model_of(0)
    beside = LiveTeacher(teacher)
    before = beside.identity()
    learn(network_of(), beside, some_texts(8), config_of(on_policy_fraction=0.5, divergence="reverse"))
    assert beside.identity() == before != LiveTeacher(model_of(3)).identity()
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
