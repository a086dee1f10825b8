"""Bytes per parameter of a checkpoint, by part.

A parameter costs more than its four bytes: optimizers store moments. Which moments depends on the parameter's optimizer
(`lm/objective.param_optims`), so a run's figure is a mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

MOMENTS = {
    "momentum": "Muon's momentum",
    "mean": "Adam's first moment",
    "square": "Adam's second moment (sparse Adagrad: one number per row)",
    **dict.fromkeys(("left", "right"), "SOAP's means of gradient products"),
    **dict.fromkeys(("left_basis", "right_basis"), "SOAP's bases"),
}


def bytes_per_parameter(tensors: Mapping[str, Tensor], parameters: int = 0) -> list[dict[str, Any]]:
    """Return {"part", "bytes", "per_parameter", "what"} of each part of `tensors`, largest first.

    tensors: named as by `SharedState.tensors`; parameters: of the model; 0 counts the weights in `tensors`.
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
        "weights": "master weights, cast for each product (bf16 with pretrain.bf16_weights)",
        "averages": "running average of the weights",
        "buffers": "buffers of layers",
        "generators": "RNG states",
    }
    return known.get(kind, kind)


def format_line(parts: list[dict[str, Any]]) -> str:
    """Format the total and each part that is not negligible as one line."""
    total = sum(part["per_parameter"] for part in parts)
    named = [f"{p['per_parameter']:.2f} {p['what']}" for p in parts if p["per_parameter"] >= 0.005]
    return f"{total:.1f} bytes per parameter: " + "; ".join(named)
