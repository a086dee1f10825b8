"""Preference optimization as a stage: five losses, any split of a step, resume, and learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.align.byte_model import network, scribe
from tests.support.align.kill_at_step import Killed, kill_at
from tests.support.align.stage_inputs import (
    letter_pairs,
    make_pair,
    other_reference,
    perturbed,
    preference_config,
)
from torch import Tensor
from torch.nn import functional as F

from whorl.align.config import LoRAConfig, PreferenceConfig
from whorl.align.data.formats import Preference, UnpairedPreference
from whorl.align.model.example import LengthFilter, concat
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference.dpo import (
    _PreferenceBatches,
    evaluate_preferences,
    mismatched_examples,
    preference_objective,
    train_preferences,
)
from whorl.align.preference.pairs import (
    PreferencePair,
    UnpairedExample,
    sequence_log_probs,
    tokenize_completion,
    tokenize_pairs,
    tokenize_unpaired,
    valid_pairs,
)
from whorl.errors import CheckpointError, DataError
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.chat import ChatTemplate
from whorl.tokens.tokenizer import Tokenizer

OBJECTIVES = ("dpo", "ipo", "kto", "simpo", "orpo")
PAD = 0


def gradients(net: PolicyModel, settings: PreferenceConfig) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and gradients of one step over all pairs."""
    data = _PreferenceBatches(letter_pairs(), settings, PAD)
    words, objective = data.reference_log_probs(other_reference()), preference_objective(settings, net)
    parts = data.step_batches(list(range(data.pair_batches.n_units)), net, words, ProcessGroup())
    total: dict[str, float] = {"parts": len(parts), "loss": 0.0}
    for part in parts:
        loss = objective(part)
        loss.total.backward()
        for name, value in [("loss", loss.total), ("count", loss.count), *loss.metrics.items()]:
            total[name] = total.get(name, 0.0) + float(value.detach())
    found = {n: p.grad.to_dense() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return total, found


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, alpha=4.0)], ids=["full", "lora"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_step_independent_of_layout_and_split(objective: str, lora: LoRAConfig | None) -> None:
    net = perturbed(network(lora=lora))
    want, expected = gradients(net, preference_config(objective, micro_batch_tokens=100_000))
    assert want["parts"] == 1 and want["count"] == (24 if objective == "kto" else 12)
    assert want.get("kl", 1.0) > 0
    trained = {n for n, p in net.named_parameters() if p.requires_grad}
    assert trained == expected.keys() and all(
        g.any() for g in expected.values()
    )  # every parameter is trained
    for change in (
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 64},
        {"packing": True},
        {"packing": True, "micro_batch_tokens": 50},
    ):
        result, found = gradients(net, preference_config(objective, **change))
        assert result.pop("parts") > 1 or "micro_batch_tokens" not in change
        for name, value in result.items():
            assert value == pytest.approx(want[name], rel=1e-4, abs=1e-4), (change, name)
        for name, g in found.items():
            torch.testing.assert_close(
                g, expected[name], rtol=1e-3, atol=1e-5 * float(expected[name].abs().max()) + 1e-6
            )


def test_dpo_loss_matches_manual_computation() -> None:
    """Text by text with all logits: Rafailov et al., eq. 7."""
    net, reference = perturbed(network()), network()

    def log_prob(of: PolicyModel, text: Any) -> Tensor:
        logits = of.model.logits(of.model(torch.from_numpy(text.ids)[None]))[0]
        assert of.banned_mask is not None
        log_p = logits.masked_fill(of.banned_mask, -torch.inf).log_softmax(-1)
        each = [log_p[t - 1, text.ids[t]] for t in range(1, len(text)) if text.loss_mask[t]]
        return torch.stack(each).sum()

    terms = [
        -F.logsigmoid(
            0.3
            * (
                log_prob(net, p.chosen)
                - log_prob(reference, p.chosen)
                - log_prob(net, p.rejected)
                + log_prob(reference, p.rejected)
            )
        )
        for p in letter_pairs()
    ]
    found = evaluate_preferences(
        net, letter_pairs(), preference_config(beta=0.3), pad_id=PAD, reference=reference
    )
    assert found["loss"] == pytest.approx(float(torch.stack(terms).mean().detach()), rel=1e-5)
    assert 0 < found["rewards/accuracy"] < 1 and found["rewards/margin"] == pytest.approx(
        found["rewards/chosen"] - found["rewards/rejected"], abs=1e-5
    )


