"""The scaling law: expected loss of a model after an amount of data, and the best size for a budget.

    loss = E + A / N^alpha + B / D^beta + C |ln(V / V*(N))|^2
    FLOPs = k N^p D

N: parameters; D: data seen; V: vocabulary; V*: its best size for N. The form is eq. 2 of Hoffmann et al. 2022 (Training
Compute-Optimal Large Language Models, arXiv:2203.15556). The shipped law has a term for the vocabulary. A larger
vocabulary puts more text into a token, but the head takes a larger share of a small model (Tao et al. 2024,
arXiv:2407.13623).

FLOPs: k = 6 and p = 1 where N counts every weight that is multiplied. Where N leaves out the head, p is below 1.

The shipped law is fitted on the runs of `bench/plan/scaling_sweep.py`, on Python source: N are weights of the blocks'
matrices, D bytes of text. A study (`study.py`) fits another text's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

MORE = 10.0  # times the largest run: the budget of an answer, unless one is given
FAR = 1000.0  # times the runs' FLOPs, from which a prediction has a warning
LEVEL = 0.9  # of intervals
Interval = tuple[float, float]


@dataclass(frozen=True)
class Optimum:
    """The model that FLOPs train to the lowest loss; 90 % intervals, of no width in a law without samples."""

    parameters: float
    data: float
    loss: float
    parameters_interval: Interval
    data_interval: Interval
    loss_interval: Interval


@dataclass(frozen=True)
class ScalingLaw:
    """The fitted constants, their units, and the runs that they hold for.

    Attributes:
        irreducible .. data_exponent: E, A, alpha, B, beta, for N in `size_unit` parameters and D in `data_unit`.
        vocab_coef, optimal_vocab: C, and V* of a model of N = 1; V* grows with N^0.5. C is 0 in a law without that term.
        loss_name, data_name, size_name: what loss, D and N count. corpus: the text of the runs, in words.
        flops_coef, flops_exponent: k and p, for N and D in ones.
        parameters, data, flops: lowest and highest of the runs; zeros if unknown.
        samples: rows of E, A, alpha, B, beta, each fitted to a bootstrap sample of the runs.
    """

    irreducible: float
    size_coef: float
    size_exponent: float
    data_coef: float
    data_exponent: float
    vocab_coef: float = 0.0
    optimal_vocab: float = 1.0
    size_unit: float = 1.0
    data_unit: float = 1.0
    loss_name: str = "nats per token"
    data_name: str = "tokens"
    size_name: str = "parameters"
    corpus: str = ""
    flops_coef: float = 6.0
    flops_exponent: float = 1.0
    parameters: Interval = (0.0, 0.0)
    data: Interval = (0.0, 0.0)
    flops: Interval = (0.0, 0.0)
    samples: Sequence[Sequence[float]] = ()

    @property
    def constants(self) -> tuple[float, ...]:
        """E, A, alpha, B, beta."""
        fields = "irreducible", "size_coef", "size_exponent", "data_coef", "data_exponent"
        return tuple(getattr(self, name) for name in fields)

    def loss(self, parameters: Any, data: Any, vocab_size: float | None = None) -> Any:
        """Return the expected loss of numbers or arrays that broadcast. vocab_size: default: the best one for the size."""
        term = 0.0 if vocab_size is None else self.vocabulary_term(parameters, vocab_size)
        return self.losses(self.constants, parameters, data) + term

    def vocabulary_term(self, parameters: Any, vocab_size: float) -> Any:
        """Return the part of the loss that the vocabulary adds."""
        best = self.optimal_vocab * (parameters / self.size_unit) ** 0.5
        return self.vocab_coef * np.log(vocab_size / best) ** 2

    def losses(self, constants: Any, parameters: Any, data: Any) -> Any:
        """Return the expected loss by other constants, such as a sample's; without the vocabulary term."""
        e, a, alpha, b, beta = constants
        return e + a / (parameters / self.size_unit) ** alpha + b / (data / self.data_unit) ** beta

    def flops_for(self, parameters: Any, data: Any) -> Any:
        """Return the FLOPs of training a size on data."""
        return self.flops_coef * parameters**self.flops_exponent * data

    def data_for(self, flops: Any, parameters: Any) -> Any:
        """Return the data that FLOPs pay for with a size."""
        return flops / self.flops_for(parameters, 1.0)

    @property
    def exponent(self) -> float:
        """Return a of N_opt ~ FLOPs^a: beta / (alpha + p beta)."""
        return self.data_exponent / (self.size_exponent + self.flops_exponent * self.data_exponent)

    def best_sizes(self, flops: float) -> Any:
        """Return the best size for FLOPs by the law, then by each of its samples, [1 + samples].

        It is N where alpha A / N^alpha = p beta B / D^beta.
        """
        _, a, alpha, b, beta = np.array([self.constants, *self.samples]).T
        p = self.flops_exponent
        budget = math.log(self.data_for(flops, self.size_unit) / self.data_unit)  # ln D of the size N = 1
        with np.errstate(all="ignore"):
            log_n = (np.log(alpha * a / (p * beta * b)) + beta * budget) / (alpha + p * beta)
        return self.size_unit * np.exp(np.clip(log_n, -300, 300))

    def optimum(self, flops: float) -> Optimum:
        """Return the best size and data for FLOPs, in ones (not in units), with 90 % intervals."""
        sizes = self.best_sizes(flops)
        data = self.data_for(flops, sizes)
        losses = self.losses(np.array([self.constants, *self.samples]).T, sizes, data)
        found, tail = (sizes, data, losses), (1 - LEVEL) / 2
        ends = [
            tuple(map(float, np.quantile(each[bool(self.samples) :], [tail, 1 - tail]))) for each in found
        ]
        return Optimum(*(float(each[0]) for each in found), *ends)  # type: ignore[arg-type]

    def extrapolation(self, flops: float) -> float:
        """Return how many times FLOPs are above those of the largest run, or below those of the smallest; 1 between them."""
        low, high = self.flops
        return max(1.0, flops / high, low / flops) if high else 1.0

    def warning(self, flops: float) -> str:
        """Return a sentence if FLOPs are beyond FAR times the runs, else ""."""
        factor, (low, high) = self.extrapolation(flops), self.flops
        return "" if factor <= FAR else (
            f"warning: {flops:.2g} FLOPs are {factor:,.0f} times beyond the runs of this law ({low:.2g} to {high:.2g}): no "
            "run supports this answer"
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return a table that JSON can hold and `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> ScalingLaw:
        """Return the law of a table of `to_json`."""
        found: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in table.items()}
        return cls(**{**found, "samples": tuple(map(tuple, found.get("samples", ())))})


@cache
def fitted_law() -> ScalingLaw:
    """Return the law that ships with the package: bits per byte of Python source, of N block weights after D bytes."""
    stored = json.loads(resources.files("whorl.plan.laws").joinpath("scaling_law.json").read_text())
    n, d, v = (
        np.array([float(run[k]) for run in stored["runs"]]) for k in ("matrices", "bytes", "vocabulary")
    )
    flops = 6.0 * n * d / np.array([bytes_per_token(each) for each in v])
    return ScalingLaw(
        **stored["law"], size_unit=1e6, data_unit=1e6, loss_name="bits per byte", data_name="bytes",
        size_name="weights of the blocks", corpus="Python's standard library", flops_coef=6.0 / bytes_per_token(1024),
        parameters=ends(n), data=ends(d), flops=ends(flops),
    )  # fmt: skip


def ends(values: Any) -> Interval:
    """Return the lowest and the highest value."""
    return float(values.min()), float(values.max())


def bytes_per_token(vocab_size: float) -> float:
    """Return the bytes of source code per token: linear in log(vocabulary), fitted at 1,024, 2,048 and 4,096."""
    return 2.6 + 0.45 * math.log2(vocab_size / 1024)


def effective_bytes(seen: float, corpus_bytes: float) -> float:
    """Return how many bytes read once are worth `seen` bytes of repeated epochs (arXiv:2305.16264, eq. 5; R* = 15.4)."""
    if seen <= corpus_bytes:
        return seen
    repeats = seen / corpus_bytes - 1
    return corpus_bytes * (1 + 15.4 * (1 - math.exp(-repeats / 15.4)))
