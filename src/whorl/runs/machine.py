"""The machine, measured: which device, compute type and thread count to use.

Flags mislead. A CPU with AMX multiplies bf16 matrices 5 to 9 times faster than fp32; one that advertises
`avx512_bf16` but has no AMX does it at half the speed of fp32; and more threads than a shared host really
gives make small products slower. So `probe` times a few matrix products on the spot, with shapes of small
models as well as big ones, in both types and at several thread counts, and chooses by the geometric mean
over the shapes (a mean of speeds would let the biggest product decide alone). bf16 must win by a fifth:
casting fp32 master weights eats less than that.

What is cached (under `~/.cache/whorl`, by CPU model, cores that we may use, GPU and torch version) is the
measurement, not the choice: `choose` is a pure function of it, and every choice can be forced by argument
or by `WHORL_DEVICE`, `WHORL_DTYPE`, `WHORL_THREADS`.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import ConfigError, one_of

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
BF16_MUST_WIN_BY = 1.2
# rows x inner x outer: a small model's projection and its MLP, a middling one, and one big product for the
# peak.
SHAPES = ((2048, 128, 512), (2048, 384, 1536), (768, 1024, 1024))
SECONDS_PER_TIMING = 0.03


@dataclass(frozen=True)
class Measurement:
    """What was timed. `flops[dtype][threads]` is FLOP/s for each of SHAPES (threads as text, for JSON)."""

    flops: dict[str, dict[str, list[float]]]
    memory_bandwidth: float  # bytes/s of a copy, read and write both counted
    gpu_flops: dict[str, list[float]] = field(default_factory=dict)
    gpu_bandwidth: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What to compute with, and how fast it was seen to be.

    `flops[dtype]` is the highest FLOP/s seen for a matrix product at the chosen device and thread count: the
    peak against which utilisation is stated. `memory_bandwidth` is in bytes/s.
    """

    device: str
    dtype: str
    threads: int
    flops: dict[str, float]
    memory_bandwidth: float
    cpu: str
    cores: int
    ram_bytes: int
    gpu: str
    note: str

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    @property
    def peak_flops(self) -> float:
        """FLOP/s at the chosen type."""
        return self.flops[self.dtype]

    def apply(self) -> None:
        """Make torch use the chosen number of threads, in this process."""
        import torch

        torch.set_num_threads(self.threads)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cpu_model() -> str:
    """The CPU's name as its maker spells it, without importing anything heavy."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def usable_cores() -> int:
    """Cores that this process may run on: its affinity, cut to the container's CPU quota if any."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, _, period = quota.read_text().strip().partition(" ")
        if limit.isdigit() and period.isdigit():
            cores = min(cores, max(1, math.ceil(int(limit) / int(period))))
    return cores


