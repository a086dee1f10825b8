"""Loss scaling: exact in fp32, prevents underflow in fp16; an overflow costs one step on all replicas."""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.train.checkpoint_states import load_latest
from tests.support.train.learners import adamw_learner, networks, part, run
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.pretraining import assert_equal, train, train_notes
from tests.support.train.spike_guards import make_guard, step_metrics
from tests.support.train.tiny import Notes, job

from whorl.nn import Linear
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.train import trainer
from whorl.train.config import SpikeGuardConfig
from whorl.train.job import Job
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loss_scaler import MAX_SCALE, MIN_SCALE, LossScaler
from whorl.train.learner.update import MicroBatch, Update, all_adamw
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.profiling.step_timer import random_batch
from whorl.train.resilience.spike_guard import SpikeGuard


def build(wanted: Job, scaler: LossScaler | None = None) -> Learner:
    model = build_model(wanted)
    return build_learner(model, wanted, allocate_shared(model, wanted), ProcessGroup(), loss_scaler=scaler)


def steps(wanted: Job, scaler: LossScaler | None, cut: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights, moments and gradient norms after a few fp32 steps."""
    learner, norms = build(wanted, scaler), []
    (update,) = learner.updates
    for _ in range(5):
        for _ in range(cut):
            update.accumulate(update.objective(random_batch(wanted, wanted.batch_size // cut)))
        norms.append(update.step(1.0)["grad_norm"])
    return {n: t.clone() for n, t in learner.shared.tensors().items()}, norms


@pytest.mark.parametrize("cut", [1, 2])
def test_loss_scale_changes_no_bit_in_fp32(tokens: Path, cut: int) -> None:
    """For Muon, AdamW and sparse Adagrad; with a growing scale, and a scale below 1."""
    plain, norms = steps(job(tokens), None, cut)
    for start in (2.0**-9, 2.0**11):
        scaling = LossScaler(init_scale=start, growth_interval=2)
        scaled, same = steps(job(tokens), scaling, cut)
        assert scaling.scale == 4 * start and same == norms
        assert all(torch.equal(plain[n], scaled[n]) for n in plain)


def test_loss_scale_prevents_fp16_underflow() -> None:
    """A gradient of 1e-8 underflows in fp16."""
    moved = []
    for scaling in (None, LossScaler(init_scale=2.0**14)):
        net = Linear(2, 1, std=1.0, generator=torch.Generator().manual_seed(0))
        before = net.weight.detach().clone()

        def objective(part: MicroBatch, net: Linear = net) -> Loss:
            return Loss((net(part["x"].half()).float() * 1e-8).sum(), torch.tensor(1.0))

        update = Update(objective, all_adamw(net, 0.1), loss_scaler=scaling, eps=1e-12)
        run(Learner(net, [update]), [part()])
        moved.append(float((net.weight.detach() - before).abs().max()))
    assert moved[0] == 0.0 and moved[1] == pytest.approx(0.1, rel=0.01)


def test_loss_scaler_skips_overflows_until_scale_fits() -> None:
    nets, scaling = networks(), LossScaler(init_scale=2.0**70, growth_interval=5)
    learner = adamw_learner(nets, 0.1, loss_scaler=scaling)
    seen: list[tuple[bool, float]] = []
    before = nets["a"].weight.detach().clone()

    def after(step: int, metrics: dict[str, float], clock: object) -> None:
        nonlocal before
        now = nets["a"].weight.detach().clone()
        assert ("skipped" in metrics) == ("overflow" in metrics) == torch.equal(now, before)
        before = now
        seen.append(("overflow" in metrics, metrics["loss_scale"]))

    run(learner, [part()] * 30, on_step_end=after)
    over = [left_out for left_out, _ in seen]
    first = over.index(False)
    assert 3 < first < 12 and scaling.overflows == sum(over)
    assert [scale for _, scale in seen[: first + 1]] == [2.0 ** (70 - n) for n in range(first + 1)]
    assert seen[-1] == (False, MAX_SCALE)
    assert bool(before.isfinite().all())


def test_loss_scaler_limits_and_nonfinite_loss() -> None:
    scaling = LossScaler(init_scale=MAX_SCALE, growth_interval=1)
    scaling.on_step_end()
    assert scaling.scale == MAX_SCALE
    assert not scaling.check_overflow(math.nan, math.nan)  # left to the spike guard
    assert scaling.scale == MAX_SCALE
    assert scaling.check_overflow(1.0, 1.0, rows_finite=False) and scaling.scale == MAX_SCALE / 2
    smallest = LossScaler({"scale": MIN_SCALE, "growth_tracker": 0, "overflows": 9})
    assert not smallest.check_overflow(1.0, math.inf)  # no smaller scale exists
    assert LossScaler(scaling.state).state == scaling.state


def test_loss_scaler_detects_overflow_in_table_rows(tokens: Path) -> None:
    wanted = job(tokens)
    learner = build(wanted, LossScaler())
    (update,) = learner.updates
    update.accumulate(update.objective(random_batch(wanted, wanted.batch_size)))
    table = next(iter(learner.shared.row_gradients.values()))
    table[0, 3, 0] = math.inf
    found = update.step(1.0)
    assert found["overflow"] == 1.0 and math.isfinite(found["grad_norm"])


def test_spike_guard_ignores_overflow() -> None:
    guard = make_guard()
    for _ in range(5):
        assert guard.accept_step(step_metrics())
    before = guard.state
    for _ in range(10):  # more than its patience
        assert not guard.accept_step({**step_metrics(norm=math.inf), "overflow": 1.0})
        assert not guard.pop_events() and not guard.needs_rollback
    guard.check_skip_limit()
    assert guard.state == before and guard.step == 15
    assert not guard.accept_step(step_metrics(loss=math.nan)) and guard.pop_events()


def _two(world: ProcessGroup, shared: SharedState, seen: torch.Tensor, bad: str) -> None:
    """The third batch of replica 1 is NaN, or its loss is finite and its gradients overflow."""
    nets, scaling = networks(), LossScaler(init_scale=2.0**40)
    guard = SpikeGuard(SpikeGuardConfig(), uniform_loss=1e9, steps=100)
    safety = {"accept_step": guard.accept_step} if bad == "nan" else {"loss_scaler": scaling}
    learner = adamw_learner(nets, 0.1, shared, world, **safety)

    def after(step: int, metrics: dict[str, float], clock: object) -> None:
        seen[world.rank, step - 1, :2] = nets["a"].weight.detach()[0]
        seen[world.rank, step - 1, 2] = math.log2(scaling.scale)
        world.all_gather_scalars()
        assert ("skipped" in metrics) == (step == 3)
        assert ("overflow" in metrics) == (step == 3 and bad == "overflow")

    records = [part(seed=10 * world.rank + step) for step in range(5)]
    if world.rank == 1:
        records[2] = {n: t * (math.nan if bad == "nan" else 1e9) for n, t in records[2].items()}
    run(learner, records, on_step_end=after)


@pytest.mark.parametrize(("bad", "scales"), [("nan", [40] * 5), ("overflow", [40, 40, 39, 39, 39])])
def test_bad_batch_on_one_replica_skips_on_both(bad: str, scales: list[int]) -> None:
    nets = networks()
    shared = SharedState.allocate(nets, all_adamw(nets, 0.1, "a."), replicas=2)
    seen = torch.zeros(2, 5, 3).share_memory_()
    with closing(spawn_replicas(2, _two, shared, seen, bad)) as world:
        _two(world, shared, seen, bad)
    assert torch.equal(seen[0], seen[1]) and bool(seen.isfinite().all())
    moved = [not torch.equal(a[:2], b[:2]) for a, b in itertools.pairwise(seen[0])]
    assert moved == [True, False, True, True] and seen[0, :, 2].tolist() == scales


def test_fp16_resume_during_overflows_is_exact(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts at a scale above fp16's range, so that the first steps overflow."""
    monkeypatch.setattr(trainer, "LossScaler", partial(LossScaler, init_scale=2.0**24, growth_interval=10))
    wanted, notes = job(tokens, steps=24, dtype="float16", evaluations=1), Notes()
    undisturbed = train(wanted, tmp_path / "a", notes)
    assert not notes.events and 1.0 <= notes.steps[-1]["loss_scale"] <= 2.0**17
    assert_overflows_change_nothing(wanted, tmp_path / "b", 4)
    assert_equal(undisturbed, train(wanted, tmp_path / "b"))


def assert_overflows_change_nothing(wanted: Job, scratch: Path, count: int) -> None:
    """Train `count` steps, which all overflow."""
    first = train(wanted, scratch, stop_after=count, checkpoint_seconds=0.0)
    kept = load_latest(scratch)
    assert kept is not None and kept.metadata["loss_scaler"]["overflows"] == count
    assert_equal(first, build_model(wanted))


def test_fp16_learns_as_fp32_with_replicas(tokens: Path, tmp_path: Path) -> None:
    reached = []
    for change in ({}, {"dtype": "float16"}, {"dtype": "float16", "replicas": 2, "micro_batch_size": 2}):
        notes = train_notes(job(tokens, steps=24, evaluations=1, **change), tmp_path / str(len(change)))
        reached.append(notes.evaluations[-1]["held_out_nll"])
    assert max(reached) - min(reached) < 5e-3 < 5.7 - reached[0], reached


@pytest.mark.parametrize("replicas", [1, 2])
def test_fp16_experts_learn_and_overflow_changes_nothing(
    replicas: int, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overflow does not move the balancing biases either."""
    mixture = shape(HEADS, experts=EXPERTS)
    wanted = job(tokens, model=mixture, steps=24, evaluations=1, dtype="float16", replicas=replicas)
    with monkeypatch.context() as high:
        high.setattr(trainer, "LossScaler", partial(LossScaler, init_scale=2.0**24))
        assert_overflows_change_nothing(wanted, tmp_path / "over", 3)
    notes = Notes()
    last = train(wanted, tmp_path / "fp16", notes)
    full = train_notes(wanted.model_copy(update={"dtype": "float32", "replicas": 1}), tmp_path / "fp32")
    biases = [t for n, t in last.state_dict().items() if n.endswith("balance_bias")]
    assert biases and all(bool(b.any()) for b in biases) and not notes.events
    reached, aim = (n.evaluations[-1]["held_out_nll"] for n in (notes, full))
    assert abs(reached - aim) < 0.1 < 5.7 - aim, (reached, aim)


def test_muon_orthogonalizes_fp16_gradients_in_fp32(tokens: Path) -> None:
    learner = build(job(tokens, dtype="float16"))
    (state,) = learner.updates
    assert state.optimizers[0].dtype == torch.float32 and learner.networks.dtype == torch.float16
    assert state.update.loss_scaler is not None
    assert {t.optimizer for t in state.update.param_optims.values()} >= {"muon"}
