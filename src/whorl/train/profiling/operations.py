"""The operators of a traced step by their shapes: calls, time outside of the operators they call, and FLOPs of products.

A product [m, k] x [k, n] has 2 m k n operations, and causal attention half of those of full attention. Other operators have
no FLOPs here. On a GPU the times are those of the kernels that an operator launches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_AUTOGRAD_PART = re.compile(
    r"GeneratedBackwardFor_(whorl)_(\w+)_default$"
)  # runs the kernel of an operator of nn/cpu
_ATTENTION = (
    "scaled_dot_product",
    "flash_attention",
    "efficient_attention",
    "causal_attention",
    "rotary_attention",
)


@dataclass(frozen=True)
class Operation:
    """An operator on operands of these shapes, or a named range of Python code. Calls, seconds and FLOPs are per step."""

    name: str
    shapes: str
    calls: float
    seconds: float
    flops: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "flops_per_second": self.flops / self.seconds if self.seconds else 0.0}


def read_operations(averages: Iterable[Any], steps: int, *, on_device: bool) -> list[Operation]:
    """Return the operations of `steps` traced steps, the longest first. averages: of torch's profiler, by shapes."""
    found: dict[tuple[str, str], Operation] = {}
    for event in averages:
        if event.device_type.name != "CPU":  # a kernel, whose time its operator has
            continue
        name = _AUTOGRAD_PART.sub(r"\1::\2", event.key)
        shapes = [dim for dim in event.input_shapes or [] if dim]
        key = name, " ".join(_format_shape(dim) for dim in shapes)
        seconds = 1e-6 * (event.self_device_time_total if on_device else event.self_cpu_time_total) / steps
        calls = event.count / steps
        if key in found:
            seconds, calls = seconds + found[key].seconds, max(calls, found[key].calls)
        found[key] = Operation(*key, calls, seconds, calls * product_flops(name, shapes))
    return sorted((each for each in found.values() if each.seconds), key=lambda each: -each.seconds)


def _format_shape(dim: list[Any]) -> str:
    if isinstance(dim[0], list):
        return f"list of {len(dim)}"
    return "x".join(map(str, dim))


def product_flops(name: str, shapes: Sequence[Sequence[Any]]) -> float:
    """Return the FLOPs of one call of an operator; 0 if it is no matrix product. shapes: of its arguments."""
    bare = name.rpartition("::")[2]
    given: list[list[int]] = [list(dim) for dim in shapes if dim and isinstance(dim[0], int)]
    if not given or "::" not in name:
        return 0.0
    if any(word in bare for word in _ATTENTION):
        q = given[0]
        if bare.startswith("rotary"):  # of nn/cpu: [B, T, 3 H, d]
            q = [q[0], q[2] // 3, q[1], q[3]]
        return 2.0 * math.prod(q) * q[-2] * (2.5 if "backward" in bare else 1.0)
    if bare in ("mlp", "mlp_backward"):  # of nn/cpu: the weights come last
        return (4.0 if bare == "mlp" else 8.0) * math.prod(given[0]) * given[-2][0]
    if bare in ("addmm", "baddbmm"):
        given = given[1:]
    if len(given) < 2:
        return 0.0
    a, b = given[0], given[1]
    if bare == "weight_gradient":  # of nn/cpu: both operands have a row per token
        return 2.0 * math.prod(a) * b[-1]
    if bare in ("_linear_pointwise", "mkldnn_linear"):
        return 2.0 * math.prod(a) * (b[0] if b[-1] == a[-1] else b[-1])
    if bare in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        return 2.0 * math.prod(a) * b[-1]
    return 0.0
