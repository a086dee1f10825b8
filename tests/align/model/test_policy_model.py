"""The policy: log-probabilities equal to the engine's, adapters, critic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.align.byte_model import VOCAB, decoder, network, scribe, sums

from whorl.align.config import LoRAConfig, StageConfig
from whorl.align.model.batch import pack, pad
from whorl.align.model.example import concat
from whorl.align.model.policy_model import PolicyModel, frozen_reference
from whorl.align.model.sampling import banned_ids, policy_sampling, rollout_engine, sample_completions
from whorl.align.stage.trainer import make_learner
from whorl.errors import ConfigError
from whorl.models import Decoder
from whorl.models.lora import merge_lora


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_log_probs_match_trainer(temperature: float) -> None:
    net, writer = network(temperature=temperature), scribe()
    engine = rollout_engine(net.model, writer, sequences=4, max_length=64)
    prompts = [writer.prompt(f"{n}+{n}=") for n in range(10)]
    found = sample_completions(
        engine, prompts, policy_sampling(temperature), max_tokens=12, stop_ids=writer.stop_ids, seed=3
    )
    texts = [concat(prompt, one.ids) for prompt, one in zip(prompts, found, strict=True)]
    streams = [
        np.array([0.0] * len(p) + one.log_probs, np.float32) for p, one in zip(prompts, found, strict=True)
    ]
    for part in (
        pad(texts, 0, {"sampled_log_prob": streams}),
        pack(texts, 40, 0, {"sampled_log_prob": streams}),
    ):
        scored = net.score(part)["log_prob"]
        torch.testing.assert_close(
            scored[part["loss_mask"]], part["sampled_log_prob"][part["loss_mask"]], rtol=0, atol=1e-4
        )
        assert not scored[~part["loss_mask"]].any()


def test_context_hint_matches_engine_context() -> None:
    """A decoder trained on short rows uses other rotary tables for long contexts."""
    plain = decoder()
    model = Decoder(plain.config.model_copy(update={"trained_length": 16}), torch.Generator())
    model.load_state_dict(plain.state_dict())
    writer = scribe()
    prompts = [writer.prompt(f"{n}") for n in range(6)]
    for room in (12, 48):
        model.context_hint = room
        engine = rollout_engine(model, writer, sequences=4, max_length=room)
        found = sample_completions(
            engine, prompts, policy_sampling(1.0), max_tokens=9, stop_ids=writer.stop_ids, seed=3
        )
        texts = [concat(prompt, one.ids) for prompt, one in zip(prompts, found, strict=True)]
        sampled_log_prob = [
            np.array([0.0] * len(p) + one.log_probs, np.float32)
            for p, one in zip(prompts, found, strict=True)
        ]
        net = PolicyModel(model, banned_ids=banned_ids(writer, VOCAB, len(writer.tokenizer.token_bytes)))
        for part in (
            pad(texts, 0, {"sampled_log_prob": sampled_log_prob}),
            pack(texts, 24, 0, {"sampled_log_prob": sampled_log_prob}),
        ):
            mask = part["loss_mask"]
            torch.testing.assert_close(
                net.score(part)["log_prob"][mask], part["sampled_log_prob"][mask], rtol=0, atol=1e-4
            )
        model.context_hint = 12 if room == 48 else 48
        assert (net.score(part)["log_prob"][mask] - part["sampled_log_prob"][mask]).abs().max() > 1e-3


def test_banned_ids_are_never_sampled() -> None:
    net, writer = network(), scribe()
    part = pad(sums(3), 0)
    alone = PolicyModel(net.model)
    assert (net.score(part)["log_prob"] >= alone.score(part)["log_prob"]).all()
    assert not torch.equal(net.score(part)["log_prob"], alone.score(part)["log_prob"])
    out = banned_ids(writer, VOCAB, len(writer.tokenizer.token_bytes))
    assert writer.tokenizer.pad_id in out and writer.tokenizer.eos_id not in out
    found = sample_completions(
        rollout_engine(net.model, writer, sequences=8, max_length=64), [writer.prompt("1")] * 8,
        policy_sampling(5.0), max_tokens=30, stop_ids=writer.stop_ids, seed=0,
    )  # fmt: skip
    assert not {i for one in found for i in one.ids} & set(out)


def test_adapter_trains_alone_and_merges() -> None:
    net = network(lora=LoRAConfig(rank=2, alpha=4.0, target_modules=("q", "up")))
    before = {n: p.detach().clone() for n, p in net.model.named_parameters()}
    part = pad(sums(8), 0)
    config = StageConfig(lr_scale=1.0, optimizer="adamw")

    def objective(part: dict[str, torch.Tensor]):  # type: ignore[no-untyped-def]
        from whorl.objectives.next_token import Loss

        output = net.log_probs(part)
        return Loss(-output.log_prob.sum(), torch.tensor(float(len(output.log_prob))))

    start = objective(part).total.item()
    learner = make_learner(net, objective, config, positions=part["tokens"].numel())
    for _ in range(5):
        learner.updates[0].accumulate(objective(part))
        learner.updates[0].step(1.0)
    for name, p in net.model.named_parameters():
        assert torch.equal(p, before[name])
    after = objective(part).total.item()
    assert after < start
    assert all(p.abs().sum() > 0 for p in net.factors.values())
    merged = decoder()
    merge_lora(merged, net.adapter())
    for name, p in merged.named_parameters():
        torch.testing.assert_close(net.merged_weights()[name], p)
    published = frozen_reference(decoder(), net, net.merged_weights().items())
    torch.testing.assert_close(
        published.score(part)["log_prob"], net.score(part)["log_prob"], rtol=1e-4, atol=1e-4
    )


def test_critic_values_every_position() -> None:
    net = network(critic=True)
    part = pad(sums(4), 0)
    found = net.score(part)
    assert found["value"].shape == found["log_prob"].shape == part["tokens"].shape
    assert net.value is not None
    torch.nn.init.ones_(net.value.weight)
    output = net.log_probs(part)
    assert output.value is not None
    torch.testing.assert_close(net.score(part)["value"][part["loss_mask"]], output.value)


def test_every_parameter_has_optimizer() -> None:
    net = network(critic=True)
    assert set(net.param_optims(StageConfig().optim())) == {n for n, _ in net.named_parameters()}
    slow, fast = (StageConfig(lr_scale=s).optim() for s in (0.1, 0.2))
    assert fast.lr_muon == pytest.approx(2 * slow.lr_muon)


def test_sampling_rejects_greedy_and_long_prompts() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        policy_sampling(0.0)
    writer = scribe()
    engine = rollout_engine(decoder(), writer, sequences=1, max_length=16)
    with pytest.raises(ConfigError, match="prompt 1"):
        sample_completions(
            engine, [[1], [1] * 20], policy_sampling(1.0), max_tokens=2, stop_ids=writer.stop_ids, seed=0
        )
