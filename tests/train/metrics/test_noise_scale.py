"""The gradient noise scale: unbiased for any split into micro-batches or replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tests.support.train.pretraining import train_notes
from tests.support.train.tiny import job
from torch import Tensor, nn

from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.job import Job
from whorl.train.learner.learner import Learner
from whorl.train.learner.update import MicroBatch, Update, all_adamw
from whorl.train.metrics import layer_stats as figures
from whorl.train.metrics.noise_scale import NoiseScale, unbiased_estimates

CUTS = {"2 x 16": ([16, 16], 3000), "8 x 4": ([4] * 8, 1000), "unequal": ([3, 9, 20], 2000)}  # parts, batches


def looked_at(rows: Tensor, cut: Sequence[int], count: int) -> tuple[float, float]:
    """Estimates (tr Sigma, |G|^2) of a batch: mean gradients [N, P] of `count` tokens each, split into parts."""
    noise = NoiseScale()
    for part in torch.split(rows, list(cut)):
        halves = (part.sum(dim=0) * count).split([3, part.shape[1] - 3])  # as several tensors
        noise.add(halves, len(part) * count)
    parts, tokens, weighted = noise.local_sums()
    return unbiased_estimates(int(parts), tokens, weighted, float(rows.mean(dim=0).square().sum()))


@pytest.mark.parametrize("name", [*CUTS])
def test_noise_scale_is_unbiased_for_any_split(name: str) -> None:
    """Gaussian gradients: sum_i n_i |g_i - g|^2 is a sum of k - 1 independent squares for any split, independent of g.

    So the estimate of the trace has variance 2 tr(S S) / (k - 1). The tolerance is four standard errors.
    """
    (cut, batches), rows, width, count = CUTS[name], 32, 12, 7
    draw = generator(0, "noise", name)
    mean = torch.linspace(-0.4, 0.6, width, dtype=torch.float64)
    spread = torch.linspace(0.2, 1.4, width, dtype=torch.float64)  # anisotropic
    trace, twice = float(spread.square().sum()) * count, float(spread.pow(4).sum()) * count**2
    signal, tokens = float(mean.square().sum()), rows * count
    found = []
    for _ in range(batches):
        gradients = mean + spread * torch.randn(rows, width, generator=draw, dtype=torch.float64)
        found.append(looked_at(gradients, cut, count))
    traces, squares = torch.tensor(found, dtype=torch.float64).mean(dim=0).tolist()
    k = len(cut)
    error_trace = math.sqrt(2 * twice / (k - 1) / batches)
    of_mean = 4 * float((mean * spread).square().sum()) / rows + 2 * twice / tokens**2  # variance of |g|^2
    error_square = math.sqrt((of_mean + 2 * twice / (k - 1) / tokens**2) / batches)
    assert error_trace < 0.02 * trace and error_square < 0.02 * signal  # otherwise the test would be weak
    assert abs(traces - trace) < 4 * error_trace
    assert abs(squares - signal) < 4 * error_square
    scale = trace / signal
    assert traces / squares == pytest.approx(scale, rel=4 * (error_trace / trace + error_square / signal))


def test_noise_scale_equal_parts_match_paper() -> None:
    rows = torch.randn(24, 10, generator=generator(1, "noise"), dtype=torch.float64)
    small = sum(float(p.mean(dim=0).square().sum()) for p in torch.split(rows, 6)) / 4
    big = float(rows.mean(dim=0).square().sum())
    trace, square = looked_at(rows, [6] * 4, 1)
    assert trace == pytest.approx((small - big) / (1 / 6 - 1 / 24))
    assert square == pytest.approx((24 * big - 6 * small) / (24 - 6))


class Listener:
    """A GradHook that stores the estimates."""

    def __init__(self) -> None:
        self.noise, self.found = NoiseScale(), list[tuple[float, float]]()

    def is_due(self) -> bool:
        return True

    def on_micro_batch(self, gradients: Sequence[Tensor], count: float, scale: float) -> None:
        self.noise.add(gradients, count, scale)

    def on_gradients(self, gradients: Mapping[str, Tensor], clipped: float) -> None:
        whole = sum(float(g.double().square().sum()) for g in gradients.values()) / clipped**2
        parts, tokens, weighted = self.noise.local_sums()
        self.found.append(unbiased_estimates(int(parts), tokens, weighted, whole))
        self.noise.reset()

    def on_sparse_gradients(self, name: str, table: Tensor, ids: Tensor, gradients: Tensor) -> None: ...


@pytest.mark.parametrize("cut", [[8, 8], [4] * 4, [2, 6, 8]])
def test_noise_scale_matches_linear_regression(cut: list[int]) -> None:
    """x ~ N(0, 1), y = w* x + s e. At distance d from w* an example's gradient is x (x d - s e).

    Its mean is d and its squares sum to |d|^2 (n + 2) + s^2 n on average, so the noise scale is n + 1 + s^2 n / |d|^2.
    Batches are independent, so the sample gives standard errors; the tolerance is four of them.
    """
    n, s, rounds = 6, 0.5, 1500
    draw = generator(2, "regression", len(cut))
    network = nn.Linear(n, 1, bias=False)
    with torch.no_grad():
        network.weight.fill_(0.4)  # w* is 0; a negligible learning rate keeps the weights

    def objective(part: MicroBatch) -> Loss:
        off = network(part["x"])[:, 0] - part["y"]
        return Loss(off.square().sum() / 2, torch.tensor(float(len(off))), {})

    param_optims = all_adamw(network, 1e-12)
    learner = Learner(network, [Update(objective, param_optims, clip_norm=0.01)])  # clipping must not matter
    (update,) = learner.updates
    update.grad_hook = listener = Listener()
    for _ in range(rounds):
        x = torch.randn(16, n, generator=draw)
        y = s * torch.randn(16, generator=draw)
        for xs, ys in zip(x.split(cut), y.split(cut), strict=True):
            update.accumulate(objective({"x": xs, "y": ys}))
        update.step(1.0)
    d = n * 0.4**2
    found = torch.tensor(listener.found, dtype=torch.float64)
    (trace, square), errors = found.mean(dim=0).tolist(), (found.std(dim=0) / rounds**0.5).tolist()
    spread = 4 * (errors[0] / trace + errors[1] / square)
    assert spread < 0.2 and trace / square == pytest.approx(n + 1 + s**2 * n / d, rel=spread)


def noise_of(wanted: Job, scratch: Path) -> dict[str, float]:
    last = train_notes(wanted, scratch).steps[-1]
    return {n: v for n, v in last.items() if n.startswith("noise_scale/")}


def test_noise_scale_equal_for_micro_batches_and_replicas(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MIN_INTERVAL", 2)
    parts = noise_of(job(tokens, steps=2, micro_batch_size=4), tmp_path / "parts")
    assert parts["noise_scale/tr_sigma"] > 0 and parts["noise_scale/sequences"] > 0
    assert noise_of(job(tokens, steps=2, replicas=2), tmp_path / "replicas") == pytest.approx(parts, rel=1e-3)
    ratio = parts["noise_scale/tokens"] / parts["noise_scale/sequences"]
    assert 30 <= ratio <= 32  # tokens per row with a target
    assert noise_of(job(tokens, steps=2), tmp_path / "one") == {}


def test_noise_scale_is_ratio_of_averages() -> None:
    noise = NoiseScale()
    assert noise.finalize(1, 10, 3.0, 0.2, 2) == {} and noise.finalize(2, 10, math.nan, 0.2, 2) == {}
    first = noise.finalize(2, 10, 8.0, 0.5, 2)  # trace 3, square 0.2
    assert [first[f"noise_scale/{n}"] for n in ("tokens", "sequences")] == pytest.approx([15, 3])
    second = noise.finalize(2, 10, 8.0, 0.2, 2)  # trace 6, square -0.4
    assert second["noise_scale/grad_sq"] == pytest.approx(-0.4)
    assert set(second) == {"noise_scale/tr_sigma", "noise_scale/grad_sq"}
    third = noise.finalize(2, 10, 13.0, 1.2, 2)  # trace 1, square 1.1
    trace, square = 0.9 * (0.9 * 0.3 + 0.6) + 0.1, 0.9 * (0.9 * 0.02 - 0.04) + 0.11
    assert third["noise_scale/tokens"] == pytest.approx(trace / square)


def test_noise_scale_unaffected_by_loss_scale_and_bf16() -> None:
    rows = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    plain, scaled, narrow = NoiseScale(), NoiseScale(), NoiseScale()
    plain.add([rows], 4.0)
    scaled.add([rows * 256], 4.0, 256.0)
    narrow.add([rows.bfloat16()], 4.0)
    assert scaled.local_sums() == pytest.approx(plain.local_sums())
    assert narrow.local_sums() == pytest.approx(plain.local_sums(), rel=1e-3)
