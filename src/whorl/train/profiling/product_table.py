"""Times every product of a training step and of a decoding step on this machine, in each way, for `whorl machine`.

The bound of a product is the larger of two times: FLOPs over the best measured GEMM rate of its type, and bytes over the
bandwidth of a copy of as many bytes. Both are measured with its number of threads. So a small product is bounded by its
cache. A training product may run in fp32 too, and takes the better rate. A product that beats the rate raises it.

Training products run with the threads of one replica. A decoding product runs in its type by torch and by the native
library, with one thread and with all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from whorl.engine.native.candidates import NativeProducts
from whorl.machine.device_probe import measure_peaks
from whorl.machine.gemm_benchmark import SHAPES, best_seconds, copy_bandwidth
from whorl.machine.kernel_choice import TimedChoice, fastest, timed_choice
from whorl.models import TransformerConfig
from whorl.models.transformer_cost import linear_shapes
from whorl.train.config import OptimConfig
from whorl.train.profiling.products import MatrixProduct, Way, training_products

DECODING_ROWS = (1, 8, 32, 128)
DECODING_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}
COPY_BYTES = (1 << 15, 1 << 18, 1 << 21, 1 << 25)  # first, second and third level of caches, and memory
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class TimedProduct:
    """One line of the table.

    rates: FLOP/s of each candidate that ran; dropped: reason for each of the others. chosen: the candidate in use, which
    a setting may force. threads: of the chosen candidate. bound_seconds, seconds: of one call.
    """

    name: str
    shape: str
    dtype: str
    calls: int
    rates: dict[str, float]
    dropped: dict[str, str]
    chosen: str
    threads: int
    seconds: float
    bound_seconds: float = math.nan
    flops: float = field(default=0.0, repr=False)
    bytes: float = field(default=0.0, repr=False)

    @property
    def share(self) -> float:
        """Fraction of the bound that the choice reaches."""
        return self.bound_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share_of_bound": self.share}


@dataclass(frozen=True)
class Bounds:
    """GEMM rates by type in FLOP/s, and bytes/s of a copy by its bytes (read and written), with a number of threads."""

    flops: dict[str, float]
    bandwidth: dict[int, float]

    def seconds(self, flops: float, n_bytes: float, dtypes: Iterable[str]) -> float:
        """Return the least time of a product that may run in any of these types."""
        size = min((size for size in self.bandwidth if size >= n_bytes), default=max(self.bandwidth))
        return max(flops / max(self.flops[kind] for kind in dtypes), n_bytes / self.bandwidth[size])

    def at_least(self, other: Bounds) -> Bounds:
        """Return the better of both: on busy cores several threads may have measured less than one."""
        flops = {kind: max(rate, other.flops[kind]) for kind, rate in self.flops.items()}
        return Bounds(
            flops, {size: max(rate, other.bandwidth[size]) for size, rate in self.bandwidth.items()}
        )


def measure_bounds(threads: int) -> Bounds:
    """Measure GEMM rates (fp32, bf16, int8) and bandwidth now, with this number of threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        flops, _ = measure_peaks("cpu")
        bandwidth = {2 * size: copy_bandwidth("cpu", size) for size in COPY_BYTES}
        flops["int8"] = _int8_rate(flops["bfloat16"])
    finally:
        torch.set_num_threads(before)
    return Bounds(flops, bandwidth)


def _int8_rate(otherwise: float) -> float:
    """Return the rate of torch's int8 product, or `otherwise` if this torch has none for the CPU."""
    rows, inner, outer = SHAPES[1]
    a, b = torch.ones(rows, inner, dtype=torch.int8), torch.ones(inner, outer, dtype=torch.int8)
    try:
        return 2.0 * rows * inner * outer / best_seconds(lambda: torch._int_mm(a, b), "cpu")
    except (RuntimeError, AttributeError):
        return otherwise


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
        """Time a training step; see `time_training`."""
        every = OptimConfig().muon_every
        products = training_products(self.model, self.rows, self.length, self.dtype, every)
        return time_training(products, measure_bounds(self.threads), self.threads, refresh)

    def decoding(self, refresh: bool = False) -> list[TimedProduct]:
        """Time decoding steps of DECODING_ROWS rows; see `time_decoding`."""
        bounds = {1: measure_bounds(1)}
        if self.cores > 1:
            bounds[self.cores] = measure_bounds(self.cores).at_least(bounds[1])
        return time_decoding(self.model, bounds, DECODING_ROWS, refresh)


