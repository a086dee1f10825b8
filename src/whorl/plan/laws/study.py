"""A study: small runs of the planner's shapes on one token set, which run is next, and the law of their losses.

A run is a stable run with decay branches at FRACTIONS of its steps: three points for 1.4 times its FLOPs
(`train/lm/decay_branches.py`). Runs of all sizes have equal FLOPs, so that their points form IsoFLOP curves. A study begins
with the smallest, the middle and the largest size. Each next run is the one that narrows the answer most for its FLOPs. Of a
bootstrap sample of the law, q is the logarithm of the best size at MORE times the compute, and x those of a run's losses.
The run lowers the variance of q by cov(q, x) (cov(x) + noise^2 I)^-1 cov(x, q). The choice follows from the results so
far and no clock, so a study that was killed ends in the same law.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from whorl.errors import BudgetError, DataError
from whorl.machine.device_probe import Machine
from whorl.plan.accounting.model_cost import decoder_config, training_cost
from whorl.plan.config import FRACTIONS, PlanConfig, StudyConfig
from whorl.plan.ladder import Shape, ladder
from whorl.plan.laws.fits import SAMPLES, LawFit, fit_law
from whorl.plan.laws.law import MORE, effective_bytes, fitted_law
from whorl.plan.laws.points import Points
from whorl.plan.planner import make_plan
from whorl.tokens.shards import TokenSet
from whorl.tracking.progress import Progress
from whorl.train.job import Job

COST = 1 + 0.5 * sum(FRACTIONS[:-1])  # of a run over its stable part: a branch decays for half of its steps
SHARES = (1 / 24, 1 / 6)  # FLOPs of a run, relative to the study
# Of a run, so that its first branch has 400. Before, the loss falls faster than by a power: a law of runs of 600 to 2,600
# steps was 12 % too low at 6 times the compute.
MIN_STEPS = 1600
MAX_EPOCHS = 4.0  # of a run; beyond it repeated text is worth little (arXiv:2305.16264)
DATA = PlanConfig().data  # rows of a step
NOISE = 0.005  # of a loss, relative, by the seed
PRIOR = np.array(
    [[0.40, 0.32], [0.1, 0.1]]
)  # of alpha and beta: those of the shipped law, and their deviation


class StudyRun(NamedTuple):
    """A run to train."""

    shape: Shape
    steps: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.shape[1]}x{self.shape[0]}-{self.steps}-seed{self.seed}"


Results = Mapping[StudyRun, Sequence[float]]  # bits per byte at FRACTIONS of the steps, nan where it diverged


class Study:
    """The runs that `flops` buy on a token set.

    Raises:
        BudgetError: they buy no runs of three sizes.
    """

    def __init__(self, config: StudyConfig, tokens: Path, machine: Machine, flops: float) -> None:
        self.config, self.tokens, self.machine, self.flops = config, tokens, machine, flops
        token_set = TokenSet(tokens)
        self.vocab_size, split = token_set.vocab_size, token_set.split("train")
        self.corpus_bytes = split.n_bytes
        self.step_tokens = DATA.batch_size * DATA.seq_len
        self.step_bytes = self.step_tokens * split.n_bytes / len(split)
        self.sizes, self.step_flops = dict[Shape, int](), dict[Shape, float]()
        for shape in islice(ladder(), 0, 24, 2):  # one depth of each width
            model = decoder_config(*shape, self.vocab_size)
            cost = training_cost(model, batch_size=DATA.batch_size, seq_len=DATA.seq_len, replicas=1)
            self.sizes[shape], self.step_flops[shape] = (
                cost.block_params,
                cost.token_flops * self.step_tokens,
            )
        found = [
            StudyRun(s, int(flops * share / self.step_flops[s]), config.seed)
            for share in SHARES
            for s in self.sizes
        ]
        self.runs = [
            r
            for r in found
            if r.steps >= MIN_STEPS and r.steps * self.step_bytes <= MAX_EPOCHS * split.n_bytes
        ]
        shapes = sorted({run.shape for run in self.runs})
        if len(shapes) < 3:
            least = 1.1 * MIN_STEPS * sorted(self.step_flops.values())[2] / SHARES[-1]
            raise BudgetError(
                f"a study of {flops:.2g} FLOPs on {split.n_bytes / 1e6:.1f} MB of text has runs of {len(shapes)} sizes",
                expected=f"three: at least {least:.2g} FLOPs, and text that is read at most {MAX_EPOCHS:g} times",
                do=f"give --budget {least:.2g}flops, or a longer time; with less than 10 MB, more text",
            )  # fmt: skip
        self.first = shapes[0], shapes[len(shapes) // 2], shapes[-1]

    def job(self, run: StudyRun) -> Job:
        """Return the job of a stable run: the planner's, for these steps."""
        (width, depth), fixed = run.shape, self.config.deterministic
        config = PlanConfig(
            steps=run.steps, d_model=width, n_layers=depth, vocab_size=self.vocab_size, seed=run.seed, deterministic=fixed,
            data=DATA,
        )  # fmt: skip
        job = make_plan(config, self.machine, self.corpus_bytes, Progress.silent()).job
        return job.model_copy(update={"tokens": str(self.tokens), "evaluations": 1})

    def points(self, results: Results) -> Points:
        """Return the points of runs."""
        rows = [
            (self.sizes[run.shape], effective_bytes(steps * self.step_bytes, self.corpus_bytes),
             steps * self.step_flops[run.shape], loss, f"{run.name} at {steps:,}")
            for run, losses in results.items()
            for steps, loss in zip([round(share * run.steps) for share in FRACTIONS], losses, strict=True)
        ]  # fmt: skip
        *columns, names = zip(*rows, strict=True)
        n, d, flops, loss = np.array(columns, float)
        return Points(n, d, flops, loss, names)

    def fit(self, results: Results, corpus: str = "", samples: int = SAMPLES) -> LawFit:
        """Return the law of the losses, with the vocabulary term of the shipped law. Raises DataError."""
        points, shipped = self.points(results), fitted_law()
        p, k = np.polyfit(np.log(points.parameters), np.log(points.flops / points.data), 1)
        named = replace(shipped, corpus=corpus, flops_coef=float(np.exp(k)), flops_exponent=float(p))
        loss = points.loss - shipped.vocabulary_term(points.parameters, self.vocab_size)
        return fit_law(replace(points, loss=loss), named, prior=PRIOR, samples=samples)

    def next_run(self, results: Results) -> StudyRun | None:
        """Return the run to train next; None when no run fits into the FLOPs that are left."""
        left = self.flops - COST * sum(run.steps * self.step_flops[run.shape] for run in results)
        tried = Counter((run.shape, run.steps) for run in results)
        found = [run._replace(seed=run.seed + tried[run[:2]]) for run in self.runs]
        found = [run for run in found if COST * run.steps * self.step_flops[run.shape] <= left]
        new = [
            run for run in found if run.shape in self.first and run.shape not in {r.shape for r in results}
        ]
        if new or not found:
            return next(iter(new), None)
        found = [run for run in found if not tried[run[:2]]] or found  # a further seed of a run comes last
        try:
            fit = self.fit(results, samples=60)
        except DataError:
            return found[len(results) % len(found)]
        return max(found, key=lambda run: self._gain(fit, run))

    def _gain(self, fit: LawFit, run: StudyRun) -> float:
        """Return by how much a run lowers the variance of the answer, for each of its FLOPs."""
        points, law = self.points({run: [np.nan] * len(FRACTIONS)}), fit.law
        q = np.log(law.best_sizes(MORE * self.flops * SHARES[-1])[1:])
        q = np.clip(q, *np.quantile(q, [0.05, 0.95]))
        x = np.log([law.losses(row, points.parameters, points.data) for row in law.samples])
        q, x = q - q.mean(), x - x.mean(0)
        shared = q @ x / len(q)
        lowered = shared @ np.linalg.solve(x.T @ x / len(q) + NOISE**2 * np.eye(x.shape[1]), shared)
        return float(lowered) / (run.steps * self.step_flops[run.shape])
