"""Updates, target networks and the training loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from tests.support.train.learners import adamw_learner, adamw_update, networks, part, run, squared
from tests.support.train.live_tensors import LiveTensorTracker
from tests.support.train.tiny import job
from torch import nn

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import ProcessGroup
from whorl.train.learner import loop
from whorl.train.learner.average import Average
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch, train_loop
from whorl.train.learner.update import MicroBatch, ParamOptim, Update, all_adamw
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.profiling.step_timer import random_batch


def test_updates_train_own_parameters_at_their_period() -> None:
    nets = networks()
    both = nn.Sequential(nets["a"], nn.Linear(1, 1))
    nets["tail"] = both[1]
    # the first update computes no gradient of the tail
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
    average = Average("a.", 0.75, target="target.")
    run(Learner(nets, [adamw_update(nets, 0.1)], averages=[average]), [part()])
    assert torch.allclose(nets["target"].weight, 0.75 * first + 0.25 * nets["a"].weight)


def test_target_network_is_copied_at_intervals() -> None:
    nets = networks()
    first = nets["target"].weight.detach().clone()
    copy = Average("a.", 0.0, every=2, target="target.")
    learner = Learner(nets, [adamw_update(nets, 0.1)], averages=[copy])
    run(learner, [part()])
    assert torch.equal(nets["target"].weight, first)
    run(learner, [part()])
    assert torch.equal(nets["target"].weight, nets["a"].weight) and not torch.equal(first, nets["a"].weight)


def test_check_updates_invalid_raises() -> None:
    nets = networks()
    twice = adamw_update(nets)
    unknown = Update(twice.objective, {"c": ParamOptim("adamw", 0.1)})
    for updates, targets, words in (
        ([unknown], [], "trains 'c'"),
        ([twice, twice], [], "trained by the updates 0 and 1"),
        ([Update(twice.objective, {}, every=0)], [], "every 0 rounds"),
        ([twice], [Average("c.", 0.9, target="target.")], r"no source 'c\.weight'"),
        ([twice], [Average("b.", 0.9, target="a.")], "is a target and trained"),
        ([twice], [Average("a.", 0.9, every=0, target="target.")], "every=0"),
        ([twice], [Average("a.", 1.5, target="target.")], r"decay=1\.5"),
    ):
        with pytest.raises(ConfigError, match=words):
            Learner(nets, updates, averages=targets)


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


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap"])
def test_parameter_without_gradient_is_skipped(optimizer: str) -> None:
    """Value and moments stay, in spite of momentum and decay, and other parameters are updated as without it."""
    nets, alone = (nn.ModuleDict({n: nn.Linear(3, 3, bias=False) for n in "ab"}) for _ in range(2))
    alone.load_state_dict(nets.state_dict())
    given = {"weight_decay": 0.1, "clip_norm": 0.01}
    rules = {f"{n}.weight": ParamOptim(optimizer, 0.1, decay_scale=1.0) for n in "ab"}
    learner = Learner(nets, [Update(lambda part: None, rules, **given)])
    without = Learner(alone, [Update(lambda part: None, {"a.weight": rules["a.weight"]}, **given)])

    def step(to: Learner, names: str, seed: int) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        for name in names:  # one micro-batch for each network
            to.updates[0].accumulate(Loss(to.networks[name](x).square().sum(), torch.tensor(4.0)))
        to.updates[0].step(1.0)

    for seed in range(3):
        step(learner, "ba", seed)
    without.shared.weights["a.weight"].copy_(learner.weights["a.weight"])
    for name, moment in without.shared.state.items():
        moment.copy_(learner.shared.state[name])
    without.updates[0]._set_steps(3)
    kept = {n: t.clone() for n, t in learner.shared.tensors().items() if "/b." in n}
    for seed in range(3, 6):
        step(learner, "a", seed)
        step(without, "a", seed)
    tensors = learner.shared.tensors()
    assert len(kept) >= 2 and all(torch.equal(tensors[n], t) for n, t in kept.items())
    assert torch.equal(learner.weights["a.weight"], without.weights["a.weight"])
    step(learner, "ab", 6)
    assert not any(torch.equal(learner.shared.tensors()[n], t) for n, t in kept.items() if "weights" in n)


def test_learner_without_gradients_matches_torch() -> None:
    """torch skips a parameter whose gradient is None. Its count of steps is set to the learner's."""
    nets, other = networks(), networks()
    both = [*other["a"].parameters(), *other["b"].parameters()]
    update = Update(
        lambda part: None, all_adamw(nets, 0.05, "a.") | all_adamw(nets, 0.05, "b."), clip_norm=0.1
    )
    learner, expected = Learner(nets, [update]), torch.optim.Adam(both, lr=0.05)
    for seed, names in enumerate(["ab", "a", "a", "b", "ab", "b"]):
        expected.zero_grad()
        for name in names:
            learner.updates[0].accumulate(squared(nets[name])(part(seed=seed)))
            squared(other[name])(part(seed=seed)).total.div(8 * len(names)).backward()
        learner.updates[0].step(1.0)
        torch.nn.utils.clip_grad_norm_(both, 0.1)
        for p in both:
            if p.grad is not None and seed:
                expected.state[p]["step"].fill_(seed)
        expected.step()
        for name in "ab":
            torch.testing.assert_close(nets[name].weight, other[name].weight, atol=2e-5, rtol=1e-4)


