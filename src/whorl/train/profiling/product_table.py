"""Times every product of a training step and of a decoding step on this machine, in each way, for `whorl machine`.

The bound of a product is the larger of two times: FLOPs over the best measured GEMM rate of its type, and bytes over the
bandwidth of a copy of as many bytes. Both are measured with its number of threads. So a small product is bounded by its
cache. A training product may run in fp32 too, and takes the better rate. A product that beats a rate raises it.

Training products run with the threads of one replica. A decoding product runs in its type by torch and by the native
library, with one thread and with all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from whorl.engine.cpu.candidates import NativeProducts
from whorl.machine.device_probe import measure_peaks
from whorl.machine.gemm_benchmark import SHAPES, best_seconds, copy_bandwidth
from whorl.machine.kernel_choice import ChoiceRequest, forced_candidate, timed_choice
from whorl.models import TransformerConfig
from whorl.models.transformer_cost import linear_shapes
from whorl.train.config import OptimConfig
from whorl.train.profiling.products import Bounds, Way, engine_choices, linear_products, training_choices

DECODING_ROWS = (1, 8, 32, 128)
DECODING_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}
COPY_BYTES = tuple(1 << power for power in range(15, 26, 2))  # from the first level of caches to memory
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class TimedProduct:
    """One line of the table.

    calls: in a step; 0 for a line that is part of another one, or no matrix product. times: seconds of each candidate that
    ran. dropped: reason for each of the others. chosen: the candidate in use, which a setting may force. threads: of the
    chosen candidate. bound_seconds: of one call. flops: 0 for no matrix product, which has no bound.
    """

    name: str
    dtype: str
    calls: int
    times: dict[str, float]
    dropped: dict[str, str]
    chosen: str
    threads: int
    bound_seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of one call as chosen."""
        return self.times[self.chosen]

    @property
    def rates(self) -> dict[str, float]:
        """FLOP/s of each candidate that ran."""
        return {way: self.flops / seconds for way, seconds in self.times.items()}

    @property
    def share(self) -> float:
        """Fraction of the bound that the choice reaches."""
        return self.bound_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "rates": self.rates, "share_of_bound": self.share}


def measure_bounds(threads: int) -> Bounds:
    """Measure GEMM rates (fp32, bf16, int8) and bandwidth now, with this number of threads.

    A type has at least the rate of the wider one: a CPU without its products converts the numbers.
    """
    with _threads(threads):
        flops, _ = measure_peaks("cpu")
        bandwidth = {2 * size: copy_bandwidth("cpu", size) for size in COPY_BYTES}
        flops["bfloat16"] = max(flops["bfloat16"], flops["float32"])
        flops["int8"] = max(_int8_rate(), flops["bfloat16"])
    return Bounds(flops, bandwidth)


def _int8_rate() -> float:
    """Return the rate of torch's int8 product, 0 if this torch has none for the CPU."""
    rows, inner, outer = SHAPES[1]
    a, b = torch.ones(rows, inner, dtype=torch.int8), torch.ones(inner, outer, dtype=torch.int8)
    try:
        return 2.0 * rows * inner * outer / best_seconds(lambda: torch._int_mm(a, b), "cpu")
    except (RuntimeError, AttributeError):
        return 0.0


@dataclass(frozen=True)
class ProductTimes:
    """Times the products of a model.

    rows, length: of one replica's training step. dtype: of its activations. threads: of one replica. cores: the most
    threads of a decoding step.
    """

    model: TransformerConfig
    rows: int
    length: int
    dtype: str
    threads: int
    cores: int

    def training(self, refresh: bool = False) -> list[TimedProduct]:
        """Time a training step: its choices and the products of its linear layers. dtype is one of CPU_DTYPES.

        Raises:
            ConfigError: WHORL_CHOOSE forces a candidate that does not exist or cannot run.
        """
        bounds = {self.threads: measure_bounds(self.threads)}
        with _threads(self.threads):
            choices = training_choices(
                self.model, self.rows, self.length, OptimConfig().muon_every, getattr(torch, self.dtype)
            )
            found = [
                _time_choice(request, calls, self.dtype, self.threads, refresh) for request, calls in choices
            ]
            in_mlp = any(line.calls and line.name.startswith("mlp ") for line in found)
            for product in linear_products(self.model, self.rows * self.length, self.dtype):
                is_part = in_mlp and product.name.split()[1] in ("up", "down")
                timed = timed_choice(product.name, product.ways, refresh=refresh)
                found.append(TimedProduct(
                    product.name, self.dtype, 0 if is_part else product.calls, timed.seconds, timed.dropped,
                    next(iter(timed.seconds)), self.threads, flops=product.flops, bytes=product.bytes,
                ))  # fmt: skip
        return _with_bounds(found, bounds, {line.dtype: ("float32", line.dtype) for line in found})

    def decoding(self, refresh: bool = False) -> list[TimedProduct]:
        """Time decoding steps: the engine's choices, and single products of DECODING_ROWS rows (`time_decoding`).

        Raises:
            ConfigError: as `training`.
        """
        with _threads(self.cores):
            found = [
                _time_choice(request, 0, request.name.rpartition(" ")[2], self.cores, refresh)
                for request in engine_choices(self.model)
            ]
        bounds = {1: measure_bounds(1)}
        if self.cores > 1:
            bounds[self.cores] = measure_bounds(self.cores).at_least(bounds[1])
        return found + time_decoding(self.model, bounds, DECODING_ROWS, refresh)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time_choice(request: ChoiceRequest, calls: int, dtype: str, threads: int, refresh: bool) -> TimedProduct:
    timed = timed_choice(request.name, request.candidates, refresh=refresh)
    chosen = forced_candidate(request.name) or timed.chosen
    return TimedProduct(
        request.name, dtype, calls, timed.seconds, timed.dropped, chosen, threads, flops=request.flops
    )


