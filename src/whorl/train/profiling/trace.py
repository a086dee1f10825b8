"""Reads a trace of training steps: time by part of the model and by class of operator.

A trace (torch's profiler, chrome://tracing JSON) is a list of intervals with name, thread, start and duration.
Operators nest in operators and in the ranges of `profiler.py`.

    part        the innermost range around an operator, or for a C++ kernel (`nn/native`) the part of its name. The time of
                compiled code outside of its kernels is "dispatch": guards, launches, allocation
    backward    an operator under `autograd::engine::evaluate_function`. Its part is that of the forward operator with the
                same sequence number. Many forward operators show a number before the one that creates the node uses it,
                so the last forward operator with that number decides
    class       the outermost operator with a known name owns its whole duration. Time outside such operators (Python, the
                dispatcher, autograd's queue, views) is "framework", or "waiting" in a wait range

FLOPs and bytes are estimated from shapes. A product [m, k] x [k, n] has 2 m k n operations and reads or writes each
matrix once. Any other operator has one operation per element of its largest tensor, reads its inputs and writes its
output once. `inductor.py` records the bytes of compiled kernels. So bytes are the minimum traffic without a cache;
small tensors in cache may exceed the roofline.

If a trace has GPU kernels, times are those of the kernels, assigned to the operators that launched them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

RANGE = "whorl: "  # prefix of our ranges
STEP = "step"
PARTS = (
    "data wait",
    "embed",
    "attention",
    "MLP, experts",
    "norms, residuals",
    "head, loss",
    "gradient accumulation",
    "optimizer",
    "all-gather",
    "dispatch",
    "other",
)
MATMULS, ATTENTION, POINTWISE = "matmul", "attention", "pointwise"
REDUCTIONS, LOOKUPS, COPIES = "reductions", "gather, scatter", "copies"
WAITING, FRAMEWORK = "waiting", "framework"
CLASSES = (MATMULS, ATTENTION, POINTWISE, REDUCTIONS, LOOKUPS, COPIES, WAITING, FRAMEWORK)

_MATMULS = {
    "mm", "addmm", "bmm", "baddbmm", "mv", "dot", "addmv", "_linear_pointwise", "mkldnn_linear", "_scaled_mm",
    "mlp", "mlp_backward", "weight_gradient",
}  # fmt: skip
_SOFTMAX = {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
_REDUCTIONS = _SOFTMAX | {
    "logsumexp", "sum", "mean", "var", "var_mean", "std", "amax", "amin", "aminmax", "max", "min", "argmax", "cumsum", "all",
    "any", "prod", "norm", "linalg_vector_norm", "_foreach_norm", "native_layer_norm", "native_layer_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward", "bincount", "histc",
}  # fmt: skip
_LOOKUPS = {
    "embedding", "embedding_dense_backward", "embedding_sparse_backward", "index_select", "index", "gather", "scatter",
    "scatter_", "scatter_add_", "index_add_", "index_add", "index_put_", "_index_put_impl_", "_unique2", "unique_dim",
    "unique_consecutive", "sort", "topk", "nonzero", "searchsorted",
}  # fmt: skip
_COPIES = {
    "copy_", "clone", "cat", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "flip", "roll", "repeat",
    "repeat_interleave",
}  # fmt: skip
_VIEWS = {
    "view", "_unsafe_view", "as_strided", "slice", "select", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze",
    "narrow", "split", "split_with_sizes", "chunk", "unbind", "detach", "detach_", "alias", "empty", "empty_like",
    "empty_strided", "new_empty", "resize_", "set_", "reshape", "flatten", "item", "_local_scalar_dense", "is_nonzero",
    "lift_fresh", "resolve_conj", "resolve_neg", "result_type", "to", "_reshape_alias", "diagonal", "real", "unflatten",
    "_indices", "_values", "_nnz", "is_coalesced", "_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors",
    "expand_as", "view_as", "reshape_as", "numpy_T", "mT", "as_strided_",
}  # fmt: skip
_WIDTHS = {
    "float": 4, "double": 8, "int": 4, "long int": 8, "long": 8, "bool": 1, "unsigned char": 1, "signed char": 1,
    "short": 2, "c10::BFloat16": 2, "c10::Half": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip
_FUSED_ATTENTION = ("scaled_dot_product", "flash_attention", "causal_attention", "rotary_attention")
UNNAMED = ("dispatch", "other")  # parts without a name in the model
_NATIVE_PARTS = {
    "whorl::causal_attention": "attention",
    "whorl::causal_attention_backward": "attention",
    "whorl::rotary_attention": "attention",
    "whorl::rotary_attention_backward": "attention",
    "whorl::cross_entropy_": "head, loss",
    "whorl::mlp": "MLP, experts",
    "whorl::mlp_backward": "MLP, experts",
}
_COMPILED = (
    "Torch-Compiled Region", "TorchDynamo", "AOTDispatcher", "CompiledFunction", "## Call CompiledFxGraph",
    "autograd::engine::evaluate_function: CompiledFunctionBackward",
)  # fmt: skip
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class KernelInfo:
    """A kernel, by the name of its range: its part ("": that of the range around it), class, and cost per call."""

    part: str
    kind: str
    bytes: float
    flops: float = 0.0


@dataclass
class OpCost:
    """Seconds, arithmetic and traffic of one class of operators."""

    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    calls: float = 0.0

    def add(self, seconds: float, flops: float = 0.0, n_bytes: float = 0.0, calls: float = 1.0) -> None:
        self.seconds += seconds
        self.flops += flops
        self.bytes += n_bytes
        self.calls += calls


@dataclass
class TraceSummary:
    """Means per step. parts: seconds by (part, is backward). costs: by (part, class)."""

    steps: int
    seconds: float
    parts: dict[tuple[str, bool], float]
    costs: dict[tuple[str, str], OpCost]
    on_device: bool = False

    @property
    def classes(self) -> dict[str, OpCost]:
        """Costs by class, of all parts."""
        found: dict[str, OpCost] = defaultdict(OpCost)
        for (_, kind), cost in self.costs.items():
            found[kind].add(cost.seconds, cost.flops, cost.bytes, cost.calls)
        return dict(found)


@dataclass
class _Node:
    name: str
    seconds: float
    end: float
    args: Mapping[str, Any]
    device_seconds: float = 0.0
    children: list[_Node] = field(default_factory=list)

    @property
    def self_seconds(self) -> float:
        """Time outside all children."""
        return max(0.0, self.seconds - sum(child.seconds for child in self.children))


def read_trace(
    events: Iterable[Mapping[str, Any]], kernels: Mapping[str, KernelInfo] | None = None
) -> TraceSummary:
    """Summarize the events ("traceEvents") of a trace with ranges RANGE + STEP around its steps, on a CPU the faster half.

    kernels: compiled kernels by the name of their ranges.
    """
    found = [e for e in events if e.get("ph") == "X"]
    steps = [e for e in found if e["name"] == RANGE + STEP and e.get("cat") != "gpu_user_annotation"]
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    launched: dict[Any, float] = defaultdict(float)
    for event in found:
        if event.get("cat") in _DEVICE:
            launched[event["args"].get("External id")] += event["dur"] * 1e-6
        elif event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append(event)
    if not launched:  # a step in which another process had the core shows where that happened
        steps = sorted(steps, key=lambda e: e["dur"])[: (len(steps) + 1) // 2]
    ends = {e["ts"] + e["dur"] for e in steps}
    reader = _Reader(kernels or {}, on_device=bool(launched))
    main = steps[0]["tid"] if steps else None
    for thread in sorted(
        threads, key=lambda t: t != main
    ):  # forward first: its sequence numbers name the backward
        roots = _nested(threads[thread], launched)
        if thread == main:
            roots = [node for root in roots for node in _steps_in(root) if node.end in ends]
        for root in roots:
            reader.visit(root, "other", False)
    count = max(1, len(steps))
    total = sum(e["dur"] for e in steps) * 1e-6 / count
    for cost in reader.costs.values():
        cost.seconds, cost.flops, cost.bytes, cost.calls = (
            x / count for x in (cost.seconds, cost.flops, cost.bytes, cost.calls)
        )
    parts = {key: seconds / count for key, seconds in reader.parts.items()}
    return TraceSummary(len(steps), total, parts, dict(reader.costs), bool(launched))


def _nested(events: list[Mapping[str, Any]], launched: Mapping[Any, float]) -> list[_Node]:
    """Return the intervals of one thread as trees."""
    roots: list[_Node] = []
    open_: list[_Node] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        args = event.get("args", {})
        device = launched.get(args.get("External id"), 0.0)
        node = _Node(event["name"], event["dur"] * 1e-6, event["ts"] + event["dur"], args, device)
        while open_ and open_[-1].end <= event["ts"]:
            open_.pop()
        (open_[-1].children if open_ else roots).append(node)
        open_.append(node)
    return roots


def _steps_in(node: _Node) -> Iterable[_Node]:
    if node.name == RANGE + STEP:
        yield node
    else:
        for child in node.children:
            yield from _steps_in(child)


class _Reader:
    def __init__(self, kernels: Mapping[str, KernelInfo], *, on_device: bool) -> None:
        self.kernels, self.on_device = kernels, on_device
        self.parts: dict[tuple[str, bool], float] = defaultdict(float)
        self.costs: dict[tuple[str, str], OpCost] = defaultdict(OpCost)
        self.part_by_sequence: dict[int, str] = {}  # by autograd's sequence number

    def visit(self, node: _Node, part: str, backward: bool) -> None:
        number = node.args.get("Sequence number")
        if node.name.startswith("autograd::engine::evaluate_function"):
            accumulates = node.name.endswith("AccumulateGrad")
            part = "gradient accumulation" if accumulates else self.part_by_sequence.get(number or -1, part)
            backward = not accumulates
        elif node.name in self.kernels:
            kernel = self.kernels[node.name]
            self.count(node, kernel.part or part, backward, kernel.kind, kernel.flops, kernel.bytes)
            return
        elif node.name.startswith(RANGE) and node.name != RANGE + STEP:
            part = node.name.removeprefix(RANGE).partition(" | ")[0]
        elif node.name in _NATIVE_PARTS:
            part, backward = _NATIVE_PARTS[node.name], backward or node.name.endswith("backward")
        elif number is not None and not backward:
            self.part_by_sequence[number] = part
        kind = classify_op(node.name, part, is_leaf=_has_only_views(node))
        if kind is not None:
            if number is not None and not backward:
                self.part_by_sequence[number] = part
            flops, n_bytes = estimate_cost(
                node.name, node.args.get("Input Dims", []), node.args.get("Input type", [])
            )
            self.count(node, part, backward, kind, flops, n_bytes)
            return
        seconds = node.device_seconds if self.on_device else node.self_seconds
        own = "dispatch" if node.name.startswith(_COMPILED) else part
        self.parts[own, backward] += seconds
        self.costs[own, WAITING if part in ("data wait", "all-gather") else FRAMEWORK].add(seconds)
        for child in node.children:
            self.visit(child, part, backward)

    def count(self, node: _Node, part: str, backward: bool, kind: str, flops: float, n_bytes: float) -> None:
        seconds = _device_seconds(node) if self.on_device else node.seconds
        self.parts[part, backward] += seconds
        self.costs[part, kind].add(seconds, flops, n_bytes)


def _device_seconds(node: _Node) -> float:
    return node.device_seconds + sum(_device_seconds(child) for child in node.children)


def _has_only_views(node: _Node) -> bool:
    """Whether it has only views as children."""
    return all(_base_name(child.name) in _VIEWS for child in node.children)


def _base_name(name: str) -> str:
    return name.rpartition("::")[2]


def classify_op(name: str, part: str, *, is_leaf: bool = True) -> str | None:
    """Return the class of an operator, or None for views, non-operators and operators that only call others.

    is_leaf: it calls no other operator that does work.
    """
    if "::" not in name or name.startswith(("autograd::", "torch::autograd::")):
        return None
    bare = _base_name(name)
    if any(word in bare for word in (*_FUSED_ATTENTION, "efficient_attention")):
        return ATTENTION
    if bare in _MATMULS:
        return ATTENTION if part == "attention" and bare in ("bmm", "baddbmm") else MATMULS
    if bare in _REDUCTIONS:
        return ATTENTION if part == "attention" and bare in _SOFTMAX else REDUCTIONS
    for kind, names in ((LOOKUPS, _LOOKUPS), (COPIES, _COPIES)):
        if bare in names:
            return kind
    return POINTWISE if is_leaf and bare not in _VIEWS else None


def estimate_cost(name: str, dims: list[Any], types: list[str]) -> tuple[float, float]:
    """Return (FLOPs, bytes) of an operator from the profiler's argument shapes and types."""
    bare = _base_name(name)
    shapes: list[tuple[list[int], int]] = []  # shape, bytes per element
    first: list[float] = []  # elements of the tensors in the first argument
    for number, dim in enumerate(dims):
        kind = types[number] if number < len(types) else ""
        if kind == "TensorList" or (dim and isinstance(dim[0], list)):
            shapes += [(list(d), 4) for d in dim]
            first = first or [math.prod(d) for d in dim]
        elif kind in _WIDTHS and dim is not None:
            shapes.append((list(dim), _WIDTHS[kind]))
            first = first or [math.prod(dim)]
    if not shapes:
        return 0.0, 0.0
    sizes = [(float(math.prod(shape)), width) for shape, width in shapes]
    moved = sum(n * width for n, width in sizes)
    if bare in _MATMULS:
        flops, out = _matmul_cost([s for s, _ in shapes], bare)
        given = any(math.prod(s) == out for s, _ in shapes[2:])  # the output is among the arguments
        return flops, moved + (0.0 if given else out * shapes[0][1])
    if any(word in bare for word in _FUSED_ATTENTION):
        q = shapes[0][0]
        if bare.startswith("rotary"):  # of nn/native: [B, T, 3 H, d]
            q = [q[0], q[2] // 3, q[1], q[3]]
        causal = 0.5  # language models use causal attention only
        return 4.0 * causal * math.prod(q) * q[-2] * (2.5 if "backward" in bare else 1.0), moved + sizes[0][
            0
        ] * sizes[0][1]
    if bare.startswith("_foreach_"):
        written = 0.0 if bare == "_foreach_norm" else 4.0 * sum(first)
        return sum(first), (8.0 * sum(first) if bare == "_foreach_copy_" else moved + written)
    if bare in _LOOKUPS:
        table = shapes[0][0]
        rows = min(n for n, _ in sizes)
        if len(sizes) == 1 and len(table) > 1:  # `index` does not record its ids: assume one per row
            rows = float(table[0])
        single = len(table) < 2 or "gather" in bare or "scatter" in bare  # elements instead of rows
        return 0.0, rows * (8 + 2.0 * (1 if single else table[-1]) * shapes[0][1])
    largest = max(sizes, key=lambda s: s[0])
    if bare in ("fill_", "zero_"):
        return 0.0, sizes[0][0] * sizes[0][1]
    if bare == "copy_":
        return 0.0, moved
    if bare in _COPIES:
        return 0.0, 2.0 * moved
    if bare in _REDUCTIONS and bare not in _SOFTMAX and "norm_" not in bare and "rms" not in bare:
        return largest[0], moved
    return largest[0], moved + largest[0] * largest[1]


def _matmul_cost(shapes: list[list[int]], bare: str) -> tuple[float, float]:
    """Return (FLOPs, elements of the output)."""
    if bare in ("addmm", "baddbmm", "addmv"):
        shapes = shapes[1:]
    if len(shapes) < 2 or not shapes[0] or not shapes[1]:
        return 0.0, 0.0
    a, b = shapes[0], shapes[1]
    if bare in ("mlp", "mlp_backward"):  # of nn/native: the weights come last
        out = math.prod(a)
        return (4.0 if bare == "mlp" else 8.0) * out * shapes[-2][0], float(out)
    if bare == "weight_gradient":  # of nn/native: both operands have a row per token
        a = a[::-1]
    if bare in ("_linear_pointwise", "mkldnn_linear"):
        out = math.prod(a[:-1]) * (b[0] if b[-1] == a[-1] else b[-1])
    elif len(b) == 1:
        out = math.prod(a[:-1])
    else:
        out = math.prod(a[:-1]) * b[-1]
    return 2.0 * out * a[-1], float(out)
