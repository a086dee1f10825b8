"""The ladder of shapes, and the step time of every shape from few timings.

Widths are powers of two and the widths half-way between them: 64, 96, 128, 192, 256, 384, ... Each has two depths: a layer
per 64 of width (but 2 layers at width 64, and 3 up to width 192), and half as many layers more. Heads are 64 wide, or 32
where 64 does not divide the width (`decoder_config`). The ladder has no end; memory and budget bound it.

The time of a step is linear in the number of layers: t = a + b x layers. So two timings of shallow networks give all
depths of a width. A width without timings has the FLOP/s of the nearest width that has them. Small networks reach fewer
FLOP/s, so this overestimates wider shapes and underestimates narrower ones.

On a GPU the line of one width holds for all, since the step of a small model is the time of launches, which have no
width. The step of a large one is its FLOPs at an assumed rate. The longer of the two is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whorl.machine.budget import Budget
from whorl.models import TransformerConfig
from whorl.plan.accounting.model_cost import TrainingCost, decoder_config
from whorl.plan.config import PlanConfig
from whorl.plan.laws.law import ScalingLaw, bytes_per_token, effective_bytes

Shape = tuple[int, int]  # width, depth
TIMED_DEPTHS = (1, 3)
TIE = 0.005  # relative difference of expected bits per byte; the law errs by up to 0.03
SAME = 0.001  # relative difference of two costs over a life that is none
# n-gram tables memorize a short text that is read again. 3 MB of Python have, with 65,536 rows and with 16, 1.21 and 1.22
# bits per byte after 1.1 passes, and 1.25 and 1.14 after 2.3 (bench/plan/repeats.py). Longer texts were not measured.
FRESH_PASSES, SHORT_TEXT = 1.5, 4e6
VOCAB_SIZES = (512, 1024, 2048, 4096, 8192, 16_384)


def ladder() -> Iterator[Shape]:
    """Yield all shapes from small to large: each has over 1.3 times the weights of its predecessor."""
    width = 64
    while True:
        for wide in (width, width * 3 // 2):
            depth = max(wide // 64, min(3, wide // 32))
            yield wide, depth
            yield wide, depth + max(1, depth // 2)
        width *= 2


class StepTimes:
    """Seconds of a step by shape.

    Args:
        flops: FLOPs of a step of each shape.
        measure: times a step of a shape, in seconds.
        flop_rate: FLOP/s, assumed before the first timing.
        launch_bound: time one width, whose step is the launches of kernels, as on a GPU.
    """

    def __init__(
        self,
        flops: Mapping[Shape, float],
        measure: Callable[[int, int], float],
        flop_rate: float,
        *,
        launch_bound: bool = False,
    ) -> None:
        self.flops, self.measure, self.flop_rate, self.launch_bound = flops, measure, flop_rate, launch_bound
        self.timed: dict[int, tuple[float, float]] = {}  # width -> seconds apart from layers, and per layer

    def time_width(self, width: int) -> None:
        """Time two depths of a width."""
        shallow, deep = (self.measure(width, depth) for depth in TIMED_DEPTHS)
        per_layer = max((deep - shallow) / (TIMED_DEPTHS[1] - TIMED_DEPTHS[0]), 0.1 * shallow)
        self.timed[width] = (max(0.0, shallow - TIMED_DEPTHS[0] * per_layer), per_layer)

    def seconds(self, shape: Shape) -> float:
        """Return the seconds of a step: of a timed width by its line, else by the FLOP/s of the nearest timed shape."""
        width, depth = shape
        if self.launch_bound and self.timed:
            [(fixed, per_layer)] = self.timed.values()
            return max(fixed + depth * per_layer, self.flops[shape] / self.flop_rate)
        if width in self.timed:
            fixed, per_layer = self.timed[width]
            return fixed + depth * per_layer
        known = [other for other in self.flops if other[0] in self.timed]
        if not known:
            return self.flops[shape] / self.flop_rate
        nearest = min(known, key=lambda other: abs(math.log(self.flops[other] / self.flops[shape])))
        return self.seconds(nearest) * self.flops[shape] / self.flops[nearest]

    def next_width(self, best: Shape) -> int | None:
        """Return the width to time next: that of the best shape, then the next wider one; None if both are timed."""
        if self.launch_bound and self.timed:
            return None
        widths = sorted({width for width, _ in self.flops})
        wanted = [width for width in widths if width >= best[0]][:2]
        return next((width for width in wanted if width not in self.timed), None)


@dataclass(frozen=True)
class Candidate:
    """A shape with a vocabulary, and its expected result."""

    model: TransformerConfig
    step_seconds: float
    steps: int
    bits_per_byte: float
    block_params: int = 0


def rank(
    config: PlanConfig, budget: Budget, corpus_bytes: int, costs: Mapping[Shape, TrainingCost], times: StepTimes,
    law: ScalingLaw,
) -> list[Candidate]:  # fmt: skip
    """Return every shape with every vocabulary and its expected result."""
    found: list[Candidate] = []
    timed_vocabulary = config.vocab_size or 1024
    tokens = config.data.batch_size * config.data.seq_len
    for (width, depth), cost in costs.items():
        for vocabulary in [config.vocab_size] if config.vocab_size else VOCAB_SIZES:
            flops = (cost.token_flops + 6.0 * width * (vocabulary - timed_vocabulary)) * tokens
            # The vocabulary changes the step time in proportion to its FLOPs.
            step = times.seconds((width, depth)) * (1 + 0.5 * (flops / times.flops[width, depth] - 1))
            steps = int(budget.seconds * 0.93 / step if budget.seconds else (budget.flops or 0.0) / flops)
            seen = max(1, steps) * tokens * bytes_per_token(vocabulary)
            # A repeated epoch is worth less than new text (Muennighoff et al. 2023, arXiv:2305.16264, eq. 5).
            effective = effective_bytes(seen, corpus_bytes)
            model = shape_model(config, (width, depth), vocabulary, steps, corpus_bytes)
            bits = float(law.loss(cost.block_params, effective, vocabulary))
            found.append(Candidate(model, step, steps, bits, cost.block_params))
    return found


def shape_model(
    config: PlanConfig, shape: Shape, vocabulary: int, steps: int = 0, corpus_bytes: int = 0
) -> TransformerConfig:
    """Return the model of a shape that reads a text for `steps`; 0: one that is timed, with n-gram tables."""
    tables: dict[str, Any] = {} if config.ngram_buckets is None else {"ngram_buckets": config.ngram_buckets}
    seen = steps * config.data.batch_size * config.data.seq_len * bytes_per_token(vocabulary)
    if not tables and steps and corpus_bytes < SHORT_TEXT and seen > FRESH_PASSES * corpus_bytes:
        tables = {"ngram_orders": ()}
    return decoder_config(*shape, vocabulary, **tables)


def best_candidate(found: Sequence[Candidate]) -> Candidate:
    """Return the best of the candidates with the largest vocabulary, among those within TIE of the lowest bits per byte.

    The law cannot distinguish them, and a measurement of step times varies by more. It overrates small vocabularies: in
    quickstarts 512 tokens lose more against 1,024 than it expects (LOG.md).
    """
    lowest = min(c.bits_per_byte for c in found)
    tied = [c for c in found if c.bits_per_byte <= lowest * (1 + TIE)]
    return min(tied, key=lambda c: (-c.model.vocab_size, c.bits_per_byte))


def choose_candidate(
    config: PlanConfig, budget: Budget, corpus_bytes: int, costs: Mapping[Shape, TrainingCost], times: StepTimes,
    law: ScalingLaw,
) -> tuple[list[Candidate], Candidate]:  # fmt: skip
    """Return all candidates, and the best one; with tokens to serve, the one that is best over its life.

    A served token takes a third of a trained one (2 N of 6 N FLOPs). Best is the smallest candidate whose loss no other
    reaches in less time of training and serving together (Sardana et al. 2024, arXiv:2401.00448, eq. 3).
    """
    found = rank(config, budget, corpus_bytes, costs, times, law)
    step_tokens = config.data.batch_size * config.data.seq_len
    served = config.serve_tokens / step_tokens / 3  # in steps
    if not served:
        return found, best_candidate(found)

    def life(c: Candidate, bits: float) -> float:
        rest = bits - law.loss(c.block_params, math.inf, c.model.vocab_size)
        if rest <= 0:
            return math.inf
        read = law.data_unit * (law.data_coef / rest) ** (1 / law.data_exponent)
        steps = seen_bytes(read, corpus_bytes) / (step_tokens * bytes_per_token(c.model.vocab_size))
        return c.step_seconds * (steps + served)

    def excess(c: Candidate) -> float:
        return c.step_seconds * (c.steps + served) / min(life(other, c.bits_per_byte) for other in found)

    return found, min(found, key=lambda c: (excess(c) > 1 + SAME, c.block_params, c.bits_per_byte))


def seen_bytes(effective: float, corpus_bytes: float) -> float:
    """Return the bytes of repeated epochs that are worth `effective` bytes read once; infinite if none are."""
    extra = effective / corpus_bytes - 1
    if extra <= 0:
        return effective
    return math.inf if extra >= 15.4 else corpus_bytes * (1 - 15.4 * math.log(1 - extra / 15.4))
