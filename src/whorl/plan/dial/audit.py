"""Predictions of plans against what their runs measured, over all runs of a store (`whorl plan audit`).

A plan keeps its predictions in its artifact (`expected`), a run what it measured in the summaries of model and evaluation:

    bits_per_byte  test split, whole files, the evaluation window of the model    step `evaluate`
    seconds        of training, start-up and validations included                 step that trains
    memory_bytes   highest sum over the training process and its replicas         step that trains
    sent_bytes     by rank 0 in a step under a layout                             step that trains
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from whorl.store import Store

UNITS = {"bits_per_byte": "bits/byte", "seconds": "s", "memory_bytes": "bytes", "sent_bytes": "bytes"}
MEASURED = {"seconds": "seconds", "memory_bytes": "peak_memory_bytes", "sent_bytes": "sent_bytes"}
NEAR = 0.1  # relative error that the summary counts as near


@dataclass(frozen=True)
class Audited:
    """A prediction and its outcome. note: how the run differed from the planned one, "" if it did not."""

    run: str
    address: str
    quantity: str
    predicted: float
    measured: float
    note: str

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def audit(store: Store) -> list[Audited]:
    """Return every prediction whose outcome was measured, by quantity and time of the run."""
    artifacts = [*store.artifacts()]
    plans = {a.address: a.summary.get("expected", {}) for a in artifacts if a.kind == "plan"}
    found: list[Audited] = []
    for model in (a for a in artifacts if a.kind == "model" and a.parents.get("plan") in plans):
        expected = {**plans[model.parents["plan"]], **model.summary.get("expected", {})}
        note = _note(model.summary.get("tokens", 0) / expected.get("tokens", math.inf), {})
        outcomes = [(quantity, model.summary.get(key), note) for quantity, key in MEASURED.items()]
        for each in artifacts:
            if each.kind == "evaluation" and each.parents.get("model") == model.address:
                outcomes.append(
                    ("bits_per_byte", each.summary.get("bits_per_byte"), _note(1, each.config) or note)
                )
        found += [
            Audited(model.name, model.address, quantity, float(expected[quantity]), float(value), note)
            for quantity, value, note in outcomes
            if value and expected.get(quantity)
        ]
    return sorted(found, key=lambda row: [*UNITS].index(row.quantity))


def _note(trained: float, evaluation: Mapping[str, Any]) -> str:
    if (scored := evaluation.get("held_out_fraction", 1)) < 1:
        return f"{scored:.0%} of the files"
    window = evaluation.get("window")
    return f"window {window}" if window else f"{trained:.0%} of the tokens" if 0 < trained < 0.99 else ""


def summarize(rows: Sequence[Audited]) -> dict[str, dict[str, float]]:
    """Return by quantity: runs, the median ratio, the largest |ln ratio|, and how many runs are within NEAR."""
    ratios = {quantity: [row.ratio for row in rows if row.quantity == quantity] for quantity in UNITS}
    return {
        quantity: {
            "runs": len(found), "median_ratio": median(found), "near": sum(abs(r - 1) <= NEAR for r in found),
            "largest_error": max(abs(math.log(r)) for r in found),
        }
        for quantity, found in ratios.items()
        if found
    }  # fmt: skip