def keep_freed_memory() -> None:
    """Tell this process's allocator (glibc's; elsewhere nothing happens) to reuse what it frees.

    By default it hands large blocks back to the kernel and fetches them anew, every page with a fault: a training step
    allocates the same few hundred tensors each time, and a quickstart's step lost 4 of 52 ms to that.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.system() == "Linux" else None
    if mallopt is None:
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 1 << 26)


def give_back_freed_memory() -> None:
    """Hand what this process has freed to the system after all: between jobs, where `keep_freed_memory` keeps too much."""
    if platform.system() == "Linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def ram_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def probe(
    *,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    cache_dir: Path | None = None,
    refresh: bool = False,
) -> Machine:
    """Measure this machine (or read the cached measurement) and choose; under 2 s the first time.

    Args:
        device, dtype, threads: force a choice; the environment variables WHORL_DEVICE, WHORL_DTYPE and
            WHORL_THREADS do the same for what is not given here.
        cache_dir: where measurements are kept; `$XDG_CACHE_HOME/whorl` or `~/.cache/whorl` by default.
        refresh: measure again even if there is a cached measurement.
    Raises:
        ConfigError: a forced choice that does not exist or cannot be had here.
    """
    device = device or os.environ.get("WHORL_DEVICE") or None
    dtype = dtype or os.environ.get("WHORL_DTYPE") or None
    if threads is None and (text := os.environ.get("WHORL_THREADS")):
        if not text.isdigit():
            raise ConfigError(f"WHORL_THREADS is {text!r}", expected="a whole number of threads, 1 or more")
        threads = int(text)
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    cpu, cores = cpu_model(), usable_cores()
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whorl"
    identity = json.dumps([cpu, cores, gpu, torch.__version__, SHAPES])
    cache = cache_dir / f"machine-{sha256(identity.encode()).hexdigest()[:16]}.json"
    measured = None if refresh else _read_cache(cache)
    if measured is None:
        measured = measure(cores, gpu=bool(gpu))
        _write_cache(cache, measured)
    return choose(
        measured, cpu=cpu, cores=cores, gpu=gpu, ram=ram_bytes(), device=device, dtype=dtype, threads=threads
    )


def choose(
    measured: Measurement,
    *,
    cpu: str = "",
    cores: int = 1,
    gpu: str = "",
    ram: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
) -> Machine:
    """The choice that a measurement supports; what is given is forced. Pure; raises as `probe` does."""
    forced = [name for name, value in (("device", device), ("type", dtype), ("threads", threads)) if value]
    if device is None:
        device = "cuda" if gpu else "cpu"
    elif device not in DEVICES:
        raise ConfigError(f"device {device!r} is unknown", expected=one_of(device, DEVICES))
    elif device == "cuda" and not gpu:
        raise ConfigError(
            "device 'cuda' was asked for, but torch sees none here",
            do="leave the device out, or install a CUDA build of torch",
        )
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"compute type {dtype!r} is unknown", expected=one_of(dtype, DTYPES))
    if threads is not None and threads < 1:
        raise ConfigError(f"{threads} threads were asked for", expected="1 or more")

    def score(kind: str, count: str) -> float:
        speeds = measured.flops[kind][count]
        return math.exp(sum(math.log(speed) for speed in speeds) / len(speeds))

    kinds = (dtype,) if dtype else DTYPES
    counts = list(measured.flops["float32"])
    if threads is not None:  # speeds at a count that was not timed: those of the nearest one
        wanted = threads
        counts = [min(counts, key=lambda count: abs(int(count) - wanted))]
    best = {kind: max(counts, key=lambda count: score(kind, count)) for kind in kinds}
    if device == "cuda":
        speeds = {kind: max(measured.gpu_flops[kind]) for kind in DTYPES}
    else:
        speeds = {kind: score(kind, best[kind]) for kind in kinds}
    if dtype is None:
        faster = speeds["bfloat16"] >= BF16_MUST_WIN_BY * speeds["float32"]
        dtype = "bfloat16" if faster else "float32"
    at = best[dtype]
    flops = measured.gpu_flops if device == "cuda" else {kind: measured.flops[kind][at] for kind in DTYPES}
    peak = {kind: max(values) for kind, values in flops.items()}
    threads = threads or int(at)
    where = gpu if device == "cuda" else f"{threads} thread{'s' * (threads > 1)} of {cores}"
    note = (
        f"{device}, {dtype}, {where}: bf16 products ran at {peak['bfloat16'] / 1e12:.2f} TFLOP/s and fp32 at "
        f"{peak['float32'] / 1e12:.2f}" + (f" (forced: {', '.join(forced)})" if forced else "")
    )
    bandwidth = measured.gpu_bandwidth if device == "cuda" else measured.memory_bandwidth
    return Machine(device, dtype, threads, peak, bandwidth, cpu, cores, ram, gpu, note)


def measure(cores: int, *, gpu: bool = False) -> Measurement:
    """Time the products. Leaves torch's thread count as it was."""
    import torch

    counts = sorted({1, cores, *(2**power for power in range(1, 12) if 2**power < cores)})
    flops: dict[str, dict[str, list[float]]] = {kind: {} for kind in DTYPES}
    before = torch.get_num_threads()
    try:
        for count in reversed(counts):
            torch.set_num_threads(count)
            for kind in DTYPES:
                flops[kind][str(count)] = [_product_speed(shape, kind, "cpu") for shape in SHAPES]
        torch.set_num_threads(cores)
        bandwidth = _copy_speed("cpu", 64 << 20)
    finally:
        torch.set_num_threads(before)
    if not gpu:
        return Measurement(flops, bandwidth)
    big = (8192, 4096, 4096)
    gpu_flops = {kind: [_product_speed(big, kind, "cuda")] for kind in DTYPES}
    return Measurement(flops, bandwidth, gpu_flops, _copy_speed("cuda", 1 << 30))


def peaks_now(device: str) -> tuple[dict[str, float], float]:
    """What this process reaches at this moment with the threads it has: FLOP/s by type, and bytes/s of a copy.

    Not cached and nothing is chosen by it: it is what a profile is held against, neighbours included.
    """
    shapes = ((8192, 4096, 4096),) if device == "cuda" else SHAPES
    flops = {kind: max(_product_speed(shape, kind, device) for shape in shapes) for kind in DTYPES}
    return flops, _copy_speed(device, 1 << 30 if device == "cuda" else 64 << 20)


def _product_speed(shape: tuple[int, int, int], kind: str, device: str) -> float:
    """FLOP/s of one matrix product: the fastest repetition, since disturbance only ever slows one down."""
    import torch

    rows, inner, outer = shape
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    a = torch.ones(rows, inner, dtype=dtype, device=device)
    b = torch.ones(inner, outer, dtype=dtype, device=device)
    with torch.no_grad():
        return 2.0 * rows * inner * outer / _fastest(lambda: a @ b, device)


def _copy_speed(device: str, n_bytes: int) -> float:
    import torch

    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2.0 * n_bytes / _fastest(lambda: target.copy_(source), device)


def _fastest(work: Any, device: str) -> float:
    """Seconds of the fastest repetition in about SECONDS_PER_TIMING (the cold first only if alone)."""
    import torch

    best, start = math.inf, time.perf_counter()
    repetitions = 0
    while repetitions < 3 or time.perf_counter() - start < SECONDS_PER_TIMING:
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        repetitions += 1
        if repetitions > 1 or seconds > SECONDS_PER_TIMING:
            best = min(best, seconds)
        if repetitions > 1 and time.perf_counter() - start > 4 * SECONDS_PER_TIMING:
            break
        if seconds > 4 * SECONDS_PER_TIMING:
            break
    return best


def _read_cache(path: Path) -> Measurement | None:
    try:
        return Measurement(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # absent, damaged or of another version: measure again
        return None


def _write_cache(path: Path, measured: Measurement) -> None:
    """Best effort: a machine whose home cannot be written only measures again next time."""
    aside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(asdict(measured)))
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
