"""Distillation as a stage: what the student learns, on-policy and off-policy, and bitwise resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.align.distillation import (
    SCRIBE,
    TOKENIZER,
    VOCAB,
    config_of,
    learn,
    mean_divergence,
    model_of,
    network_of,
    some_texts,
)

from whorl.align.distillation.teacher import (
    LiveTeacher,
    cache_teacher_logits,
    check_same_vocabulary,
    sample_teacher_completions,
    tokenizer_fingerprint,
)
from whorl.align.distillation.train import train_student
from whorl.align.model.batch import pack, pad
from whorl.align.model.example import TokenizedExample
from whorl.align.model.policy_model import PolicyModel
from whorl.errors import CheckpointError, ConfigError, DataError
from whorl.models import make_model
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen"])
@pytest.mark.parametrize("packing", [True, False])
def test_first_step_matches_definition(kind: Any, packing: bool) -> None:
    texts, network, teacher = some_texts(8), network_of(), model_of(0)
    want = mean_divergence(network.model, teacher, texts, kind)
    config = config_of(divergence=kind, packing=packing, epochs=1.0, micro_batch_tokens=48)
    told = learn(network, LiveTeacher(teacher), texts, config)
    assert told[0]["kl"] == pytest.approx(want, rel=1e-4)
    assert told[0]["loss_tokens"] == sum(int(text.loss_mask.sum()) for text in texts)


@pytest.mark.parametrize(("kind", "own"), [("forward", 0.0), ("reverse", 1.0), ("jensen", 0.5)])
def test_student_approaches_teacher(kind: Any, own: float) -> None:
    texts, network, teacher = some_texts(), network_of(), model_of(0)
    before = {name: p.detach().clone() for name, p in network.model.named_parameters()}
    first = mean_divergence(network.model, teacher, texts, kind)
    told = learn(
        network,
        LiveTeacher(teacher),
        texts,
        config_of(divergence=kind, on_policy_fraction=own, epochs=10.0, lr_scale=1.0),
    )
    assert mean_divergence(network.model, teacher, texts, kind) < 0.6 * first
    still = [n for n, p in network.model.named_parameters() if torch.equal(p, before[n])]
    assert not still
    if own:
        assert all(t["logprob_diff_max"] < 1e-4 for t in told) and told[0]["on_policy_tokens"] > 0
    assert (told[0].get("completion_length/on_policy") is not None) == (own > 0)


def test_on_policy_texts_follow_prompts() -> None:
    texts, seen = some_texts(8), list[Any]()

    class Listening(LiveTeacher):
        def loss(self, part: Any, *rest: Any) -> Any:
            seen.append({name: t.clone() for name, t in part.items()})
            return super().loss(part, *rest)

    learn(
        network_of(), Listening(model_of(0)), texts, config_of(on_policy_fraction=0.5, packing=False, epochs=1.0),
    )  # fmt: skip
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


@pytest.mark.parametrize(("own", "refresh"), [(0.0, 1), (1.0, 1), (0.5, 2)])
def test_resume_gives_same_bits(tmp_path: Path, own: float, refresh: int) -> None:
    texts, teacher = some_texts(16), model_of(0)
    config = config_of(
        on_policy_fraction=own, sync_every=refresh, epochs=3.0, checkpoint_seconds=1e-9, divergence="reverse"
    )

    class KilledError(Exception):
        pass

    whole = network_of()
    learn(whole, LiveTeacher(teacher), texts, config)
    steps = list[int]()

    def observe(step: int, metrics: dict[str, float]) -> None:
        steps.append(step)
        if step == 5:
            raise KilledError

    def run(observer: Any) -> PolicyModel:
        network = network_of()
        return train_student(
            network, LiveTeacher(teacher), texts, config, example_tokenizer=SCRIBE, pad_id=TOKENIZER.pad_id,
            callback=observer, checkpoint_dir=tmp_path,
        )  # fmt: skip

    with pytest.raises(KilledError):
        run(observe)
    again = run(lambda step, metrics: steps.append(step))
    assert 1 < steps[5] <= 5, "it did not go on from a checkpoint"
    for name, p in again.model.named_parameters():
        assert torch.equal(p, dict(whole.model.named_parameters())[name]), name


def test_checkpoint_rejects_other_teacher(tmp_path: Path) -> None:
    texts, config = some_texts(16), config_of(checkpoint_seconds=1e-9)
    learn(network_of(), LiveTeacher(model_of(0)), texts, config, checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match="teacher differs"):
        learn(network_of(), LiveTeacher(model_of(5)), texts, config, checkpoint_dir=tmp_path)


def test_step_independent_of_micro_batches() -> None:
    texts, teacher = some_texts(8), model_of(0)
    found = []
    for micro in (8192, 24):
        network = network_of()
        learn(
            network,
            LiveTeacher(teacher),
            texts,
            config_of(epochs=1.0, micro_batch_tokens=micro, divergence="jensen"),
        )
        found.append(torch.cat([p.detach().flatten() for p in network.model.parameters()]))
    assert torch.allclose(*found, atol=1e-5)


def test_other_vocabulary_is_rejected() -> None:
    other = make_model(model_of(0).config.model_copy(update={"vocab_size": 300}), generator(0, "test"))
    with pytest.raises(ConfigError, match=r"300 ids.*264 ids"):
        learn(network_of(), LiveTeacher(other), some_texts(8), config_of())
    words = tokenizer_fingerprint(Tokenizer.train(["abab"], 264))
    with pytest.raises(ConfigError, match=f"{words}.*{tokenizer_fingerprint(TOKENIZER)}"):
        learn(network_of(), LiveTeacher(model_of(0), words), some_texts(8), config_of())


def test_check_same_vocabulary_compares_tokens() -> None:
    a, b = (Tokenizer([*TOKENIZER.token_bytes[:256], pair]) for pair in (b"ab", b"ba"))
    assert check_same_vocabulary(a, Tokenizer(a.token_bytes[:257])) == tokenizer_fingerprint(a)
    with pytest.raises(ConfigError, match=r"Ann.*260 ids.*Ben.*260 ids: id 256 is b'ab' .* b'ba'"):
        check_same_vocabulary(a, b, names=("Ann", "Ben"))
    with pytest.raises(ConfigError, match=r"259 ids.*260 ids: id 256"):
        check_same_vocabulary(TOKENIZER, a)


def test_invalid_examples_are_rejected() -> None:
    with pytest.raises(DataError, match="no examples"):
        learn(network_of(), LiveTeacher(model_of(0)), [], config_of())
    with pytest.raises(DataError, match="example 1 has"):
        long = SCRIBE.prompt_completion("a", "b" * 40)
        learn(network_of(), LiveTeacher(model_of(0)), [some_texts(1)[0], long], config_of())


def test_on_policy_needs_prompts_only() -> None:
    bare = [TokenizedExample(t.ids[: t.prompt_length], t.loss_mask[: t.prompt_length]) for t in some_texts(8)]
    told = learn(
        network_of(),
        LiveTeacher(model_of(0)),
        bare,
        config_of(on_policy_fraction=1.0, divergence="reverse", epochs=1.0),
    )
    assert told[0]["loss_tokens"] == told[0]["on_policy_tokens"] > 0


def test_teacher_completions_end_with_stop_id() -> None:
    teacher = model_of(0)
    prompts = [SCRIBE.prompt(word) for word in ("ab", "cd", "ef") for _ in range(40)]
    texts, cut_off = sample_teacher_completions(teacher, SCRIBE, prompts, length=24, max_tokens=16)
    assert len(texts) + cut_off == 120
    assert all(int(t.ids[-1]) in SCRIBE.stop_ids and t.loss_mask[-1] for t in texts)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen"])
def test_cached_full_vocab_equals_live_teacher(kind: Any) -> None:
    texts, teacher, config = some_texts(8), model_of(0), config_of(divergence=kind, epochs=2.0)
    told = cache_teacher_logits(
        teacher, texts, pad_id=TOKENIZER.pad_id, top_k=VOCAB, vocab_fingerprint=tokenizer_fingerprint(TOKENIZER),
    )  # fmt: skip
    one, two = network_of(), network_of()
    a, b = learn(one, LiveTeacher(teacher), texts, config), learn(two, told, texts, config)
    assert [x["kl"] for x in a] == pytest.approx([x["kl"] for x in b], rel=1e-4)


@pytest.mark.parametrize("laid", ["lay", "pack"])
def test_target_rows_match_each_target(laid: str) -> None:
    texts, teacher = some_texts(9), model_of(0)
    told = cache_teacher_logits(teacher, texts, pad_id=TOKENIZER.pad_id, top_k=4)
    numbers = [7, 2, 5, 0]
    chosen = [texts[n] for n in numbers]
    part = pad(chosen, 258) if laid == "lay" else pack(chosen, 40, 258)
    rows = told.target_rows(part, torch.tensor(numbers))
    assert torch.equal(rows >= 0, part["loss_mask"])
    for local, number in enumerate(numbers):
        text = texts[number]
        ids = torch.from_numpy(text.ids)[None, :-1]
        said = teacher.logits(teacher(ids)).log_softmax(-1)[0][torch.from_numpy(text.loss_mask[1:])]
        mine = rows[(part["sequence"] == local) & part["loss_mask"]]
        assert torch.allclose(told.log_probs[mine], said.topk(4).values, atol=1e-5)
        assert torch.equal(told.top_ids[mine].long(), said.topk(4).indices)
