"""Updates, target networks and the training loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from tests.support.train.learners import networks, part, squared
from torch import nn

from whorl.errors import ConfigError
from whorl.train.learner.learner import Learner
from whorl.train.learner.loop import Stopwatch, train_loop
from whorl.train.learner.update import MicroBatch, ParamOptim, TargetNetwork, Update, all_adamw


def test_updates_train_own_parameters_at_their_period() -> None:
    nets = networks()
    both = nn.Sequential(nets["a"], nn.Linear(1, 1))
    nets["tail"] = both[1]
    updates = [
        Update(squared(both), all_adamw(nets, 0.01, "a.")),  # its gradients on the tail are dropped
        Update(squared(nets["b"]), all_adamw(nets, 0.01, "b."), every=3),
    ]
    learner = Learner(nets, updates)
    history = []

    def after(step: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        assert set(clock.pop_seconds()) == {"data", "logprobs", "backward", "optimizer"}
        history.append({n: w.clone() for n, w in learner.weights.items()})

    train_loop(learner, itertools.repeat(part()), lambda p: [[p]], last=6, on_step_end=after)
    moved = [
        {n for n in a if not torch.equal(a[n], b[n])} for a, b in itertools.pairwise(history)
    ]  # rounds 1 to 5
    assert moved == [
        {"a.weight", "a.bias"} | ({"b.weight", "b.bias"} if r % 3 == 0 else set()) for r in range(1, 6)
    ]


def test_stopwatch_counts_minibatches_as_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("whorl.train.learner.loop.time.perf_counter", lambda: now)

    def passes(given: MicroBatch) -> Iterator[list[MicroBatch]]:
        nonlocal now
        for seconds in (3.0, 0.5):  # scoring by a reference, then a second pass
            now += seconds
            yield [given]

    nets, spent = networks(), list[dict[str, float]]()
    learner = Learner(nets, [Update(squared(nets["a"]), all_adamw(nets, 0.05, "a."))])
    train_loop(
        learner,
        iter([part()]),
        passes,
        last=1,
        on_step_end=lambda step, metrics, clock: spent.append(clock.pop_seconds()),
    )
    assert spent == [{"data": 0.0, "logprobs": 3.5, "backward": 0.0, "optimizer": 0.0}]


def test_learner_adamw_matches_torch_adam() -> None:
    nets, other = networks(), networks()
    learner = Learner(nets, [Update(squared(nets["a"]), all_adamw(nets, 0.05, "a."), clip_norm=1e9)])
    theirs = torch.optim.Adam(other["a"].parameters(), lr=0.05)
    for seed in range(20):
        train_loop(learner, iter([part(seed=seed)]), lambda p: [[p]], last=1)
        theirs.zero_grad()
        squared(other["a"])(part(seed=seed)).total.div(8).backward()
        theirs.step()
    assert torch.allclose(nets["a"].weight, other["a"].weight, atol=1e-5)


def test_learner_with_matrices_only() -> None:
    nets = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False)})
    learner = Learner(nets, [Update(squared(nets["a"]), {"a.weight": ParamOptim("muon", 0.1)})])
    before = nets["a"].weight.detach().clone()
    train_loop(learner, iter([part()]), lambda p: [[p]], last=1)
    assert not torch.equal(nets["a"].weight, before)


def test_learner_step_independent_of_micro_batches() -> None:
    whole = part()
    cuts = ([8], [4, 4], [1] * 8, [5, 3])
    ends = []
    for cut in cuts:
        nets = networks()
        learner = Learner(nets, [Update(squared(nets["a"]), all_adamw(nets, 0.05, "a."))])
        pieces = [
            dict(zip(whole, rows, strict=True))
            for rows in zip(*(t.split(cut) for t in whole.values()), strict=True)
        ]
        train_loop(learner, itertools.repeat(pieces), lambda p: [p], last=10)
        ends.append(nets["a"].weight.detach().clone())
    assert all(torch.allclose(ends[0], e, atol=1e-6) for e in ends)


def test_metrics_are_weighted_by_loss_tokens() -> None:
    nets, seen = networks(), []
    learner = Learner(nets, [Update(squared(nets["a"]), all_adamw(nets, 1e-9, "a."))])
    train_loop(
        learner, iter([part(6)]), lambda p: [[{n: t[:2] for n, t in p.items()}], [{n: t[2:] for n, t in p.items()}]],
        last=1, on_step_end=lambda step, metrics, clock: seen.append(metrics),
    )  # fmt: skip
    want = squared(nets["a"])(part(6))
    assert seen[0]["loss_tokens"] == 6 and learner.rounds == 2
    assert seen[0]["loss"] == seen[0]["error"] == pytest.approx(want.total.item() / 6, rel=1e-4)


def test_target_network_follows_moving_average() -> None:
    nets = networks()
    first = nets["target"].weight.detach().clone()
    learner = Learner(
        nets,
        [Update(squared(nets["a"]), all_adamw(nets, 0.1, "a."))],
        target_networks=[TargetNetwork("target.", "a.", 0.75)],
    )
    train_loop(learner, iter([part()]), lambda p: [[p]], last=1)
    assert torch.allclose(nets["target"].weight, 0.75 * first + 0.25 * nets["a"].weight)


def test_check_updates_invalid_raises() -> None:
    nets = networks()
    objective = squared(nets["a"])
    with pytest.raises(ConfigError, match="trains 'c'"):
        Learner(nets, [Update(objective, {"c": ParamOptim("adamw", 0.1)})])
    twice = Update(objective, all_adamw(nets, 0.1, "a."))
    with pytest.raises(ConfigError, match="trained by the updates 0 and 1"):
        Learner(nets, [twice, twice])
    with pytest.raises(ConfigError, match="every 0 rounds"):
        Learner(nets, [Update(objective, {}, every=0)])
    with pytest.raises(ConfigError, match=r"no source 'c\.weight'"):
        Learner(nets, [twice], target_networks=[TargetNetwork("target.", "c.", 0.9)])
    with pytest.raises(ConfigError, match="is a target and trained"):
        Learner(nets, [twice], target_networks=[TargetNetwork("a.", "b.", 0.9)])