def test_reference_is_initial_network() -> None:
    net, seen = network(), list[dict[str, float]]()
    train_preferences(
        net, letter_pairs(), preference_config(epochs=4, lr_scale=0.01), pad_id=PAD,
        callback=lambda _, m: seen.append(m),
    )  # fmt: skip
    assert len(seen) == 12
    assert (
        seen[0]["loss"] == pytest.approx(np.log(2), abs=1e-4) and abs(seen[0]["rewards/margin"]) < 1e-4
    )  # at the initial weights
    assert seen[-1]["rewards/margin"] > 0.01
    again = evaluate_preferences(net, letter_pairs(), preference_config(), pad_id=PAD, reference=network())
    assert again["rewards/margin"] > 0.01 and again["rewards/accuracy"] > 0.9


def test_mismatched_examples_use_other_prompts() -> None:
    texts = [t for pair in letter_pairs(8) for t in (pair.chosen, pair.rejected)]
    made = mismatched_examples(texts, preference_config("kto", seq_len=10))
    assert len(made) == len(texts)
    for own, other in zip(texts, made, strict=True):
        n = own.prompt_length
        assert (
            np.array_equal(own.ids[:n], other.ids[:n])
            and other.loss_mask[n]
            and not other.loss_mask[:n].any()
        )
        givers = [
            t for t in texts if np.array_equal(t.ids[t.prompt_length :][: len(other) - n], other.ids[n:])
        ]
        assert any(not np.array_equal(g.ids[: g.prompt_length], own.ids[:n]) for g in givers)
        assert len(other) <= 10
    assert (
        mismatched_examples(texts[:2], preference_config("kto")) == []
    )  # with one prompt z is 0, without an error
    train_preferences(network(), letter_pairs(1), preference_config("kto"), pad_id=PAD)


def test_kto_pair_equals_two_examples() -> None:
    both = [
        o
        for p in letter_pairs()
        for o in (UnpairedExample(p.chosen, True), UnpairedExample(p.rejected, False))
    ]
    net, reference = perturbed(network()), other_reference()
    result = [
        evaluate_preferences(net, given, preference_config("kto"), pad_id=PAD, reference=reference)
        for given in (letter_pairs(), both)
    ]
    assert result[0] == result[1] and result[0]["kl"] > 0
    only_good = evaluate_preferences(
        net, both[::2], preference_config("kto"), pad_id=PAD, reference=reference
    )  # no NaN for the missing class
    assert only_good["rewards/chosen"] == pytest.approx(result[0]["rewards/chosen"], rel=1e-4)
    assert only_good["rewards/rejected"] == 0


