"""Updates, target networks and the training loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.train.learners import adamw_learner, adamw_update, networks, part, run, squared
from tests.support.train.tiny import job
from torch import nn

from whorl.errors import ConfigError
from whorl.models.activation_checkpointing import LiveTensorTracker
from whorl.parallel.process_group import ProcessGroup
from whorl.train.learner.learner import Learner
from whorl.train.learner.loop import Stopwatch, train_loop
from whorl.train.learner.update import MicroBatch, ParamOptim, TargetNetwork, Update, all_adamw
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.profiling.step_timer import random_batch


def test_updates_train_own_parameters_at_their_period() -> None:
    nets = networks()
    both = nn.Sequential(nets["a"], nn.Linear(1, 1))
    nets["tail"] = both[1]
    # gradients of the first update on the tail are dropped
    first = Update(squared(both), all_adamw(nets, 0.01, "a."))
    learner = Learner(nets, [first, adamw_update(nets, 0.01, "b", every=3)])
    history = []

    def after(step: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        assert set(clock.pop_seconds()) == {"data", "logprobs", "backward", "optimizer"}
        history.append({n: w.clone() for n, w in learner.weights.items()})

    run(learner, [part()] * 6, on_step_end=after)
    a, b = {"a.weight", "a.bias"}, {"b.weight", "b.bias"}
    moved = [{n for n in x if not torch.equal(x[n], y[n])} for x, y in itertools.pairwise(history)]
    assert moved == [a, a, a | b, a, a]  # rounds 1 to 5


def test_stopwatch_counts_minibatches_as_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("whorl.train.learner.loop.time.perf_counter", lambda: now)

    def passes(given: MicroBatch) -> Iterator[list[MicroBatch]]:
        nonlocal now
        for seconds in (3.0, 0.5):  # scoring by a reference, then a second pass
            now += seconds
            yield [given]

    clock = Stopwatch()
    train_loop(adamw_learner(networks()), iter([part()]), passes, last=1, stopwatch=clock)
    assert clock.seconds == {"data": 0.0, "logprobs": 3.5, "backward": 0.0, "optimizer": 0.0}


def test_learner_adamw_matches_torch_adam() -> None:
    nets, other = networks(), networks()
    learner = adamw_learner(nets, clip_norm=1e9)
    theirs = torch.optim.Adam(other["a"].parameters(), lr=0.05)
    for seed in range(20):
        run(learner, [part(seed=seed)])
        theirs.zero_grad()
        squared(other["a"])(part(seed=seed)).total.div(8).backward()
        theirs.step()
    assert torch.allclose(nets["a"].weight, other["a"].weight, atol=1e-5)


def test_learner_with_matrices_only() -> None:
    nets = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False)})
    learner = Learner(nets, [Update(squared(nets["a"]), {"a.weight": ParamOptim("muon", 0.1)})])
    before = nets["a"].weight.detach().clone()
    run(learner, [part()])
    assert not torch.equal(nets["a"].weight, before)


def test_learner_step_independent_of_micro_batches() -> None:
    ends = []
    for cut in ([8], [4, 4], [1] * 8, [5, 3]):
        nets, split = networks(), {n: t.split(cut) for n, t in part().items()}
        pieces = [{n: ts[i] for n, ts in split.items()} for i in range(len(cut))]
        train_loop(adamw_learner(nets), itertools.repeat(pieces), lambda p: [p], last=10)
        ends.append(nets["a"].weight.detach().clone())
    assert all(torch.allclose(ends[0], e, atol=1e-6) for e in ends)


def test_metrics_are_weighted_by_loss_tokens() -> None:
    nets, seen, whole = networks(), [], part(6)
    learner = adamw_learner(nets, 1e-9)
    cut = [[{n: t[:2] for n, t in whole.items()}], [{n: t[2:] for n, t in whole.items()}]]
    train_loop(learner, iter([cut]), iter, last=1, on_step_end=lambda _, metrics, __: seen.append(metrics))
    want = squared(nets["a"])(whole)
    assert seen[0]["loss_tokens"] == 6 and learner.rounds == 2
    assert seen[0]["loss"] == seen[0]["error"] == pytest.approx(want.total.item() / 6, rel=1e-4)


def test_target_network_follows_moving_average() -> None:
    nets = networks()
    first = nets["target"].weight.detach().clone()
    average = TargetNetwork("target.", "a.", 0.75)
    run(Learner(nets, [adamw_update(nets, 0.1)], target_networks=[average]), [part()])
    assert torch.allclose(nets["target"].weight, 0.75 * first + 0.25 * nets["a"].weight)


def test_check_updates_invalid_raises() -> None:
    nets = networks()
    twice = adamw_update(nets)
    unknown = Update(twice.objective, {"c": ParamOptim("adamw", 0.1)})
    for updates, targets, words in (
        ([unknown], [], "trains 'c'"),
        ([twice, twice], [], "trained by the updates 0 and 1"),
        ([Update(twice.objective, {}, every=0)], [], "every 0 rounds"),
        ([twice], [TargetNetwork("target.", "c.", 0.9)], r"no source 'c\.weight'"),
        ([twice], [TargetNetwork("a.", "b.", 0.9)], "is a target and trained"),
    ):
        with pytest.raises(ConfigError, match=words):
            Learner(nets, updates, target_networks=targets)


def test_step_reuses_memory(tokens: Path) -> None:
    wanted = job(tokens)
    model = build_model(wanted)
    (update,) = build_learner(model, wanted, allocate_shared(model, wanted), ProcessGroup()).updates
    part = random_batch(wanted, wanted.batch_size)
    places, left, peaks = set(), [], []
    for number in range(8):
        update.accumulate(update.objective(part))
        if number < 2:  # one step per Muon group
            update.step(1e-3)
            continue
        with LiveTensorTracker() as alive:
            update.step(1e-3)
        places.add(tuple(t.data_ptr() for t in update.reduced_gradients.values()))
        left.append(alive.bytes)
        peaks.append(alive.peak)
    assert len(places) == 1 and left == [0] * 6, "what a step makes does not outlive it"
    assert peaks[:2] * 3 == peaks, "and every second step is alike"
