"""The ladder of shapes: its rule, step times from two depths of a width, and plans that grow with the budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import pytest
from tests.plan.test_plan import MACHINE, fake_timing

from whorl.machine.budget import Budget
from whorl.plan import planner
from whorl.plan.accounting.model_cost import decoder_config, training_cost
from whorl.plan.config import PlanConfig
from whorl.plan.ladder import Candidate, StepTimes, best_candidate, ladder, rank
from whorl.plan.laws.law import fitted_law
from whorl.tracking.progress import Progress

__all__ = ["fake_timing"]


def test_ladder_follows_its_rule_without_an_end() -> None:
    shapes = [*islice(ladder(), 40)]
    assert shapes[:12] == [
        (64, 2), (64, 3), (96, 3), (96, 4), (128, 3), (128, 4), (192, 3), (192, 4), (256, 4), (256, 6), (384, 6), (384, 9),
    ]  # fmt: skip
    assert (1024, 16) in shapes and shapes[-1][0] > 10_000
    sizes = [width**2 * depth for width, depth in shapes]
    assert all(large > 1.3 * small for small, large in pairwise(sizes))
    assert [decoder_config(width, 2, 1024).mixers["attention"].head_dim for width in (64, 96, 192)] == [
        64, 32, 64,
    ]  # fmt: skip


def test_step_time_is_a_line_in_depth_from_two_timings() -> None:
    flops = {(width, depth): float(width**2 * depth) for width in (64, 128, 256) for depth in (2, 4)}
    measured: list[tuple[int, int]] = []

    def measure(width: int, depth: int) -> float:
        measured.append((width, depth))
        return 0.5 + 0.001 * width * depth

    times = StepTimes(flops, measure, flop_rate=1e4)
    assert times.seconds((64, 2)) == flops[64, 2] / 1e4
    assert times.next_width((128, 4)) == 128
    times.time_width(128)
    assert measured == [(128, 1), (128, 3)] and times.seconds((128, 4)) == pytest.approx(
        0.5 + 0.001 * 128 * 4
    )
    assert times.seconds((256, 4)) == pytest.approx(4 * times.seconds((128, 4)))
    assert times.next_width((128, 2)) == 256  # a wider shape may be faster than its FLOPs suggest
    times.time_width(256)
    assert times.next_width((128, 2)) is None and times.next_width((256, 2)) is None


def test_gpu_step_is_launches_or_flops() -> None:
    flops = {(64, 2): 1.0, (128, 2): 4.0, (128, 4): 8.0, (4096, 2): 4096.0}
    times = StepTimes(flops, lambda width, depth: 1.0 + depth, flop_rate=100.0, launch_bound=True)
    assert times.next_width((64, 2)) == 64
    times.time_width(64)
    assert times.next_width((128, 2)) is None
    assert [times.seconds(shape) for shape in flops] == pytest.approx([3.0, 3.0, 5.0, 40.96])


def test_noisy_timings_give_positive_times() -> None:
    times = StepTimes({(64, 2): 1.0}, lambda width, depth: 1.0 / depth, flop_rate=1.0)
    times.time_width(64)
    assert 0 < times.seconds((64, 2)) < times.seconds((64, 3))


def test_flops_of_a_vocabulary_are_those_of_the_network() -> None:
    config = PlanConfig(vocab_size=None)
    cost = {
        v: training_cost(decoder_config(96, 3, v), batch_size=8, seq_len=256, replicas=1)
        for v in (1024, 4096)
    }
    shape, tokens = (96, 3), 8 * 256
    times = StepTimes({shape: cost[1024].token_flops * tokens}, lambda width, depth: 1.0, 1e9)
    found = rank(config, Budget(flops=1e14), 10**7, {shape: cost[1024]}, times, fitted_law())
    (candidate,) = [c for c in found if c.model.vocab_size == 4096]
    assert candidate.steps == int(1e14 / (cost[4096].token_flops * tokens))


def test_of_candidates_that_the_law_cannot_distinguish_a_larger_vocabulary_is_chosen() -> None:
    """A timing that is off by a few percent then chooses the same shape."""

    def candidate(width: int, depth: int, vocabulary: int, bits: float) -> Candidate:
        return Candidate(decoder_config(width, depth, vocabulary), 0.04, 7000, bits)

    near = [candidate(128, 4, 512, 0.9109), candidate(192, 3, 512, 0.9081), candidate(192, 3, 1024, 0.9091)]
    assert best_candidate(near) is near[2]
    wider = [*near, candidate(192, 4, 1024, 0.9117), candidate(256, 4, 1024, 0.92)]
    assert best_candidate(wider) is best_candidate(wider[::-1]) is wider[2]
    assert best_candidate(wider[4:]) is wider[4]


BUDGETS = (
    ("60s", "5m", "20m", "1h", "6h", "1d"),
    ("1e12flops", "1e14flops", "1e16flops", "1e18flops", "1e20flops", "1e21flops"),
)


@pytest.mark.parametrize("budgets", BUDGETS)
def test_larger_budgets_give_larger_and_better_plans(budgets: tuple[str, ...]) -> None:
    machine = replace(MACHINE, ram_bytes=200 << 30)
    plans = [
        planner.make_plan(PlanConfig(budget=budget), machine, 10**14, Progress.silent()) for budget in budgets
    ]
    sizes, bits = ([p.expected[key] for p in plans] for key in ("matrix_parameters", "bits_per_byte"))
    assert sizes == sorted(sizes) and sizes[-1] > 5 * sizes[0]
    assert bits == sorted(bits, reverse=True) and len({*bits}) == len(bits)
    if budgets[-1] == "1e21flops":
        assert plans[-1].job.model.d_model > 768