def test_uninformative_items_are_rejected_and_counted() -> None:
    writer, room = scribe(), LengthFilter(16)
    given = [
        Preference("a>", "good", "bad"),
        Preference("a>", "x" * 30, "bad"),
        Preference("a>", "  ", "bad"),
        Preference("a>", "good", ""),
        Preference(({"role": "user", "content": "a"},), ({"role": "user", "content": "b"},), ()),
    ]
    kept = tokenize_pairs(writer, given, room)
    one = writer.prompt_completion("a>", "good")
    assert (
        len(kept) == 1
        and np.array_equal(kept[0].chosen.ids, one.ids)
        and np.array_equal(kept[0].chosen.loss_mask, one.loss_mask)
    )
    assert valid_pairs(writer, [PreferencePair(one, one)], room) == []
    assert sorted(room.rejected.values()) == [1, 1, 1, 2]
    assert {
        "chosen and rejected are the same ids",
        "a completion is empty",
        "longer than 16 ids",
    } < room.rejected.keys()
    labelled = [
        UnpairedPreference("a>", "good", True),
        UnpairedPreference("a>", "", False),
        UnpairedPreference("a>", "x" * 30, False),
    ]
    assert [o.label for o in tokenize_unpaired(writer, labelled, LengthFilter(16))] == [True]
    with pytest.raises(DataError, match="no preferences"):
        train_preferences(network(), [], preference_config(), pad_id=PAD)
    with pytest.raises(DataError, match="single completions"):
        train_preferences(network(), [UnpairedExample(one, True)], preference_config(), pad_id=PAD)


def test_completion_masks_last_turn_only() -> None:
    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    for writer in (scribe(), type(scribe())(tokenizer, ChatTemplate(tokenizer))):
        prompt = (
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "more"},
        )
        text = tokenize_completion(writer, prompt, ({"role": "assistant", "content": "hello again"},))
        before = writer.prompt(prompt)
        assert text.ids[: len(before)].tolist() == before and text.prompt_length == len(before)
        assert writer.decode(text.ids[text.loss_mask].tolist()).strip() == "hello again"


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_resume_gives_same_bits(tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = preference_config(objective, epochs=2, optimizer="muon")
    whole = train_preferences(network(), letter_pairs(), settings, pad_id=PAD).state_dict()
    with pytest.raises(Killed):
        observe = kill_at(4, monkeypatch)
        train_preferences(
            network(), letter_pairs(), settings, pad_id=PAD, checkpoint_dir=tmp_path, callback=observe
        )
    result: list[str] = []
    again = perturbed(network())  # neither the start of the resumed run nor the reference
    train_preferences(again, letter_pairs(), settings, pad_id=PAD, checkpoint_dir=tmp_path, log=result.append)
    assert any("continues at step 3 of" in line for line in result)
    for name, t in again.state_dict().items():
        assert torch.equal(t, whole[name]), name
    with pytest.raises(CheckpointError, match="texts"):
        train_preferences(network(), letter_pairs(seed=1), settings, pad_id=PAD, checkpoint_dir=tmp_path)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns_preferences(objective: str) -> None:
    """The better of two letters depends on the prompt; held-out prompts are completed correctly."""

    def pair(letter: str, tail: str) -> PreferencePair:
        good, bad = ("x", "y") if letter < "d" else ("y", "x")
        return make_pair(f"{tail}{letter}>", good, bad)

    draw = np.random.default_rng(0)
    made = [pair(draw.choice(list("abcdef")), "".join(draw.choice(list("uvw"), 3))) for _ in range(160)]
    net = network()
    settings = preference_config(objective, epochs=6, batch_size=16, lr_scale=0.3)
    train_preferences(net, made[:128], settings, pad_id=PAD)
    log_prob = sequence_log_probs(net, [t for p in made[128:] for t in (p.chosen, p.rejected)], PAD).view(
        -1, 2
    )
    assert (log_prob[:, 0] > log_prob[:, 1]).float().mean() > 0.95


def test_sampled_ids_are_trained_unchanged() -> None:
    writer = scribe()
    prompt = writer.prompt("a>")
    one = PreferencePair(
        concat(prompt, [65, 66, writer.tokenizer.eos_id]), concat(prompt, [67])
    )  # truncated: no end
    assert valid_pairs(writer, [one], LengthFilter(16)) == [one]
    before = sequence_log_probs(net := network(), [one.chosen, one.rejected], PAD)
    train_preferences(net, [one], preference_config(epochs=5), pad_id=PAD)
    after = sequence_log_probs(net, [one.chosen, one.rejected], PAD)
    assert after[0] - before[0] > after[1] - before[1]
