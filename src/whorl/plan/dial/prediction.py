"""The predicted loss of a plan with its law and probe, and that of half and double the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from whorl.plan.accounting.model_cost import training_cost
from whorl.plan.dial.probe import Probe, of_python
from whorl.plan.ladder import Candidate
from whorl.plan.laws.law import ScalingLaw, bytes_per_token, effective_bytes, fitted_law
from whorl.train.job import Job


class Prediction(NamedTuple):
    """Figures for `expected` of a plan, and lines of its arithmetic; warning: the line that comes first, if any."""

    figures: dict[str, float]
    lines: list[str]
    warning: list[str]


def predict(
    job: Job, corpus_bytes: int, law: ScalingLaw, probe: Probe | None, candidates: Sequence[Candidate]
) -> Prediction:
    """Return the prediction for a job. candidates: without any, half and double the budget train the same shape.

    The timing of the chosen shape as it runs decides the job's steps. Those of the candidates are put on its scale, so that
    more of a budget never buys less.
    """
    cost = training_cost(job.model, batch_size=1, seq_len=job.seq_len, replicas=1)
    own = Candidate(job.model, 0.0, job.steps, 0.0, cost.block_params)

    def seen(c: Candidate, factor: float = 1.0) -> float:
        return max(1, c.steps) * factor * job.batch_size * job.seq_len * bytes_per_token(c.model.vocab_size)

    def by_law(c: Candidate, factor: float = 1.0) -> float:
        read = effective_bytes(seen(c, factor), max(1, corpus_bytes))
        # The shipped law's runs had shorter windows than test files, and no long rows. One ratio for all shapes of a budget.
        ratio = of_python("over_law", max(1, own.steps) * factor) if law is fitted_law() else 1.0
        return ratio * float(law.loss(c.block_params, read, c.model.vocab_size))

    same = [c for c in candidates if _shape(c) == _shape(own)]
    scale = own.steps / max(1, same[0].steps) if same else 1.0
    options = [own, *(replace(c, steps=round(c.steps * scale)) for c in candidates)]

    correct = probe.correct if probe is not None else float
    flops = law.flops_for(cost.block_params, seen(own))
    beyond = law.extrapolation(flops)
    figures = {
        "bits_per_byte": correct(by_law(own)),
        "law_bits_per_byte": by_law(own),
        "extrapolation": beyond,
    }
    where = "within their range" if beyond == 1 else f"{beyond:,.3g} times outside of their range"
    how, text = "", f"if the text is like {law.corpus}; other text may differ by half and more (docs/plan.md)"
    if probe is not None:
        (n1, n2), (l1, l2), (r1, r2) = probe.steps, probe.bits_per_byte, probe.reference
        how, text = (
            f"; probe, {probe.seconds:.0f} s: a tiny model has {l1:.2f} and {l2:.2f} bits per byte of this text after "
            f"{n1:,} and {n2:,} steps, and {r1:.2f} and {r2:.2f} of Python"
        ), "by law and probe"  # fmt: skip
    buys = []
    for factor in (0.5, 2.0):
        best = min(options, key=lambda c: by_law(c, factor))
        figures[f"bits_per_byte_x{factor:g}"] = found = correct(by_law(best, factor))
        buys.append(
            f"{found:.2f} ({best.model.n_layers} x {best.model.d_model}, {best.steps * factor:,.0f} steps)"
        )
    lines = [
        f"law: {law.corpus}, runs of {law.flops[0]:.1e} to {law.flops[1]:.1e} FLOPs; this has {flops:.1e}, {where}{how}",
        f"expected: about {figures['bits_per_byte']:.2f} bits per byte on whole held-out files, as in `evaluate`, {text}",
        f"half the budget buys {buys[0]}; double the budget {buys[1]}",
    ]
    return Prediction(figures, lines, [warning] if (warning := law.warning(flops)) else [])


def _shape(c: Candidate) -> tuple[int, int, int]:
    return c.model.d_model, c.model.n_layers, c.model.vocab_size
