"""The policy: log-probabilities equal to the engine's, adapters, critic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.align.byte_model import BANNED, decoder, network, scribe, sums
from tests.support.tiny import make_decoder

from whorl.align.config import LoRAConfig, StageConfig
from whorl.align.model import policy_model
from whorl.align.model.batch import pack, pad
from whorl.align.model.policy_model import PolicyModel, frozen_reference
from whorl.align.stage.task import make_learner
from whorl.errors import ConfigError
from whorl.evals.model.sampling import open_engine, policy_sampling, sample_completions
from whorl.models import Transformer
from whorl.models.lora import merge_lora
from whorl.nn.cpu import mlp
from whorl.objectives.next_token import Loss
from whorl.tokens.token_encoder import TokenizedExample, concat
from whorl.train.lm.kernels import Kernels


def sample(
    model: Transformer, n: int, *, temperature: float = 1.0, max_length: int = 64, max_tokens: int = 12
) -> tuple[list[TokenizedExample], dict[str, Any]]:
    """Return completions of `n` prompts, and the stream of the log-probabilities with which they were sampled."""
    writer = scribe()
    prompts = [writer.prompt(f"{i}+{i}=") for i in range(n)]
    found = sample_completions(
        open_engine(model, (4, max_length), writer, with_text=False), prompts,
        policy_sampling(temperature),
        max_tokens=max_tokens, stop_ids=writer.stop_ids, seed=3,
    )  # fmt: skip
    both = list(zip(prompts, found, strict=True))
    log_probs = [np.array([0.0] * len(p) + one.log_probs, np.float32) for p, one in both]
    return [concat(prompt, one.ids) for prompt, one in both], {"sampled_log_prob": log_probs}


def log_prob_difference(net: PolicyModel, part: dict[str, torch.Tensor]) -> float:
    mask, scored = part["loss_mask"], net.score(part)["log_prob"]
    assert not scored[~mask].any()
    return float((scored - part["sampled_log_prob"])[mask].abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_log_probs_match_trainer(temperature: float) -> None:
    net = network(temperature=temperature)
    texts, streams = sample(net.model, 10, temperature=temperature)
    for part in (pad(texts, 0, streams), pack(texts, 40, 0, streams)):
        assert log_prob_difference(net, part) < 1e-4


def test_context_hint_matches_engine_context() -> None:
    """A decoder trained on short rows uses other rotary tables for long contexts."""
    model = make_decoder(trained_length=16)
    net = PolicyModel(model, banned_ids=BANNED)
    for room, other in ((12, 48), (48, 12)):
        model.context_hint = room
        texts, streams = sample(model, 6, max_length=room, max_tokens=9)
        parts = [pad(texts, 0, streams), pack(texts, 24, 0, streams)]
        assert all(log_prob_difference(net, part) < 1e-4 for part in parts)
        model.context_hint = other
        assert log_prob_difference(net, parts[1]) > 1e-3


def test_banned_ids_are_never_sampled() -> None:
    net, writer, part = network(), scribe(), pad(sums(3), 0)
    log_prob, alone = (one.score(part)["log_prob"] for one in (net, PolicyModel(net.model)))
    assert (log_prob >= alone).all() and not torch.equal(log_prob, alone)
    assert writer.tokenizer.pad_id in BANNED and writer.tokenizer.eos_id not in BANNED
    texts, _ = sample(net.model, 8, temperature=5.0, max_tokens=30)
    assert not {i for text in texts for i in text.ids[text.loss_mask].tolist()} & set(BANNED)


def test_adapter_trains_alone_and_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "is_chosen", lambda *_: True)  # the C++ kernel would not call the layers' hooks
    monkeypatch.setattr(mlp, "mlp", lambda *_: pytest.fail("an MLP with an adapter ran without it"))
    net = network(lora=LoRAConfig(rank=2, alpha=4.0, target_modules=("q", "up")))
    before = {n: p.detach().clone() for n, p in net.model.named_parameters()}
    part = pad(sums(8), 0)
    config = StageConfig(lr_scale=1.0, optimizer="adamw")

    def objective(part: dict[str, torch.Tensor]) -> Loss:
        output = net.log_probs(part)
        return Loss(-output.log_prob.sum(), torch.tensor(float(len(output.log_prob))))

    start = objective(part).total.item()
    learner = make_learner(net, objective, config, positions=part["tokens"].numel())
    for _ in range(5):
        learner.updates[0].accumulate(objective(part))
        learner.updates[0].step(1.0)
    for name, p in net.model.named_parameters():
        assert torch.equal(p, before[name])
    assert objective(part).total.item() < start
    assert all(p.abs().sum() > 0 for p in net.factors.values())
    monkeypatch.undo()
    merged = decoder()
    merge_lora(merged, net.adapter())
    for name, p in merged.named_parameters():
        torch.testing.assert_close(net.merged_weights()[name], p)
    published = frozen_reference(decoder(), net, net.merged_weights().items()).score(part)
    torch.testing.assert_close(published["log_prob"], net.score(part)["log_prob"], rtol=1e-4, atol=1e-4)


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
    engine = open_engine(decoder(), (1, 16), scribe(), with_text=False)
    with pytest.raises(ConfigError, match="prompt 1"):
        sample_completions(
            engine, [[1], [1] * 20], policy_sampling(1.0), max_tokens=2, stop_ids=frozenset(), seed=0
        )


def test_only_long_stages_time_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    chosen = Kernels(256, True, True)
    monkeypatch.setattr(
        policy_model, "choose_step_kernels", lambda model, *shape: asked.append(shape) or chosen
    )
    net = network()
    for flops, timed, compiles in ((1e12, False, False), (2e13, True, False), (1e14, True, True)):
        asked.clear()
        net.choose_kernels(4, 512, flops)
        assert asked == [(4, 512)] * timed and net.compiles is compiles
        assert net.kernels == (chosen if timed else Kernels())
    torch.use_deterministic_algorithms(True)
    try:
        net.choose_kernels(4, 512, 1e14)
    finally:
        torch.use_deterministic_algorithms(False)
    assert net.kernels == Kernels() and not net.compiles
