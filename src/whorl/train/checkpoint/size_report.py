"""What a checkpoint is made of, in bytes a parameter, and why.

A parameter costs more than its own four bytes: an optimiser keeps moments beside it. Which, depends on how it is trained
(`language.treatments`), so a run's figure is a mean, and this is where it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

MOMENTS = {
    "momentum": "Muon's momentum of the matrices",
    "mean": "Adam's mean of the gradients",
    "square": "the mean of their squares (Adam; of a table trained by row Adagrad one number a row)",
}


def bytes_per_parameter(tensors: Mapping[str, Tensor], parameters: int = 0) -> list[dict[str, Any]]:
    """{"part", "bytes", "per_parameter", "what"} of each part of `tensors`, the largest first.

    tensors: named as by `Shared.tensors`; parameters: how many the model has; 0 counts the weights here.
    """
    sizes: dict[str, int] = {}
    types: dict[str, set[str]] = {}
    numbers = 0
    for name, t in tensors.items():
        kind, _, rest = name.partition("/")
        part = f"{kind}/{rest.rsplit('/', 1)[-1]}" if kind == "state" else kind
        sizes[part] = sizes.get(part, 0) + t.numel() * t.element_size()
        types.setdefault(part, set()).add(str(t.dtype).removeprefix("torch."))
        numbers += t.numel() if kind == "weights" else 0
    count = parameters or numbers
    return [
        {
            "part": part,
            "bytes": size,
            "per_parameter": size / count if count else 0.0,
            "what": f"{_describe(part)}, {' and '.join(sorted(types[part]))}",
        }
        for part, size in sorted(sizes.items(), key=lambda item: -item[1])
    ]


def _describe(part: str) -> str:
    kind, _, moment = part.partition("/")
    if kind == "state":
        return MOMENTS.get(moment, moment)
    known = {
        "weights": "the master weights, cast for products as they run (under pretrain.rounding the bf16 ones)",
        "averages": "the running average of the weights",
        "buffers": "what layers keep beside weights",
        "generators": "states of generators",
    }
    return known.get(kind, kind)


def format_line(parts: list[dict[str, Any]]) -> str:
    """For a report: the total, then each part that weighs anything."""
    total = sum(part["per_parameter"] for part in parts)
    named = [f"{p['per_parameter']:.2f} {p['what']}" for p in parts if p["per_parameter"] >= 0.005]
    return f"{total:.1f} bytes a parameter: " + "; ".join(named)
