"""Policy objectives against loops from the papers: values, gradients, aggregation, micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

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


def drawn(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, shuffle: bool = True) -> CompletionTokens:
    """Return tokens of len(lengths) sequences in fp64, shuffled, with ratios beyond the clips."""
    g = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    if shuffle:
        sequence = sequence[torch.randperm(len(sequence), generator=g)]
    n = len(sequence)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(n, generator=g, dtype=torch.float64)

    log_prob = -3 * torch.rand(n, generator=g, dtype=torch.float64)
    return CompletionTokens(
        log_prob.requires_grad_(), log_prob.detach() + noise(0.4), noise(1.0), sequence, len(lengths),
        log_prob.detach() + noise(0.4), log_prob.detach() + noise(0.5), (2 + noise(0.2)).requires_grad_(),
        noise(1.0).abs(),
    )  # fmt: skip


def by_loops(tokens: CompletionTokens, method: PolicyLossConfig) -> Tensor:
    """Return the mean loss, sequence by sequence and token by token."""
    sums, lengths = [], []
    old = tokens.behaviour_log_prob if tokens.proximal_log_prob is None else tokens.proximal_log_prob
    for s in range(len(LENGTHS)):
        here = [n for n in range(len(tokens.sequence)) if int(tokens.sequence[n]) == s]
        whole = sum((tokens.log_prob[n] - old[n] for n in here), torch.zeros(())) / max(1, len(here))
        terms = []
        for n in here:
            a = tokens.advantage[n]
            r = torch.exp(whole if method.ratio == "sequence" else tokens.log_prob[n] - old[n])
            if method.ratio == "none":
                term = a * tokens.log_prob[n]
            else:
                near = r
                if method.clip_high is not None and float(r) > 1 + method.clip_high:
                    near = torch.tensor(1 + method.clip_high, dtype=torch.float64)
                if method.clip_low is not None and float(r) < 1 - method.clip_low:
                    near = torch.tensor(1 - method.clip_low, dtype=torch.float64)
                term = r * a if float(r * a) < float(near * a) else near * a
                if (
                    method.dual_clip is not None
                    and float(a) < 0
                    and float(term) < method.dual_clip * float(a)
                ):
                    term = method.dual_clip * a
            term = term if tokens.weight is None else term * tokens.weight[n]
            if method.kl_coef and method.kl_apply_to == "loss" and tokens.reference_log_prob is not None:
                d = tokens.log_prob[n] - tokens.reference_log_prob[n]
                k = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[method.kl_estimator]
                term = term - method.kl_coef * k
            if tokens.entropy is not None:
                term = term + method.entropy_coef * tokens.entropy[n]
            terms.append(term)
        sums.append(sum(terms, torch.zeros(())))
        lengths.append(len(here))
    if method.aggregation == "token":
        return -sum(sums, torch.zeros(())) / sum(lengths)
    if method.aggregation == "sequence":
        means = [x / n for x, n in zip(sums, lengths, strict=True) if n]
        return -sum(means, torch.zeros(())) / len(means)
    assert method.constant is not None
    return -sum((x / method.constant for x in sums), torch.zeros(())) / len(sums)


def leaves(tokens: CompletionTokens) -> list[Tensor]:
    return [t for t in (tokens.log_prob, tokens.entropy) if t is not None]


def gradients(mean: Tensor, tokens: CompletionTokens) -> list[Tensor]:
    found = torch.autograd.grad(mean, leaves(tokens), allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves(tokens), found, strict=True)]


CLIPS: list[dict[str, Any]] = [
    {"ratio": "none"}, {"ratio": "token"}, {"ratio": "token", "clip_low": 0.2, "clip_high": 0.2},
    {"ratio": "token", "clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5},
    {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.1}, {"ratio": "sequence", "clip_high": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("more", [{}, {"kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.2}])
def test_policy_loss_matches_papers(
    average: LossAggregation, clip: dict[str, Any], more: dict[str, Any]
) -> None:
    method = PolicyLossConfig(aggregation=average, constant=9.0, **clip, **more)
    for seed in range(3):
        tokens = drawn(seed)
        loss = policy_loss(tokens, method)
        mean, wanted = loss.total / loss.count, by_loops(tokens, method)
        torch.testing.assert_close(mean, wanted, atol=1e-9, rtol=1e-9, check_dtype=False)
        for ours, desired in zip(gradients(mean, tokens), gradients(wanted, tokens), strict=True):
            torch.testing.assert_close(ours, desired, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("missing", ["proximal_log_prob", "weight", "entropy"])
def test_policy_loss_matches_papers_without_stream(kl: Any, missing: str) -> None:
    tokens = replace(drawn(3), **{missing: None})
    method = replace(PRESETS["grpo"], kl_estimator=kl, kl_coef=0.7)
    loss = policy_loss(tokens, method)
    wanted = by_loops(tokens, method)
    torch.testing.assert_close(loss.total / loss.count, wanted, check_dtype=False)
    torch.testing.assert_close(
        gradients(loss.total / loss.count, tokens)[0], gradients(wanted, tokens)[0], atol=1e-9, rtol=1e-9
    )


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
        torch.testing.assert_close(total, whole.total)
        torch.testing.assert_close(count, whole.count)
        for metric, value in whole.metrics.items():
            torch.testing.assert_close(sum(p.metrics[metric] for p in parts), value)
        for ours, desired in zip(gradients(total, tokens), gradients(whole.total, tokens), strict=True):  # type: ignore[arg-type]
            torch.testing.assert_close(ours, desired)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("n_sequences", [0, 3, None])
def test_policy_loss_of_empty_batch_is_zero(name: str, n_sequences: int | None) -> None:
    tokens = drawn(lengths=())
    empty = replace(tokens, n_sequences=n_sequences)
    loss = policy_loss(empty, replace(PRESETS[name], constant=8.0))
    loss.total.backward()  # type: ignore[no-untyped-call]
    constant = PRESETS[name].aggregation == "constant"
    assert loss.total == 0 and loss.count == ((n_sequences or 0) if constant else 0)
    assert all(bool(m.isfinite()) for m in loss.metrics.values())


def test_policy_loss_count_by_aggregation() -> None:
    counts = {
        average: float(policy_loss(drawn(), PolicyLossConfig(aggregation=average, constant=2.0)).count)
        for average in ("token", "sequence", "constant")
    }
    assert counts == {"token": 15, "sequence": 4, "constant": 5}
    unknown = replace(drawn(), n_sequences=None)
    assert policy_loss(unknown, PolicyLossConfig(aggregation="constant", constant=2.0)).count == 4


@pytest.mark.parametrize("name", ["ppo", "gspo", "grpo"])
def test_policy_loss_stays_finite_for_infinite_ratio(name: str) -> None:
    n = 2
    log_prob = torch.zeros(n, requires_grad=True)
    tokens = CompletionTokens(
        log_prob, torch.tensor([-1e4, float("-inf")]), torch.zeros(n), torch.tensor([0, 1]), 2,
        reference_log_prob=torch.full((n,), -0.1),
    )  # fmt: skip
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
    torch.testing.assert_close(metrics["ratio/mean"] / 15, ratio.mean())
    clipped = ((ratio > 1.1) & (a > 0)) | ((ratio < 0.9) & (a < 0))
    assert 0 < metrics["clip_fraction"] == clipped.sum()
    torch.testing.assert_close(metrics["kl/behaviour"] / 15, (ratio - 1 - ratio.log()).mean())
    largest = torch.stack([ratio[tokens.sequence == s].max() for s in tokens.sequence])
    torch.testing.assert_close(metrics["ratio/max"], largest.sum())
    assert tokens.entropy is not None
    torch.testing.assert_close(metrics["entropy"], tokens.entropy.detach().sum())
    by_sequence = policy_loss(tokens, replace(method, aggregation="sequence")).metrics["ratio/mean"]
    torch.testing.assert_close(by_sequence, sum(ratio[tokens.sequence == s].mean() for s in (0, 2, 3, 4)))


def test_clipped_tokens_have_no_gradient() -> None:
    tokens = replace(drawn(5), proximal_log_prob=None, reference_log_prob=None, entropy=None)
    method = PolicyLossConfig(ratio="token", clip_low=0.1, clip_high=0.1)
    loss = policy_loss(tokens, method)
    (gradient,) = torch.autograd.grad(loss.total, tokens.log_prob)
    assert int((gradient == 0).sum()) == int(loss.metrics["clip_fraction"]) > 0


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_value_loss_matches_definition(clip: float | None, average: LossAggregation) -> None:
    tokens = drawn()
    value, old, target = tokens.log_prob, tokens.behaviour_log_prob, tokens.advantage
    loss = value_loss(
        value, old, target, tokens.sequence, clip=clip, aggregation=average, constant=3.0, n_sequences=5
    )
    sums = torch.zeros(5, dtype=torch.float64)
    for n, s in enumerate(tokens.sequence.tolist()):
        v = value[n]
        far = (v - target[n]) ** 2
        if clip is not None:
            moved = old[n] + torch.clamp(v - old[n], -clip, clip)
            far = torch.max(far, (moved - target[n]) ** 2)
        share = {"token": 1.0, "sequence": 1 / LENGTHS[s], "constant": 1 / 3.0}[average]
        sums = sums + torch.nn.functional.one_hot(torch.tensor(s), 5) * far * share / 2
    torch.testing.assert_close(loss.total, sums.sum())
    assert loss.count == {"token": 15, "sequence": 4, "constant": 5}[average]
    for ours, desired in zip(
        torch.autograd.grad(loss.total, value), torch.autograd.grad(sums.sum(), value), strict=True
    ):
        torch.testing.assert_close(ours, desired)
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": "tokn"},
        {"aggregation": "mean"},
        {"baseline": "groups"},
        {"clip_low": 0.2},
        {"ratio": "token", "clip_low": 1.2},
        {"ratio": "token", "clip_high": -0.1},
        {"ratio": "token", "dual_clip": 0.5},
    ],
)
def test_policy_loss_config_rejects_invalid_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PolicyLossConfig(**wrong)


def test_policy_loss_rejects_missing_input() -> None:
    tokens = drawn()
    with pytest.raises(ConfigError, match="constant"):
        policy_loss(tokens, PRESETS["dr_grpo"])
    with pytest.raises(ConfigError, match="reference"):
        policy_loss(replace(tokens, reference_log_prob=None), PRESETS["grpo"])
    with pytest.raises(ConfigError, match="entropy"):
        policy_loss(replace(tokens, entropy=None), PolicyLossConfig(entropy_coef=0.1))
    with pytest.raises(ConfigError, match="sequence 4"):
        policy_loss(replace(tokens, n_sequences=4), PolicyLossConfig())
    with pytest.raises(ConfigError, match="advantage"):
        replace(tokens, advantage=torch.zeros(3))
