"""Torch's compiler with a lasting cache, and work without it: its import takes half of the time to load a model.

Kernels are kept in `$XDG_CACHE_HOME/whorl/inductor` (`~/.cache` by default; `TORCHINDUCTOR_CACHE_DIR` replaces it). So
the planner's timing, the replicas, the run and later runs of the same shape compile once. Torch's own folder is in /tmp.

`torch.compiler.disable` imports `torch._dynamo` where a function is defined. `eager_only` waits until something is
compiled.

Torch implements random numbers and arithmetic on its "meta" device (shapes and types, without values) in Python, which
imports `torch._dynamo` and `sympy`: 1.2 s in each process that loads a model. Nothing reads the numbers, so `meta_device`
leaves out what draws initial weights.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MAKE: frozenset[Any] = frozenset({torch.randn, torch.rand})
_FILL: frozenset[Any] = frozenset({
    Tensor.normal_, Tensor.uniform_, torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.orthogonal_,
})  # fmt: skip
P = ParamSpec("P")
T = TypeVar("T")


_seconds_in_backend = 0.0


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` compiled for the shapes of each call, with kernels kept in the lasting cache.

    If the C++ compiler is missing, fails or is too old, the graph runs uncompiled, and one warning gives the reason.

    Earlier graphs of this process are dropped: they would count towards the recompile limit, beyond which torch stops
    compiling.
    """
    torch.compiler.reset()
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    default = default_cache_dir()  # torch sets the variable to it, perhaps already when it was imported
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default) == default:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder())
    return torch.compile(function, dynamic=False, backend=_timed_backend)


def cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whorl" / "inductor"


@functools.cache
def code_digest() -> str:
    """Return a hash of the code that computes and differentiates: the packages `nn`, `objectives` and `models`."""
    root, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=8)
    for package in ("nn", "objectives", "models"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def seconds_in_backend() -> float:
    """Return the seconds that this process has spent on code generation and the C++ compiler, or on their caches."""
    return _seconds_in_backend


def _timed_backend(graph: Any, inputs: Any) -> Any:
    from torch._inductor import compile_fx
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    global _seconds_in_backend
    began = time.perf_counter()
    try:
        with _settings():
            return compile_fx.compile_fx(graph, inputs)
    except RuntimeError as error:
        cause = getattr(error, "inner_exception", error)
        if not isinstance(cause, CppCompileError | InvalidCxxCompiler):
            raise
        lines = str(getattr(cause, "output", cause)).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        warnings.warn(
            f"a graph runs uncompiled, the C++ compiler fails: {reason}", RuntimeWarning, stacklevel=2
        )
        return graph.forward
    finally:
        _seconds_in_backend += time.perf_counter() - began


@contextmanager
def _settings() -> Iterator[None]:
    """Set torch's options for one call of its compiler; other code of the process keeps its own."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    # Traced graphs are kept too. Their key has the calls of custom operators, but not the code of their gradients.
    compiler: Any = torch.compiler.config
    key = compiler.patch(cache_key_tag=code_digest())
    # By default torch compiles gradients in the first backward pass, which `_timed_backend` does not see.
    graphs = functorch.patch(
        autograd_cache_allow_custom_autograd_functions=True, force_non_lazy_backward_lowering=True
    )
    # A CPU's vector instructions are in /proc/cpuinfo. This spares five compilations that test them.
    settings = {"cpp.vec_isa_ok": True} if platform.machine() == "x86_64" else {}
    # All kernels of a graph are launched at once: a small model's step on a GPU is little else than launches (LOG.md).
    settings["triton.cudagraphs"] = torch.cuda.is_available()
    with key, graphs, inductor.patch(settings):
        yield


def eager_only(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that always runs uncompiled, as `torch.compiler.disable(function)` does."""
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # breaks a graph here and not inside
    return call


class _NoRandomNumbers(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in _MAKE:
            kwargs.pop("generator", None)
            return torch.empty(*args, **kwargs)
        if function in _FILL:
            return args[0] if args else kwargs["tensor"]
        if function is Tensor.mul and args[0].is_meta and not isinstance(args[1], Tensor):
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        return function(*args, **kwargs)


@contextmanager
def meta_device() -> Iterator[None]:
    """Within the context, new tensors have a shape and a type, but no memory and no values."""
    with torch.device("meta"), _NoRandomNumbers():
        yield
