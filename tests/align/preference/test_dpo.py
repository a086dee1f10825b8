"""Preference optimization as a stage: five losses, any split of a step, resume, and learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.support.align import stage_inputs as inputs
from tests.support.align.byte_model import BANNED, network, scribe, target_log_probs
from tests.support.align.kill_at_step import check_replicas, check_resume
from tests.support.align.stage_inputs import PAD, letter_pairs, preference_config
from tests.support.configs import updated
from torch import Tensor
from torch.nn import functional as F

from whorl.align.config import LoRAConfig, PreferenceConfig
from whorl.align.data.formats import Preference, UnpairedPreference
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference import dpo, pairs
from whorl.align.preference.dpo import evaluate_preferences, train_preferences
from whorl.align.preference.pairs import PreferencePair, UnpairedExample, sequence_log_probs
from whorl.errors import CheckpointError, ConfigError, DataError
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.chat import ChatTemplate
from whorl.tokens.token_encoder import LengthFilter, TokenEncoder, TokenizedExample, concat

OBJECTIVES = ("dpo", "ipo", "kto", "simpo", "orpo")


def train(net: PolicyModel, data: Any, config: PreferenceConfig, **rest: Any) -> Any:
    return inputs.train_stage(train_preferences, net, data, config, **rest)


def evaluate(net: PolicyModel, data: Any, config: PreferenceConfig, reference: PolicyModel) -> Any:
    return evaluate_preferences(net, data, config, pad_id=PAD, reference=reference)


def gradients(net: PolicyModel, settings: PreferenceConfig) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and gradients of one step over all pairs."""
    data = dpo._PreferenceBatches(letter_pairs(), settings, PAD)
    reference = data.reference_log_probs(inputs.other_reference())
    parts = data.step_batches(list(range(data.pair_batches.n_units)), net, reference, ProcessGroup())
    total: dict[str, float] = {"parts": len(parts)}
    for part in parts:
        loss = dpo.preference_loss(settings, net, part)
        loss.total.backward()
        for name, value in [("loss", loss.total), ("count", loss.count), *loss.metrics.items()]:
            total[name] = total.get(name, 0.0) + float(value.detach())
    found = {n: p.grad.to_dense() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return total, found


SPLITS = (
    {"train": {"micro_batch_tokens": 1}}, {"train": {"micro_batch_tokens": 64}}, {"packing": True},
    {"packing": True, "train": {"micro_batch_tokens": 50}},
)  # fmt: skip


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, alpha=4.0)], ids=["full", "lora"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_step_independent_of_layout_and_split(objective: str, lora: LoRAConfig | None) -> None:
    net = inputs.perturbed(network(lora=lora))
    want, expected = gradients(net, preference_config(objective, train={"micro_batch_tokens": 100_000}))
    assert want["parts"] == 1 and want["count"] == (24 if objective == "kto" else 12)
    assert want.get("kl", 1.0) > 0
    assert expected.keys() == {n for n, p in net.named_parameters() if p.requires_grad}
    assert all(g.any() for g in expected.values())  # every parameter is trained
    for change in SPLITS:
        result, found = gradients(net, preference_config(objective, **change))
        assert result.pop("parts") > 1 or "train" not in change
        for name, value in result.items():
            assert value == pytest.approx(want[name], rel=1e-4, abs=1e-4), (change, name)
        inputs.assert_gradients_close(found, expected)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_token_budget_over_replicas_and_resume(objective: str, tmp_path: Path) -> None:
    """Pairs stay whole. Steps of one unit leave the second replica without any."""
    config = updated(preference_config(objective, epochs=2), data={"batch_tokens": 26})
    data = dpo._PreferenceBatches(letter_pairs(), config, PAD)
    units = [unit for step in range(data.pair_batches.steps) for unit in data.pair_batches.step_units(step)]
    assert sorted(units[: len(units) // 2]) == list(range(data.pair_batches.n_units))

    def run(n: int = 1, **rest: Any) -> Any:
        return train(network(), letter_pairs(), updated(config, run={"replicas": n}), **rest)

    check_replicas(run)
    check_resume(run, tmp_path, kill=3)
    with pytest.raises(DataError, match="batch_tokens is 5"):
        train(network(), letter_pairs(), updated(config, data={"batch_tokens": 5}))


@torch.no_grad()
def test_dpo_loss_matches_manual_computation() -> None:
    """Text by text with all logits: Rafailov et al., eq. 7."""
    net, reference = inputs.perturbed(network()), network()

    def log_ratio(text: TokenizedExample) -> Tensor:
        """Sum of the log-probabilities of the trained ids, minus that of the reference."""
        ids = torch.from_numpy(text.ids[text.loss_mask])[:, None]
        p, q = (target_log_probs(one.model, text, banned=BANNED).gather(1, ids) for one in (net, reference))
        return (p - q).sum()

    given = letter_pairs()
    margins = torch.stack([log_ratio(pair.chosen) - log_ratio(pair.rejected) for pair in given])
    found = evaluate(net, given, preference_config(beta=0.3), reference)
    assert found["loss"] == pytest.approx(float(-F.logsigmoid(0.3 * margins).mean()), rel=1e-5)
    margin = found["rewards/chosen"] - found["rewards/rejected"]
    assert 0 < found["rewards/accuracy"] < 1 and found["rewards/margin"] == pytest.approx(margin, abs=1e-5)


def test_reference_is_initial_network() -> None:
    net, seen = train(network(), letter_pairs(), preference_config(epochs=4, lr_scale=0.01))
    assert len(seen) == 12
    assert seen[0]["loss"] == pytest.approx(np.log(2), abs=1e-4)  # at the initial weights
    assert abs(seen[0]["rewards/margin"]) < 1e-4 and seen[-1]["rewards/margin"] > 0.01
    again = evaluate(net, letter_pairs(), preference_config(), network())
    assert again["rewards/margin"] > 0.01 and again["rewards/accuracy"] > 0.9


def test_mismatched_examples_use_other_prompts() -> None:
    texts = [t for pair in letter_pairs(8) for t in (pair.chosen, pair.rejected)]
    made = dpo.mismatched_examples(texts, preference_config("kto", seq_len=10))
    for own, other in zip(texts, made, strict=True):
        n = own.prompt_length
        assert np.array_equal(own.ids[:n], other.ids[:n]) and len(other) <= 10
        assert other.loss_mask[n] and not other.loss_mask[:n].any()
        completion = other.ids[n:].tolist()
        givers = [t for t in texts if t.ids[t.prompt_length :].tolist()[: len(completion)] == completion]
        assert any(not np.array_equal(g.ids[: g.prompt_length], own.ids[:n]) for g in givers)
    assert dpo.mismatched_examples(texts[:2], preference_config("kto")) == []  # with one prompt z is 0
    train(network(), letter_pairs(1), preference_config("kto"))


def test_kto_pair_equals_two_examples() -> None:
    both = [UnpairedExample(*o) for p in letter_pairs() for o in ((p.chosen, True), (p.rejected, False))]
    net, reference, config = inputs.perturbed(network()), inputs.other_reference(), preference_config("kto")
    paired, single = (evaluate(net, given, config, reference) for given in (letter_pairs(), both))
    assert paired == single and paired["kl"] > 0
    only_good = evaluate(net, both[::2], config, reference)  # no NaN for the missing class
    assert only_good["rewards/chosen"] == pytest.approx(paired["rewards/chosen"], rel=1e-4)
    assert only_good["rewards/rejected"] == 0


def test_uninformative_items_are_rejected_and_counted() -> None:
    writer, room = scribe(), LengthFilter(16)
    turns = [({"role": "user", "content": text},) for text in "ab"]
    answers = [("good", "bad"), ("x" * 30, "bad"), ("  ", "bad"), ("good", "")]
    given = [*(Preference("a>", *answer) for answer in answers), Preference(*turns, ())]
    (kept,) = pairs.tokenize_pairs(writer, given, room)
    one = writer.prompt_completion("a>", "good")
    assert np.array_equal(kept.chosen.ids, one.ids) and np.array_equal(kept.chosen.loss_mask, one.loss_mask)
    assert pairs.valid_pairs(writer, [PreferencePair(one, one)], room) == []
    assert sorted(room.rejected.values()) == [1, 1, 1, 2]
    reasons = {"chosen and rejected are the same ids", "a completion is empty", "longer than 16 ids"}
    assert reasons < room.rejected.keys()
    labelled = [UnpairedPreference("a>", *o) for o in (("good", True), ("", False), ("x" * 30, False))]
    assert [o.label for o in pairs.tokenize_unpaired(writer, labelled, LengthFilter(16))] == [True]
    for items, message in (([], "no preferences"), ([UnpairedExample(one, True)], "single completions")):
        with pytest.raises(DataError, match=message):
            train(network(), items, preference_config())


def test_completion_masks_last_turn_only() -> None:
    tokenizer = scribe().tokenizer
    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    prompt, last = (user, assistant, {**user, "content": "more"}), {**assistant, "content": "hello again"}
    for writer in (scribe(), TokenEncoder(tokenizer, ChatTemplate(tokenizer))):
        text, before = pairs.tokenize_completion(writer, prompt, (last,)), writer.prompt(prompt)
        assert text.ids[: len(before)].tolist() == before and text.prompt_length == len(before)
        assert writer.decode(text.ids[text.loss_mask].tolist()).strip() == "hello again"


def test_resume_gives_same_bits(tmp_path: Path) -> None:
    """The resumed run starts with weights that are neither those of the first start nor the reference's."""
    settings = preference_config("kto", epochs=2, optimizer="muon")

    def run(**rest: Any) -> Any:
        net = inputs.perturbed(network()) if "log" in rest else network()
        return train(net, letter_pairs(), settings, **rest)

    check_resume(run, tmp_path, kill=4)
    with pytest.raises(CheckpointError, match="texts"):
        train(network(), letter_pairs(seed=1), settings, checkpoint_dir=tmp_path)


HINGE = "tests.support.align.hinge_preference:HINGE"  # outside of the package: no file of it knows the name


@pytest.mark.parametrize("objective", [*OBJECTIVES, HINGE])
def test_every_objective_learns_preferences(objective: str) -> None:
    """The better of two letters depends on the prompt; held-out prompts are completed correctly."""

    def pair(letter: str, tail: str) -> PreferencePair:
        return inputs.make_pair(f"{tail}{letter}>", *("xy" if letter < "d" else "yx"))

    draw = np.random.default_rng(0)
    made = [pair(draw.choice(list("abcdef")), "".join(draw.choice(list("uvw"), 3))) for _ in range(160)]
    net, _ = train(network(), made[:128], preference_config(objective, epochs=6, batch_size=16, lr_scale=0.3))
    held = [text for p in made[128:] for text in (p.chosen, p.rejected)]
    chosen, rejected = sequence_log_probs(net, held, PAD).view(-1, 2).T
    assert (chosen > rejected).float().mean() > 0.95


def test_sampled_ids_are_trained_unchanged() -> None:
    writer, net = scribe(), network()
    sampled = ([65, 66, writer.tokenizer.eos_id], [67])  # truncated: no end
    one = PreferencePair(*(concat(writer.prompt("a>"), ids) for ids in sampled))
    assert pairs.valid_pairs(writer, [one], LengthFilter(16)) == [one]
    before = sequence_log_probs(net, [one.chosen, one.rejected], PAD)
    train(net, [one], preference_config(epochs=5))
    gain = sequence_log_probs(net, [one.chosen, one.rejected], PAD) - before
    assert gain[0] > gain[1]


def test_unknown_objective_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"dpo, ipo, kto, simpo, orpo.*did you mean 'dpo'"):
        preference_config("dppo")
    for name, words in (
        ("nothing.here:X", "cannot be imported"),
        ("json:loads", "is no preference objective"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(network(), letter_pairs(), preference_config(name))
