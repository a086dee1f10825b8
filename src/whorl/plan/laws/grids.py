"""The grids of a study: the best learning rate at two widths, with muP and without, and the critical batch.

Rates are the defaults times FACTORS, of all parameters at once. The best factor is the lowest point of a parabola of the
loss in ln factor. The rates of the narrow model transfer if the wide one loses little by them; muP (`train/optim/mup.py`)
is compared at the wide one.

Larger batches read equal text in fewer steps, with rates that grow with the root of the batch (Malladi et al. 2022,
arXiv:2205.10287). By the study's law their loss is that of less text, D', and

    D / D' ~ 1 + B / B_crit      (McCandlish et al. 2018, arXiv:1812.06162, eq. 2.7 and 2.8)

gives the critical batch: beyond it, more rows need nearly as many times more text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whorl.errors import BudgetError
from whorl.plan.config import BATCHES, FACTORS
from whorl.plan.ladder import Shape
from whorl.plan.laws.law import ScalingLaw
from whorl.plan.laws.study import Study, StudyRun
from whorl.train.job import Job

SHARE = 0.25  # of a study's FLOPs
MIN_STEPS = 400  # of a run with the usual rows
RATES = ("lr_muon", "lr_adamw", "lr_embedding", "lr_scalar", "lr_ngram")


class GridRun(NamedTuple):
    """A run to train. factor: of the default rates; rows: of a step, relative. mup: rates of the narrow width by muP."""

    shape: Shape
    steps: int
    factor: float = 1.0
    rows: float = 1.0
    mup: bool = False

    @property
    def name(self) -> str:
        kind = f"rows{self.rows:g}" if self.rows > 1 else f"rate{self.factor:g}{'-mup' * self.mup}"
        return f"{self.shape[1]}x{self.shape[0]}-{self.steps}-{kind}"


class Rates(NamedTuple):
    """Losses of a model by FACTORS, and its best factor. lost: by the narrow model's best one, relative to the lowest."""

    name: str
    losses: list[float]
    best: float
    lost: float


class Grids(NamedTuple):
    """rates: of narrow, wide, and wide with muP. data: text that 1 and BATCHES times the rows need, relative.

    step_tokens: of the usual rows. critical_tokens: the critical batch; inf if more rows need no more text, nan if a run
    diverged, or the law has more for endless text than was measured.
    """

    rates: list[Rates]
    data: list[float]
    step_tokens: int
    critical_tokens: float


def grid_runs(study: Study, flops: float) -> list[GridRun]:
    """Return the runs of the grids for `flops` in all: the smallest shape of a study, and the one of twice its width.

    Raises:
        BudgetError: too few for MIN_STEPS steps.
    """
    narrow = study.first[0]
    wide = next(shape for shape in study.sizes if shape[0] >= 2 * narrow[0])
    flops_of = study.step_flops
    step = (len(FACTORS) + len(BATCHES)) * flops_of[narrow] + 2 * len(FACTORS) * flops_of[wide]
    if (steps := int(flops / step)) < MIN_STEPS:
        raise BudgetError(
            f"grids of {flops:.2g} FLOPs have {steps} steps of widths {narrow[0]} and {wide[0]}",
            expected=f"at least {MIN_STEPS} steps",
            do=f"give --budget {1.05 * MIN_STEPS * step / SHARE:.2g}flops or a longer time, or omit --grids",
        )
    rates = [(narrow, False), (wide, False), (wide, True)]
    return [
        *(GridRun(shape, steps, factor, mup=mup) for shape, mup in rates for factor in FACTORS),
        *(GridRun(narrow, round(steps / rows), rows=rows) for rows in BATCHES),
    ]


def grid_job(study: Study, run: GridRun) -> Job:
    """Return the job of a run: the study's, with these rates and rows."""
    job = study.job(StudyRun(run.shape, run.steps, study.config.seed))
    scale = run.factor * math.sqrt(run.rows)
    changed: dict[str, float] = {name: scale * getattr(job.optim, name) for name in RATES}
    base = {"mup_base_width": study.first[0][0]} if run.mup else {}
    optim = job.optim.model_copy(update={**changed, **base})
    return job.model_copy(update={"optim": optim, "batch_size": round(run.rows * job.batch_size)})


def read_grids(study: Study, losses: Mapping[GridRun, float], law: ScalingLaw) -> Grids:
    """Return what the runs show. losses: nan of a diverged run. law: of the study."""
    rates, narrow = list[Rates](), study.first[0]
    for shape, mup in dict.fromkeys((run.shape, run.mup) for run in losses if run.rows == 1):
        each = [losses[run] for run in losses if (run.shape, run.mup, run.rows) == (shape, mup, 1.0)]
        best, coefs = _lowest(each)
        used = rates[0].best if rates else best
        with_narrow, lowest = (float(np.polyval(coefs, math.log(factor))) for factor in (used, best))
        rates.append(
            Rates(f"width {shape[0]}{', muP' * mup}", each, best, max(with_narrow / lowest - 1, 0.0))
        )
    floor = float(law.loss(float(study.sizes[narrow]), math.inf, study.vocab_size))  # of endless text
    whole = rates[0].losses[FACTORS.index(1.0)]
    above = np.array([whole, *(loss for run, loss in losses.items() if run.rows > 1)]) - floor
    data = (np.maximum(above, 0.0) / above[0]) ** (1 / law.data_exponent)
    slope, start = np.polyfit([1.0, *BATCHES], data, 1) if np.isfinite(data).all() else (math.nan, math.nan)
    critical = math.inf if slope <= 0 else study.step_tokens * max(float(start / slope), 0.0)
    return Grids(rates, data.tolist(), study.step_tokens, critical)


def _lowest(losses: Sequence[float]) -> tuple[float, Any]:
    """Return the factor with the lowest loss within the grid, and the coefficients of the parabola in its logarithm."""
    x, known = np.log(FACTORS), np.isfinite(losses)
    if not known.any():
        return math.nan, [math.nan]
    coefs = np.polyfit(x[known], np.array(losses)[known], min(2, int(known.sum()) - 1))
    grid = np.linspace(x[known][0], x[known][-1], 201)
    return float(np.exp(grid[np.polyval(coefs, grid).argmin()])), coefs