def test_gradient_on_one_replica_moves_a_parameter() -> None:
    """Replica 1 alone has a gradient of `b`; none has one of `target`, which would decay."""
    ends = []
    for replicas in (1, 2):
        nets = networks()
        rules = {n: ParamOptim("adamw", 0.1, decay_scale=1.0) for n, _ in nets.named_parameters()}
        shared = SharedState.allocate(nets, rules, replicas)
        lines = Pipe()
        groups = [ProcessGroup(0, 2, [None, lines[0]]), ProcessGroup(1, 2, [lines[1], None])]
        worlds = groups if replicas == 2 else [ProcessGroup()]
        update = Update(lambda part: None, rules, weight_decay=0.5)
        before = {n: w.clone() for n, w in shared.weights.items()}

        def train(world: ProcessGroup, shared=shared, update=update) -> None:
            own = networks()
            learner = Learner(own, [update], shared, world)
            for step in range(3):
                for name in ("a", "b") if world.size == 1 else ("ab"[world.rank],):
                    learner.updates[0].accumulate(squared(own[name])(part(seed=step)))
                learner.updates[0].step(1.0)

        with ThreadPoolExecutor() as threads:
            list(threads.map(train, worlds))
        ends.append(shared.weights)
        same = {n for n, w in before.items() if torch.equal(w, shared.weights[n])}
        assert same == {"target.weight", "target.bias"}
    torch.testing.assert_close(*ends)


def test_metrics_are_means_over_the_steps_that_have_them() -> None:
    steps = [
        {"loss": 1.0, "loss_tokens": 1.0, "kl": 0.5},
        {"loss": 3.0, "loss_tokens": 3.0, "value_loss": 2.0},
        {"loss": 9.0, "loss_tokens": 9.0, "skipped": 1.0},
    ]
    assert loop._mean(steps) == {"loss": 2.5, "kl": 0.5, "value_loss": 2.0, "loss_tokens": 4.0}


def test_an_update_that_moves_its_parameters_has_no_moments() -> None:
    nets, seen = networks(), list[torch.Tensor]()

    def apply(parameters: Sequence[torch.Tensor], gradient: torch.Tensor) -> dict[str, float]:
        seen.append(gradient.clone())
        with torch.no_grad():
            parameters[1].add_(1.0)
        return {"moved": 1.0}

    own = Update(squared(nets["a"]), all_adamw(nets, 0.1, "a."), clip_norm=float("inf"), apply=apply)
    learner = Learner(nets, [own, Update(squared(nets["b"]), all_adamw(nets, 0.1, "b."))])
    moments = {f"b.{kind}/{moment}" for kind in ("weight", "bias") for moment in ("mean", "square")}
    assert learner.shared.state.keys() == moments
    before = {n: w.clone() for n, w in learner.weights.items()}
    for update in learner.updates:
        update.accumulate(update.objective(part(seed=0)))
    assert [update.step(1.0).get("moved") for update in learner.updates] == [1.0, None]
    assert seen[0].shape == (sum(p.numel() for p in nets["a"].parameters()),) and seen[0].any()
    assert torch.equal(learner.weights["a.bias"], before["a.bias"] + 1)
    assert torch.equal(learner.weights["a.weight"], before["a.weight"])
    assert not torch.equal(learner.weights["b.weight"], before["b.weight"])
