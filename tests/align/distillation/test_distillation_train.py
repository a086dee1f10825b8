"""Distillation: what the student learns, on-policy and off-policy, bitwise resume, and cached cached_teacher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.align.byte_model import VOCAB, target_log_probs
from tests.support.align.distillation import SCRIBE, learn, mean_divergence, model_of, network_of, some_texts
from tests.support.align.kill_at_step import check_resume
from tests.support.align.stage_inputs import PAD

from whorl.align.distillation import cached_teacher
from whorl.align.distillation.cached_teacher import CachedTeacher, cache_teacher_logits
from whorl.align.distillation.teacher import (
    LiveTeacher,
    check_same_vocabulary,
    sample_teacher_completions,
    tokenizer_fingerprint,
)
from whorl.align.model.batch import pack, pad
from whorl.align.model.policy_model import PolicyModel
from whorl.errors import CheckpointError, ConfigError, DataError
from whorl.models import make_model
from whorl.tokens.token_encoder import TokenizedExample, concat
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator

TOKENIZER = SCRIBE.tokenizer
KINDS = pytest.mark.parametrize("kind", ["forward", "reverse", "jensen"])


@KINDS
@pytest.mark.parametrize("packing", [True, False])
def test_first_step_matches_definition(kind: Any, packing: bool) -> None:
    texts, network, teacher = some_texts(8), network_of(), model_of(0)
    want = mean_divergence(network.model, teacher, texts, kind)
    options = {"divergence": kind, "packing": packing, "train": {"micro_batch_tokens": 48}}
    (first,) = learn(network, teacher, texts, epochs=1.0, **options)
    assert first["kl"] == pytest.approx(want, rel=1e-4)
    assert first["loss_tokens"] == sum(int(text.loss_mask.sum()) for text in texts)


@pytest.mark.parametrize(("kind", "own"), [("forward", 0.0), ("reverse", 1.0), ("jensen", 0.5)])
def test_student_approaches_teacher(kind: Any, own: float) -> None:
    texts, network, teacher = some_texts(), network_of(), model_of(0)
    before = {name: p.detach().clone() for name, p in network.model.named_parameters()}
    first = mean_divergence(network.model, teacher, texts, kind)
    options = {"divergence": kind, "on_policy_fraction": own, "epochs": 10.0, "lr_scale": 1.0}
    told = learn(network, teacher, texts, **options)
    assert mean_divergence(network.model, teacher, texts, kind) < 0.6 * first
    assert not any(torch.equal(p, before[n]) for n, p in network.model.named_parameters())
    if own:
        assert all(t["logprob_diff_max"] < 1e-4 for t in told) and told[0]["on_policy_tokens"] > 0
    assert ("completion_length/on_policy" in told[0]) == (own > 0)


def test_on_policy_texts_follow_prompts() -> None:
    texts, seen = some_texts(8), list[Any]()

    class Listening(LiveTeacher):
        def loss(self, part: Any, *rest: Any) -> Any:
            seen.append({name: t.clone() for name, t in part.items()})
            return super().loss(part, *rest)

    learn(network_of(), Listening(model_of(0)), texts, on_policy_fraction=0.5, packing=False, epochs=1.0)
    prompts = {tuple(t.ids[: t.prompt_length].tolist()) for t in texts}
    given = {tuple(t.ids.tolist()) for t in texts}
    whole = []
    for part in seen:
        for row in range(len(part["tokens"])):
            n = int((part["sequence"][row] >= 0).sum())
            ids = [int(part["tokens"][row, 0]), *part["targets"][row, :n].tolist()]
            start = 1 + int(part["loss_mask"][row].int().argmax())
            assert tuple(ids[:start]) in prompts
            sampled = part["sampled"][row].bool()
            assert not sampled.any() or torch.equal(sampled, part["loss_mask"][row])
            whole.append((tuple(ids), bool(sampled.any())))
    assert sum(own for _, own in whole) == 4
    assert all((ids in given) != own for ids, own in whole)


def test_resume_gives_same_bits(tmp_path: Path) -> None:
    def train(**rest: Any) -> tuple[PolicyModel, Any]:
        network = network_of()
        options = {"on_policy_fraction": 0.5, "sync_every": 2, "epochs": 3.0, "divergence": "reverse"}
        return network, learn(network, model_of(0), some_texts(16), **options, **rest)

    check_resume(train, tmp_path, kill=5)


def test_checkpoint_rejects_other_teacher(tmp_path: Path) -> None:
    options = {"checkpoint_dir": tmp_path, "run": {"checkpoint_seconds": 1e-9}}
    learn(network_of(), model_of(0), some_texts(16), **options)
    with pytest.raises(CheckpointError, match="teacher differs"):
        learn(network_of(), model_of(5), some_texts(16), **options)


def test_step_independent_of_micro_batches() -> None:
    found = []
    for micro in (8192, 24):
        network = network_of()
        learn(
            network,
            model_of(0),
            some_texts(8),
            epochs=1.0,
            train={"micro_batch_tokens": micro},
            divergence="jensen",
        )
        found.append(torch.cat([p.detach().flatten() for p in network.model.parameters()]))
    assert torch.allclose(*found, atol=1e-5)


def test_other_vocabulary_is_rejected() -> None:
    other = make_model(model_of(0).config.model_copy(update={"vocab_size": 300}), generator(0, "test"))
    with pytest.raises(ConfigError, match=r"300 ids.*264 ids"):
        learn(network_of(), other, some_texts(8))
    words = tokenizer_fingerprint(Tokenizer.train(["abab"], 264))
    with pytest.raises(ConfigError, match=f"{words}.*{tokenizer_fingerprint(TOKENIZER)}"):
        learn(network_of(), LiveTeacher(model_of(0), words), some_texts(8))


def test_check_same_vocabulary_compares_tokens() -> None:
    a, b = (Tokenizer([*TOKENIZER.token_bytes[:256], pair]) for pair in (b"ab", b"ba"))
    check = check_same_vocabulary
    assert check(a, Tokenizer(a.token_bytes[:257])) == tokenizer_fingerprint(a)
    with pytest.raises(ConfigError, match=r"Ann.*260 ids.*Ben.*260 ids: id 256 is b'ab' .* b'ba'"):
        check(a, b, names=("Ann", "Ben"))
    with pytest.raises(ConfigError, match=r"259 ids.*260 ids: id 256"):
        check(TOKENIZER, a)


def test_invalid_examples_are_rejected() -> None:
    long = SCRIBE.prompt_completion("a", "b" * 40)
    for texts, message in (([], "no examples"), ([some_texts(1)[0], long], "example 1 has")):
        with pytest.raises(DataError, match=message):
            learn(network_of(), model_of(0), texts)


def test_on_policy_needs_prompts_only() -> None:
    bare = [TokenizedExample(t.ids[: t.prompt_length], t.loss_mask[: t.prompt_length]) for t in some_texts(8)]
    (told,) = learn(network_of(), model_of(0), bare, on_policy_fraction=1.0, divergence="reverse", epochs=1.0)
    assert told["loss_tokens"] == told["on_policy_tokens"] > 0


def test_teacher_completions_end_with_stop_id() -> None:
    prompts = [SCRIBE.prompt(word) for word in ("ab", "cd", "ef") for _ in range(40)]
    texts, cut_off = sample_teacher_completions(model_of(0), SCRIBE, prompts, length=24, max_tokens=16)
    assert len(texts) + cut_off == 120
    assert all(int(t.ids[-1]) in SCRIBE.stop_ids and t.loss_mask[-1] for t in texts)


@KINDS
def test_cached_full_vocab_equals_live_teacher(kind: Any) -> None:
    texts, teacher, words = some_texts(8), model_of(0), tokenizer_fingerprint(TOKENIZER)
    cache = cache_teacher_logits(teacher, texts, pad_id=PAD, top_k=VOCAB, vocab_fingerprint=words)
    a, b = (learn(network_of(), who, texts, divergence=kind) for who in (teacher, cache))
    assert [x["kl"] for x in a] == pytest.approx([x["kl"] for x in b], rel=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_target_rows_match_each_target(packed: bool) -> None:
    """The texts are cached in several batches, and no row depends on the batch."""
    texts, teacher, numbers = some_texts(70), model_of(0), [69, 2, 35, 0]
    cache = cache_teacher_logits(teacher, texts, pad_id=PAD, top_k=4, temperature=2.0)
    chosen = [texts[n] for n in numbers]
    part = pack(chosen, 40, PAD) if packed else pad(chosen, PAD)
    rows = cache.target_rows(part, torch.tensor(numbers))
    assert torch.equal(rows >= 0, part["loss_mask"])
    for local, text in enumerate(chosen):
        want = target_log_probs(teacher, text, 2.0).topk(4)
        mine = rows[(part["sequence"] == local) & part["loss_mask"]]
        assert torch.allclose(cache.log_probs[mine], want.values, atol=1e-5)
        assert torch.equal(cache.top_ids[mine].long(), want.indices)


def make_cache(n: int = 8, top: int = 6, **options: Any) -> CachedTeacher:
    options = {"pad_id": PAD, "top_k": top, "teacher_name": "T", **options}
    return cache_teacher_logits(model_of(0), some_texts(n), **options)


def test_cached_teacher_roundtrip(tmp_path: Path) -> None:
    cache = make_cache(vocab_fingerprint=tokenizer_fingerprint(TOKENIZER))
    found = CachedTeacher.load(cache.save(tmp_path / "a"))
    assert torch.equal(found.top_ids, cache.top_ids) and torch.equal(found.row_offsets, cache.row_offsets)
    assert found.identity() == cache.identity()
    for name in ("vocab_size", "vocab_fingerprint", "temperature", "teacher_name"):
        assert getattr(found, name) == getattr(cache, name)
    manifest = json.loads((tmp_path / "a" / cached_teacher.MANIFEST).read_text())
    assert manifest["top"] == 6 and manifest["texts"] == 8 and manifest["vocab_size"] == VOCAB


@settings(max_examples=25)
@given(st.lists(st.lists(st.tuples(st.integers(0, 255), st.booleans()), max_size=9), min_size=1, max_size=6))
def test_cache_has_one_row_per_target(tmp_path_factory: Any, drawn: Any) -> None:
    texts = []
    for pairs in drawn:
        text = concat([257, *(i for i, _ in pairs)], [])
        texts.append(TokenizedExample(text.ids, torch.tensor([False, *(m for _, m in pairs)]).numpy()))
    model = model_of(0)
    if not any(t.loss_mask.any() for t in texts):
        with pytest.raises(DataError, match="no target of the examples"):
            cache_teacher_logits(model, texts, pad_id=PAD)
        return
    cache = cache_teacher_logits(model, texts, pad_id=PAD, top_k=3)
    found = CachedTeacher.load(cache.save(tmp_path_factory.mktemp("cache")))
    assert len(found.top_ids) == sum(int(t.loss_mask.sum()) for t in texts) == int(found.row_offsets[-1])
    for a, b in zip(found.examples, texts, strict=True):
        assert (a.ids == b.ids).all() and (a.loss_mask == b.loss_mask).all()
    assert torch.equal(found.log_probs, cache.log_probs) and bool((found.log_probs.diff(dim=1) <= 0).all())


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": rewrite(cached_teacher.TENSORS, lambda data: data[:-7]),
    "bit": rewrite(cached_teacher.TENSORS, lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "gone": lambda folder: (folder / cached_teacher.TENSORS).unlink(),
    "manifest": lambda folder: (folder / cached_teacher.MANIFEST).unlink(),
    "field": rewrite(cached_teacher.MANIFEST, lambda data: data.replace(b'"vocab_fingerprint"', b'"other"')),
    "format": rewrite(
        cached_teacher.MANIFEST, lambda data: json.dumps({**json.loads(data), "format": 9}).encode()
    ),
    "not json": rewrite(cached_teacher.MANIFEST, lambda data: b"{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_rejected(tmp_path: Path, damage: str) -> None:
    folder = make_cache().save(tmp_path)
    DAMAGES[damage](folder)
    with pytest.raises(DataError, match=str(tmp_path)):
        CachedTeacher.load(folder)


def test_student_learns_from_cached_top_k(tmp_path: Path) -> None:
    cache = CachedTeacher.load(make_cache(16, top=40).save(tmp_path))
    history = learn(network_of(), cache, list(cache.examples), epochs=12.0, lr_scale=1.0)
    assert history[-1]["kl"] < 0.6 * history[0]["kl"]


def test_cached_teacher_rejects_other_use() -> None:
    cache, texts = make_cache(), some_texts(8)
    with pytest.raises(ConfigError, match=r"on_policy_fraction is 0\.5"):
        learn(network_of(), cache, texts, on_policy_fraction=0.5)
    with pytest.raises(ConfigError, match="cached at 1"):
        learn(network_of(), cache, texts, temperature=2.0)
    with pytest.raises(DataError, match="other examples"):
        learn(network_of(), cache, texts[::-1])


def test_live_teacher_stays_frozen() -> None:
    teacher = model_of(0)
    live = LiveTeacher(teacher)
    before = live.identity()
    learn(network_of(), live, some_texts(8), on_policy_fraction=0.5, divergence="reverse")
    assert live.identity() == before != LiveTeacher(model_of(3)).identity()
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