def time_decoding(
    model: TransformerConfig, bounds: dict[int, Bounds], rows: Iterable[int], refresh: bool = False
) -> list[TimedProduct]:
    """Time the linear layers of a decoding step for batches of these sizes; bounds: by number of threads.

    A line has the candidates of a type with all numbers of threads.
    """
    layers = {**linear_shapes(model), "head": (model.vocab_size, model.d_model, 1)}
    found = []
    with torch.inference_mode():
        for layer, (n, k, calls) in layers.items():
            with NativeProducts(n, k) as native:
                for m in rows:
                    flops = 2.0 * m * n * k
                    times: dict[str, dict[tuple[str, int], float]] = {}
                    dropped: dict[str, dict[str, str]] = {}
                    for threads in bounds:
                        with _threads(threads):
                            for kind, ways in _decoding_ways(n, k, m, threads, native).items():
                                name = f"decode {layer} {m}x{k}x{n} {DECODING_DTYPES[kind]}"
                                timed = timed_choice(name, ways, refresh=refresh)
                                times.setdefault(kind, {}).update(
                                    {(way, threads): seconds for way, seconds in timed.seconds.items()}
                                )
                                dropped.setdefault(kind, {}).update(
                                    {_label(way, threads): reason for way, reason in timed.dropped.items()}
                                )
                    for kind, seconds in times.items():
                        chosen = min(seconds, key=lambda key: seconds[key])
                        found.append(TimedProduct(
                            f"decode {layer} {m}x{k}x{n} {DECODING_DTYPES[kind]}", kind, calls,
                            {_label(*key): s for key, s in seconds.items()}, dropped[kind], _label(*chosen), chosen[1],
                            flops=flops, bytes=float(ITEM_BYTES[kind] * n * k + 4 * m * (n + k)),
                        ))  # fmt: skip
    return _with_bounds(found, bounds, {kind: (kind,) for kind in DECODING_DTYPES})


def _decoding_ways(n: int, k: int, m: int, threads: int, native: NativeProducts) -> dict[str, dict[str, Way]]:
    """Return the candidates of each type with this number of threads."""
    x, w = torch.randn(m, k), torch.randn(n, k)
    found: dict[str, dict[str, Way]] = {
        "float32": {"torch": partial(F.linear, x, w)},
        "bfloat16": {"torch": partial(F.linear, x.bfloat16(), w.bfloat16())},
    }
    for name, way in native.candidates(m, threads).items():
        library, kind, *method = name.split()
        found.setdefault(kind, {})[" ".join([library, *method])] = way
    return found


def _label(way: str, threads: int) -> str:
    return f"{way}, {threads} thread{'s' * (threads > 1)}"


def _with_bounds(
    lines: list[TimedProduct], bounds: dict[int, Bounds], types: Mapping[str, Iterable[str]]
) -> list[TimedProduct]:
    """Return the lines with their bounds; a product faster than the measured rate of its type, or copy, raises the rate."""
    best = {threads: Bounds(dict(bound.flops), dict(bound.bandwidth)) for threads, bound in bounds.items()}
    for line in lines:
        bound, kind = best[line.threads], "float32" if line.chosen == "fp32" else line.dtype
        bound.flops[kind] = max(bound.flops[kind], line.flops / line.seconds)
        size = bound.size(line.bytes)
        bound.bandwidth[size] = max(bound.bandwidth[size], line.bytes / line.seconds)
    return [
        replace(line, bound_seconds=best[line.threads].seconds(line.flops, line.bytes, types[line.dtype]))
        for line in lines
    ]


def format_products(lines: list[TimedProduct]) -> str:
    """Return the table as text, the choice first and then the other candidates in GFLOP/s (no product: in us)."""
    wide = max(len(line.name) for line in lines)
    choice = max(len(line.chosen) for line in lines)
    found = [
        f"{'product':<{wide}}{'calls':>7}{'us':>10}  {'choice':<{choice}}{'GFLOP/s':>9}{'of bound':>10}  others"
    ]
    for line in lines:
        speeds = {
            way: f"{rate / 1e9:,.0f}" if rate else f"{1e6 * line.times[way]:,.0f} us"
            for way, rate in line.rates.items()
        }
        others = [f"{way} {speed}" for way, speed in speeds.items() if way != line.chosen]
        others += [f"{way} dropped ({reason})" for way, reason in line.dropped.items()]
        speed, share = (speeds[line.chosen], f"{line.share:.0%}") if line.flops else ("", "")
        found.append(
            f"{line.name:<{wide}}{line.calls or '-':>7}{1e6 * line.seconds:>10,.0f}  {line.chosen:<{choice}}{speed:>9}"
            f"{share:>10}  {'; '.join(others)}".rstrip()
        )
    return "\n".join(found)


def total(lines: Iterable[TimedProduct]) -> tuple[float, float]:
    """Return the seconds of all calls of a step as chosen, and at the bound."""
    rows = list(lines)
    return sum(line.calls * line.seconds for line in rows), sum(
        line.calls * line.bound_seconds for line in rows
    )
