"""Policy objectives against the equations of the papers: values, gradients, aggregation, micro-batches."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_losses
from torch import Tensor
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.objectives.llm_policy import (
    PRESETS,
    CompletionTokens,
    LossAggregation,
    PolicyLossConfig,
    overlong_reward,
    policy_loss,
    value_loss,
)

LENGTHS = (4, 0, 1, 7, 3)


def drawn(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> CompletionTokens:
    """Return tokens of len(lengths) sequences in fp64, shuffled, with ratios beyond the clips."""
    g = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    n = len(sequence)
    sequence = sequence[torch.randperm(n, generator=g)]

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(n, generator=g, dtype=torch.float64)

    log_prob = -3 * torch.rand(n, generator=g, dtype=torch.float64)
    return CompletionTokens(
        log_prob.requires_grad_(), log_prob.detach() + noise(0.4), noise(1.0), sequence, len(lengths),
        log_prob.detach() + noise(0.4), log_prob.detach() + noise(0.5), (2 + noise(0.2)).requires_grad_(),
        noise(1.0).abs(),
    )  # fmt: skip


def by_definition(tokens: CompletionTokens, method: PolicyLossConfig) -> Tensor:
    """Return the mean loss by the papers' equations."""
    own = [tokens.sequence == s for s in range(len(LENGTHS))]
    old = tokens.behaviour_log_prob if tokens.proximal_log_prob is None else tokens.proximal_log_prob
    a, log_ratio = tokens.advantage, tokens.log_prob - old
    if method.ratio == "sequence":
        means = [log_ratio[here].sum() / max(1, n) for here, n in zip(own, LENGTHS, strict=True)]
        log_ratio = torch.stack(means)[tokens.sequence]
    if method.ratio == "none":
        term = a * tokens.log_prob
    else:
        low = -math.inf if method.clip_low is None else 1 - method.clip_low
        high = math.inf if method.clip_high is None else 1 + method.clip_high
        r = log_ratio.exp()
        near = torch.where((r < low) | (r > high), r.detach().clamp(low, high), r)
        term = torch.where(r * a < near * a, r * a, near * a)
        if method.dual_clip is not None:
            term = torch.where((a < 0) & (term < method.dual_clip * a), method.dual_clip * a, term)
    term = term if tokens.weight is None else term * tokens.weight
    if method.kl_coef and method.kl_apply_to == "loss" and tokens.reference_log_prob is not None:
        d = tokens.log_prob - tokens.reference_log_prob
        k = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[method.kl_estimator]
        term = term - method.kl_coef * k
    if tokens.entropy is not None:
        term = term + method.entropy_coef * tokens.entropy
    sums = [term[here].sum() for here in own]
    if method.aggregation == "token":
        return -torch.stack(sums).sum() / sum(LENGTHS)
    if method.aggregation == "sequence":
        return -torch.stack([x / n for x, n in zip(sums, LENGTHS, strict=True) if n]).mean()
    return -torch.stack(sums).mean() / method.constant


def leaves(tokens: CompletionTokens) -> list[Tensor]:
    return [t for t in (tokens.log_prob, tokens.entropy) if t is not None]


def assert_same(mean: Any, wanted: Tensor, tokens: CompletionTokens, **tolerance: float) -> None:
    """Compare two losses and their gradients."""
    assert_same_losses(mean, wanted, leaves(tokens), allow_unused=True, check_dtype=False, **tolerance)