def time_training(
    products: Iterable[MatrixProduct], bounds: Bounds, threads: int, refresh: bool = False
) -> list[TimedProduct]:
    """Time the products of a training step with the threads of one replica.

    Raises:
        ConfigError: WHORL_CHOOSE forces a candidate that does not exist or cannot run.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with torch.no_grad():
            found = [_time_product(product, threads, refresh) for product in products]
    finally:
        torch.set_num_threads(before)
    types = {line.dtype: ("float32", line.dtype) for line in found}
    return _with_bounds(found, {threads: bounds}, types)


def _time_product(product: MatrixProduct, threads: int, refresh: bool) -> TimedProduct:
    ways = product.ways()
    timed = timed_choice(product.name, ways, flops=product.flops, refresh=refresh)
    chosen = fastest(product.name, ways, flops=product.flops)
    return TimedProduct(
        product.name, product.shape, product.dtype, product.calls, timed.flops_per_second(), timed.dropped,
        chosen, threads, timed.seconds[chosen], flops=product.flops, bytes=product.bytes,
    )  # fmt: skip


def time_decoding(
    model: TransformerConfig,
    bounds: dict[int, Bounds],
    rows: Iterable[int],
    refresh: bool = False,
) -> list[TimedProduct]:
    """Time the linear layers of a decoding step for batches of these sizes; bounds: by number of threads."""
    layers = {**linear_shapes(model), "head": (model.vocab_size, model.d_model, 1)}
    found = []
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            for name, (n, k, calls) in layers.items():
                with NativeProducts(n, k) as native:
                    for m in rows:
                        timed = {}
                        for threads in bounds:
                            torch.set_num_threads(threads)
                            ways = _decoding_ways(n, k, m, threads, native)
                            timed[threads] = {
                                kind: timed_choice(
                                    f"decode {name} {m}x{k}x{n} {short}",
                                    of_kind,
                                    flops=2.0 * m * n * k,
                                    refresh=refresh,
                                )
                                for kind, short in DECODING_DTYPES.items()
                                if (of_kind := ways.get(kind))
                            }
                        found += list(_decoding_lines(name, (m, k, n), calls, timed))
    finally:
        torch.set_num_threads(before)
    return _with_bounds(found, bounds, {kind: (kind,) for kind in DECODING_DTYPES})


def _decoding_ways(n: int, k: int, m: int, threads: int, native: NativeProducts) -> dict[str, dict[str, Way]]:
    """Return the candidates of each type with this number of threads."""
    x, w = torch.randn(m, k), torch.randn(n, k)
    short_x, short_w = x.bfloat16(), w.bfloat16()
    found: dict[str, dict[str, Way]] = {
        "float32": {"torch": lambda: F.linear(x, w)},
        "bfloat16": {"torch": lambda: F.linear(short_x, short_w)},
    }
    for name, way in native.candidates(m, threads).items():
        library, kind, *method = name.split()
        found.setdefault(kind, {})[" ".join([library, *method])] = way
    return found


def _decoding_lines(
    name: str, sizes: tuple[int, int, int], calls: int, timed: dict[int, dict[str, TimedChoice]]
) -> Iterator[TimedProduct]:
    """Yield one line for each type, with the candidates of all numbers of threads."""
    m, k, n = sizes
    for kind in dict.fromkeys(kind for by_kind in timed.values() for kind in by_kind):
        seconds = {
            (way, threads): s
            for threads, by in timed.items()
            if kind in by
            for way, s in by[kind].seconds.items()
        }
        dropped = {
            _label(way, threads): reason
            for threads, by in timed.items()
            if kind in by
            for way, reason in by[kind].dropped.items()
        }
        way, threads = min(seconds, key=lambda key: seconds[key])
        flops, n_bytes = 2.0 * m * n * k, float(ITEM_BYTES[kind] * n * k + 4 * m * (n + k))
        yield TimedProduct(
            f"decode {name} {DECODING_DTYPES[kind]}", "x".join(map(str, sizes)), kind, calls,
            {_label(*key): flops / s for key, s in seconds.items()}, dropped, _label(way, threads), threads,
            seconds[way, threads], flops=flops, bytes=n_bytes,
        )  # fmt: skip


def _label(way: str, threads: int) -> str:
    return f"{way}, {threads} thread{'s' * (threads > 1)}"


def _with_bounds(
    lines: list[TimedProduct], bounds: dict[int, Bounds], types: Mapping[str, Iterable[str]]
) -> list[TimedProduct]:
    """Return the lines with their bounds; a product faster than the measured rate of its type raises the rate."""
    best = {threads: dict(bound.flops) for threads, bound in bounds.items()}
    for line in lines:
        wide = line.chosen == "fp32"
        kind = "float32" if wide else line.dtype
        best[line.threads][kind] = max(best[line.threads][kind], line.flops / line.seconds)
    made = []
    for line in lines:
        bound = Bounds(best[line.threads], bounds[line.threads].bandwidth)
        seconds = bound.seconds(line.flops, line.bytes, types[line.dtype])
        made.append(TimedProduct(**{**vars(line), "bound_seconds": seconds}))
    return made


def format_products(lines: list[TimedProduct]) -> str:
    """Return the table as text, the choice first and then the other candidates in GFLOP/s."""
    wide = max(len(line.name) for line in lines)
    shape = max(len(line.shape) for line in lines)
    choice = max(len(line.chosen) for line in lines)
    found = [
        f"{'product':<{wide}}  {'shape':<{shape}}{'calls':>7}{'us':>10}  {'choice':<{choice}}{'GFLOP/s':>9}"
        f"{'of bound':>10}  others"
    ]
    for line in lines:
        others = [f"{name} {rate / 1e9:,.0f}" for name, rate in line.rates.items() if name != line.chosen]
        others += [f"{name} dropped ({reason})" for name, reason in line.dropped.items()]
        found.append(
            f"{line.name:<{wide}}  {line.shape:<{shape}}{line.calls:>7}{1e6 * line.seconds:>10,.0f}  "
            f"{line.chosen:<{choice}}{line.flops / line.seconds / 1e9:>9,.0f}{line.share:>10.0%}  {'; '.join(others)}"
        )
    return "\n".join(found)


def total(lines: Iterable[TimedProduct]) -> tuple[float, float]:
    """Return the seconds of all calls of a step as chosen, and at the bound."""
    rows = list(lines)
    return sum(line.calls * line.seconds for line in rows), sum(
        line.calls * line.bound_seconds for line in rows
    )
