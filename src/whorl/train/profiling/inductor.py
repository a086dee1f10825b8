"""Instrumentation of compiled code: a profiler range around each kernel, with the part of the model it belongs to.

`torch.compile` makes a Python module per graph whose `call` runs kernels in a fixed order. On a CPU the profiler does
not see them. In this context the compiler records the source lines of every kernel (inductor's provenance), and each
module's kernels are wrapped in ranges, and so are the operators that it calls by `torch.ops`. A fused kernel belongs to the
part that most of its lines are in.

This relies on the internals of one version of torch. If they differ, no kernel is wrapped: compiled code then counts as
one block, and `kernels` stays empty.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.profiler import record_function

from whorl.train.profiling.trace import (
    ATTENTION,
    COPIES,
    LOOKUPS,
    MATMULS,
    POINTWISE,
    RANGE,
    REDUCTIONS,
    KernelInfo,
)

_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+):(\d+)")
_SHARED_FILES = (
    "norm.py",
    "linear.py",
    "rotary.py",
    "position.py",
)  # used by several parts: the caller's file decides
_COPY_WORDS = {
    "clone", "transpose", "view", "unsafe", "cat", "slice", "copy", "to", "expand", "stack", "permute", "flip", "fused",
    "cpp", "triton", "poi",
}  # fmt: skip


def part_of_traces(traces: Sequence[str]) -> str:
    """Return the model part that most of these stack traces (outermost call first) point to."""
    votes: Counter[str] = Counter()
    for trace in traces:
        files = re.findall(r'File "([^"]+)"', trace)
        votes[next(filter(None, map(_part_of_file, files)), "norms, residuals")] += 1
    return votes.most_common(1)[0][0] if votes else "other"


def _part_of_file(file: str) -> str:
    path = Path(file)
    if path.parent.name == "objectives":
        return "head, loss"
    if path.parent.name == "experts" or path.name == "mlp.py":
        return "MLP, experts"
    if "nn" in path.parts and "whorl" in path.parts and path.name not in _SHARED_FILES:
        return "attention"  # any kind of mixer
    return ""


def classify_kernel(name: str, part: str) -> str:
    """Return the class of a compiled kernel, from the operators in its name."""
    if name.startswith("extern_kernels."):
        bare = name.partition(".")[2]
        if "mm" in bare or "linear" in bare:
            return ATTENTION if part == "attention" and "bmm" in bare else MATMULS
        if "attention" in bare:
            return ATTENTION
        return POINTWISE
    words = {word for word in re.split(r"[_\d]+", name) if word}
    if "softmax" in words and part == "attention":
        return ATTENTION
    if words & {"softmax", "logsumexp", "rsqrt", "mean", "var"} or {"sum", "div", "pow"} <= words:
        return REDUCTIONS
    if words & {"embedding", "gather", "scatter", "index"}:
        return LOOKUPS
    return COPIES if words <= _COPY_WORDS else POINTWISE


class KernelInstrumentation:
    """Within the context, compiled kernels get ranges, opened while `enabled` is true."""

    def __init__(self) -> None:
        self.enabled = False
        self.kernels: dict[str, KernelInfo] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Disable compiler caches in the context, so that compile time is complete and every module is instrumented."""
        try:
            import torch._inductor.config as inductor
            import torch._inductor.debug as debug
            from torch._inductor.codecache import PyCodeCache

            load = PyCodeCache.load_by_key_path.__func__  # type: ignore[attr-defined]
            _ = debug._inductor_kernel_stack_trace
            settings = {"force_disable_caches": True, "trace.provenance_tracking_level": 1}
            patched = inductor.patch(settings)
        except (ImportError, AttributeError):
            yield
            return

        def watched(cls: type, key: str, path: str, *more: Any, **named: Any) -> ModuleType:
            module: ModuleType = load(cls, key, path, *more, **named)
            self._instrument(module, Path(path), debug._inductor_kernel_stack_trace)  # rebound for each graph
            return module

        PyCodeCache.load_by_key_path = classmethod(watched)  # type: ignore[assignment]
        try:
            with patched, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*force disabled")
                yield
        finally:
            PyCodeCache.load_by_key_path = classmethod(load)  # type: ignore[assignment]

    def _instrument(self, module: ModuleType, path: Path, traces: dict[str, list[str]]) -> None:
        order: dict[str, list[tuple[str, str, str]]] = {}  # kernel -> range, part, class of each of its calls
        for name, handle in _HANDLE.findall(path.read_text()):
            part = part_of_traces(traces.get(f"{name}:{handle}", ()))
            call = (f"{RANGE}{part} | {name}:{handle} {path.stem[-4:]}", part, classify_kernel(name, part))
            order.setdefault(name, []).append(call)
        extern = {n.partition(".")[2]: calls for n, calls in order.items() if n.startswith("extern_kernels.")}
        if extern and hasattr(module, "extern_kernels"):
            held = module.extern_kernels
            names = {
                n: self._ranged(getattr(held, n), calls, True)
                for n, calls in extern.items()
                if hasattr(held, n)
            }
            module.extern_kernels = _AttributeProxy(held, names)  # type: ignore[attr-defined]
        if hasattr(module, "torch"):  # operators by name: `torch.ops.whorl.mlp.default`
            replaced = {
                name: self._ranged(operator.attrgetter(name.removeprefix("torch."))(torch), calls, True)
                for name, calls in order.items()
                if name.startswith("torch.ops.")
            }
            module.torch = _with_replaced(torch, "torch", replaced)  # type: ignore[attr-defined]
        for name, calls in order.items():
            kernel = getattr(module, name, None)
            if kernel is None:
                continue
            if callable(kernel):
                setattr(module, name, self._ranged(kernel, calls, False))
            elif callable(getattr(kernel, "run", None)):  # Triton
                setattr(
                    module, name, _AttributeProxy(kernel, {"run": self._ranged(kernel.run, calls, False)})
                )

    def _ranged(
        self, kernel: Callable[..., Any], calls: list[tuple[str, str, str]], product: bool
    ) -> Callable[..., Any]:
        """Wrap a kernel in a range. `call` has no branches: the n-th call of a run is the n-th call in the source."""
        turn = 0

        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal turn
            label, part, kind = calls[turn % len(calls)]
            turn += 1
            if not self.enabled:
                return kernel(*arguments, **named)
            if (
                label not in self.kernels and not product
            ):  # the operators inside a product are traced individually
                tensors = {t.data_ptr(): t for t in arguments if isinstance(t, torch.Tensor)}
                moved = float(sum(t.numel() * t.element_size() for t in tensors.values()))
                flops = float(max((t.numel() for t in tensors.values()), default=0))
                self.kernels[label] = KernelInfo(part, kind, moved, flops)
            with record_function(label):
                return kernel(*arguments, **named)

        return run


def _with_replaced(held: Any, path: str, replaced: Mapping[str, Any]) -> Any:
    """Return `held` with some objects below it replaced, by their paths."""
    below = {name for name in replaced if name.startswith(f"{path}.")}
    names = {name.removeprefix(f"{path}.").partition(".")[0] for name in below}
    parts = {
        name: replaced.get(f"{path}.{name}")
        or _with_replaced(getattr(held, name), f"{path}.{name}", replaced)
        for name in names
    }
    return _AttributeProxy(held, parts) if parts else held


class _AttributeProxy:
    """An object with some attributes replaced."""

    def __init__(self, held: Any, names: dict[str, Any]) -> None:
        self.__dict__.update(names, _held=held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)