CLIPS: list[dict[str, Any]] = [
    {"ratio": "none"}, {"ratio": "token"}, {"ratio": "token", "clip_low": 0.2, "clip_high": 0.2},
    {"ratio": "token", "clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5},
    {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.1}, {"ratio": "sequence", "clip_high": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("more", [{}, {"kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.2}])
def test_policy_loss_matches_papers(average: LossAggregation, clip: Any, more: Any) -> None:
    method = PolicyLossConfig(aggregation=average, constant=9.0, **clip, **more)
    for seed in range(3):
        tokens = drawn(seed)
        loss = policy_loss(tokens, method)
        assert_same(loss.total / loss.count, by_definition(tokens, method), tokens, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("missing", ["proximal_log_prob", "weight", "entropy"])
def test_policy_loss_matches_papers_without_stream(kl: Any, missing: str) -> None:
    tokens = replace(drawn(3), **{missing: None})
    method = replace(PRESETS["grpo"], kl_estimator=kl, kl_coef=0.7)
    loss = policy_loss(tokens, method)
    assert_same(loss.total / loss.count, by_definition(tokens, method), tokens, atol=1e-9, rtol=1e-9)


def part_of(tokens: CompletionTokens, sequences: tuple[int, ...]) -> CompletionTokens:
    """Return the tokens of some sequences, renumbered."""
    here = torch.tensor([int(s) in sequences for s in tokens.sequence])
    numbers = torch.tensor([sequences.index(int(s)) for s in tokens.sequence[here]], dtype=torch.int64)
    cut = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
    cut = {k: v[here] if isinstance(v, Tensor) else v for k, v in cut.items()}
    return CompletionTokens(**{**cut, "sequence": numbers, "n_sequences": len(sequences)})


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo"])
def test_policy_loss_independent_of_micro_batches(average: LossAggregation, name: str) -> None:
    tokens = drawn()
    method = replace(PRESETS[name], aggregation=average, constant=5.0, entropy_coef=0.1)
    whole = policy_loss(tokens, method)
    for cut in (((0, 1, 2, 3, 4),), ((0, 3), (1, 2, 4)), ((4,), (1,), (0, 2), (3,))):
        parts = [policy_loss(part_of(tokens, sequences), method) for sequences in cut]
        total, count = sum(p.total for p in parts), sum(p.count for p in parts)
        assert_close(count, whole.count)
        for metric, value in whole.metrics.items():
            assert_close(sum(p.metrics[metric] for p in parts), value)
        assert_same(total, whole.total, tokens)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("n_sequences", [0, 3, None])
def test_policy_loss_of_empty_batch_is_zero(name: str, n_sequences: int | None) -> None:
    empty = replace(drawn(lengths=()), n_sequences=n_sequences)
    loss = policy_loss(empty, replace(PRESETS[name], constant=8.0))
    loss.total.backward()  # type: ignore[no-untyped-call]
    constant = PRESETS[name].aggregation == "constant"
    assert loss.total == 0 and loss.count == ((n_sequences or 0) if constant else 0)
    assert all(bool(m.isfinite()) for m in loss.metrics.values())


def test_policy_loss_count_by_aggregation() -> None:
    for average, count in (("token", 15), ("sequence", 4), ("constant", 5)):
        assert policy_loss(drawn(), PolicyLossConfig(aggregation=average, constant=2.0)).count == count
    unknown = replace(drawn(), n_sequences=None)
    assert policy_loss(unknown, PolicyLossConfig(aggregation="constant", constant=2.0)).count == 4


@pytest.mark.parametrize("name", ["ppo", "gspo", "grpo"])
def test_policy_loss_stays_finite_for_infinite_ratio(name: str) -> None:
    log_prob, behaviour = torch.zeros(2, requires_grad=True), torch.tensor([-1e4, float("-inf")])
    tokens = CompletionTokens(log_prob, behaviour, torch.zeros(2), torch.tensor([0, 1]), 2)
    tokens = replace(tokens, reference_log_prob=torch.full((2,), -0.1))
    loss = policy_loss(tokens, PRESETS[name])
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert bool(loss.total.isfinite()) and bool(log_prob.grad.isfinite().all())  # type: ignore[union-attr]


def test_policy_loss_metrics_match_definition() -> None:
    tokens = replace(drawn(), proximal_log_prob=None)
    method = replace(PRESETS["grpo"], clip_low=0.1, clip_high=0.1, aggregation="token")
    metrics = policy_loss(tokens, method).metrics
    ratio = (tokens.log_prob - tokens.behaviour_log_prob).detach().exp()
    a = tokens.advantage
    assert metrics["tokens"] == 15
    assert_close(metrics["ratio/mean"] / 15, ratio.mean())
    clipped = ((ratio > 1.1) & (a > 0)) | ((ratio < 0.9) & (a < 0))
    assert 0 < metrics["clip_fraction"] == clipped.sum()
    assert_close(metrics["kl/behaviour"] / 15, (ratio - 1 - ratio.log()).mean())
    largest = torch.stack([ratio[tokens.sequence == s].max() for s in tokens.sequence])
    assert_close(metrics["ratio/max"], largest.sum())
    assert_close(metrics["entropy"], tokens.entropy.detach().sum())
    by_sequence = policy_loss(tokens, replace(method, aggregation="sequence")).metrics["ratio/mean"]
    assert_close(by_sequence, sum(ratio[tokens.sequence == s].mean() for s in (0, 2, 3, 4)))


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_value_loss_matches_definition(clip: float | None, average: LossAggregation) -> None:
    tokens = drawn()
    value, old, target = tokens.log_prob, tokens.behaviour_log_prob, tokens.advantage
    options = {"clip": clip, "aggregation": average, "constant": 3.0, "n_sequences": 5}
    loss = value_loss(value, old, target, tokens.sequence, **options)
    far = (value - target) ** 2
    if clip is not None:
        far = torch.max(far, (old + torch.clamp(value - old, -clip, clip) - target) ** 2)
    lengths = torch.tensor(LENGTHS).double()[tokens.sequence]
    share = {"token": 1.0, "sequence": 1 / lengths, "constant": 1 / 3.0}[average]
    assert_same_losses(loss.total, (far * share / 2).sum(), [value])
    assert loss.count == {"token": 15, "sequence": 4, "constant": 5}[average]
    assert bool(loss.metrics["value_clip_fraction"] > 0) == (clip is not None)


def test_overlong_reward_falls_linearly() -> None:
    lengths = torch.tensor([0, 10, 16, 17, 18, 19, 20, 21, 50])
    found = overlong_reward(lengths, max_length=20, buffer=4)
    assert found.tolist() == pytest.approx([0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1])
    with pytest.raises(ConfigError):
        overlong_reward(lengths, max_length=20, buffer=0)


def test_presets_differ_as_in_papers() -> None:
    grpo, dapo, dr, gspo = (PRESETS[name] for name in ("grpo", "dapo", "dr_grpo", "gspo"))
    assert (grpo.aggregation, grpo.scale_rewards, grpo.kl_coef) == ("sequence", "unbiased", 0.04)
    assert (dr.aggregation, dr.scale_rewards) == ("constant", "none")
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, "token")
    assert gspo.ratio == "sequence"
    for one, other in itertools.combinations(PRESETS.values(), 2):
        assert one != other
    with pytest.raises(TypeError):
        PRESETS["grpo"] = dapo  # type: ignore[index]


WRONG: list[dict[str, Any]] = [
    {"ratio": "tokn"}, {"aggregation": "mean"}, {"baseline": "groups"}, {"clip_low": 0.2},
    {"ratio": "token", "clip_low": 1.2}, {"ratio": "token", "clip_high": -0.1}, {"ratio": "token", "dual_clip": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_policy_loss_config_rejects_invalid_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PolicyLossConfig(**wrong)


def test_policy_loss_rejects_missing_input() -> None:
    tokens = drawn()
    cases = [
        ("constant", {}, PRESETS["dr_grpo"]),
        ("reference", {"reference_log_prob": None}, PRESETS["grpo"]),
        ("entropy", {"entropy": None}, PolicyLossConfig(entropy_coef=0.1)),
        ("sequence 4", {"n_sequences": 4}, PolicyLossConfig()),
        ("advantage", {"advantage": torch.zeros(3)}, PolicyLossConfig()),
    ]
    for message, change, method in cases:
        with pytest.raises(ConfigError, match=message):
            policy_loss(replace(tokens, **change), method)
