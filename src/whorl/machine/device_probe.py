"""Measures the machine and chooses device, dtype and number of threads.

CPU flags mislead. A CPU with AMX multiplies bf16 matrices 5 to 9 times faster than fp32; one with `avx512_bf16` but no
AMX at half the speed of fp32. More threads than a shared host provides make small products slower. So `probe` times a
few matrix products, of shapes from small and large models, in both dtypes and at several thread counts. It chooses by
the geometric mean over the shapes. bf16 must be faster by a fifth, since casting fp32 master weights costs that much.

GPU dtypes depend on the capability (`gpu_dtypes`): bf16 from 8.0, fp8 from 8.9, fp16 with loss scaling below 8.0. fp8
loses quality, so it must be faster by more. It is timed with its overhead (two maxima, two casts) and offered only if a
product is correct. A CPU uses fp16 or fp8 (emulated) only on request. The GPU code has not run on a GPU yet.

The cache (`~/.cache/whorl`, keyed by CPU model, usable cores, GPU and torch version) holds the measurement. `choose` is
a pure function of it, and every choice can be forced by argument or by `WHORL_DEVICE`, `WHORL_DTYPE`, `WHORL_THREADS`.
A measurement under contention expires after ten minutes: two threads that share one core look no faster than one.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import ConfigError, one_of
from whorl.machine.gemm_benchmark import (
    SHAPES,
    available_core_fraction,
    copy_bandwidth,
    gpu_matmul_flops,
    matmul_flops,
)

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float8")  # all valid dtypes
DTYPE_ABBREVIATIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}
CPU_DTYPES = ("float32", "bfloat16")  # timed on a CPU
DEVICES = ("cpu", "cuda")
CONTENDED_CACHE_SECONDS = 600.0  # lifetime of a measurement under contention
UNCONTENDED_FRACTION = 0.85
BF16_MIN_SPEEDUP = 1.2  # over fp32; also for fp16 in its place
FP8_MIN_SPEEDUP = 1.3  # over bf16


@dataclass(frozen=True)
class Measurement:
    """A measurement. `flops[dtype][threads]` is FLOP/s for each of SHAPES (threads as text, for JSON)."""

    flops: dict[str, dict[str, list[float]]]
    memory_bandwidth: float  # bytes/s of a copy, read plus write
    gpu_flops: dict[str, list[float]] = field(default_factory=dict)
    gpu_bandwidth: float = 0.0
    uncontended: bool = True  # no other process used the cores
    measured_at: float = 0.0  # seconds since 1970


@dataclass(frozen=True)
class Machine:
    """The chosen configuration, and its measured speed.

    `flops[dtype]` is the highest FLOP/s of a matrix product at the chosen device and thread count, the peak for MFU
    (for a dtype that was not timed, that of float32). `memory_bandwidth` is in bytes/s.
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
        """The dtype of activations: bfloat16 under float8, which applies to certain products only."""
        import torch

        dtype: torch.dtype = getattr(torch, "bfloat16" if self.dtype == "float8" else self.dtype)
        return dtype

    @property
    def peak_flops(self) -> float:
        """FLOP/s at the chosen dtype."""
        return self.flops[self.dtype]

    @property
    def choice(self) -> tuple[str, str, int]:
        """Return device, dtype and threads, which decide bits."""
        return self.device, self.dtype, self.threads

    def without_measured_choices(self) -> Machine:
        """Return this machine with the usual dtype of its device (or WHORL_DTYPE) and one thread."""
        usual = "bfloat16" if "bfloat16" in self.flops else "float16"  # by the types that the GPU supports
        dtype = os.environ.get("WHORL_DTYPE") or ("float32" if self.device == "cpu" else usual)
        note = f"{self.device}, {dtype}, 1 thread (nothing measured decides)"
        flops = {dtype: self.flops["float32"], **self.flops}
        return replace(self, dtype=dtype, threads=1, note=note, flops=flops)

    def apply(self) -> None:
        """Set torch's number of threads in this process, until `restore_threads`."""
        global _threads_before
        import torch

        if _threads_before is None:
            _threads_before = torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_threads_before: int | None = None  # torch's number of threads when `Machine.apply` first changed it


def restore_threads() -> None:
    """Undo `Machine.apply`: the number of threads decides the last bits of what runs next in this process."""
    global _threads_before
    if _threads_before is not None:
        import torch

        torch.set_num_threads(_threads_before)
        _threads_before = None


def cpu_model() -> str:
    """The CPU's model name, without heavy imports."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def usable_cores() -> int:
    """Number of cores this process may use: its affinity, limited by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, _, period = quota.read_text().strip().partition(" ")
        if limit.isdigit() and period.isdigit():
            cores = min(cores, max(1, math.ceil(int(limit) / int(period))))
    return cores


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
    """Measure this machine (or read the cache) and choose; under 2 s the first time.

    Args:
        device, dtype, threads: force a choice; the environment variables WHORL_DEVICE, WHORL_DTYPE and WHORL_THREADS
            apply where an argument is missing.
        cache_dir: of measurements; `$XDG_CACHE_HOME/whorl` or `~/.cache/whorl` by default.
        refresh: measure again despite a cached measurement.

    Raises:
        ConfigError: a forced choice that does not exist or is not available here.
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
    identity = json.dumps([cpu, cores, gpu, torch.__version__, SHAPES, DTYPES])
    cache = cache_dir / f"machine-{sha256(identity.encode()).hexdigest()[:16]}.json"
    measured = None if refresh else _read_cache(cache)
    if measured is None or (
        not measured.uncontended and time.time() - measured.measured_at > CONTENDED_CACHE_SECONDS
    ):
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
    """Return the choice for a measurement; given arguments are forced. Pure; raises as `probe`."""
    forced = [name for name, value in (("device", device), ("type", dtype), ("threads", threads)) if value]
    if device is None:
        device = "cuda" if gpu else "cpu"
    elif device not in DEVICES:
        raise ConfigError(f"device {device!r} is unknown", expected=one_of(device, DEVICES))
    elif device == "cuda" and not gpu:
        raise ConfigError(
            "device 'cuda' was requested, but torch finds no GPU",
            do="remove the device setting, or install a CUDA build of torch",
        )
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"compute type {dtype!r} is unknown", expected=one_of(dtype, DTYPES))
    if threads is not None and threads < 1:
        raise ConfigError(f"{threads} threads were requested", expected="1 or more")

    def score(kind: str, count: str) -> float:
        speeds = measured.flops[kind][count]
        return math.exp(sum(math.log(speed) for speed in speeds) / len(speeds))

    timed = measured.gpu_flops if device == "cuda" else measured.flops
    # Threads are chosen by the CPU's speed in the requested dtype, or in float32 if that was not timed.
    kinds = CPU_DTYPES if dtype is None else (dtype if dtype in measured.flops else "float32",)
    counts = list(measured.flops["float32"])
    if threads is not None:  # for a thread count that was not timed, use the nearest one
        wanted = threads
        counts = [min(counts, key=lambda count: abs(int(count) - wanted))]
    best = {kind: max(counts, key=lambda count: score(kind, count)) for kind in kinds}
    if dtype is None and device == "cuda":
        dtype = _fastest_dtype({kind: max(speeds) for kind, speeds in measured.gpu_flops.items()})
    elif dtype is None:
        dtype = _fastest_dtype({kind: score(kind, best[kind]) for kind in kinds})
    at = best.get(dtype, best[kinds[0]])
    flops = measured.gpu_flops if device == "cuda" else {k: measured.flops[k][at] for k in measured.flops}
    peak = {kind: max(values) for kind, values in flops.items()}
    threads = threads or int(at)
    where = gpu if device == "cuda" else f"{threads} thread{'s' * (threads > 1)} of {cores}"
    seen = [
        (DTYPE_ABBREVIATIONS[kind], f"{peak[kind] / 1e12:.2f}") for kind in reversed(DTYPES) if kind in peak
    ]
    (first, speed), rest = seen[0], [f"{name} at {value}" for name, value in seen[1:]]
    note = f"{device}, {dtype}, {where}: {first} products ran at {speed} TFLOP/s and " + ", ".join(rest)
    note += f" (forced: {', '.join(forced)})" if forced else ""
    if dtype not in timed:
        emulated = ", whose rounding is emulated" if dtype == "float8" else ""
        note += f"; none was timed in {dtype}{emulated}: MFU is relative to float32's peak"
        peak[dtype] = peak["float32"]
    bandwidth = measured.gpu_bandwidth if device == "cuda" else measured.memory_bandwidth
    return Machine(device, dtype, threads, peak, bandwidth, cpu, cores, ram, gpu, note)


def _fastest_dtype(speeds: dict[str, float]) -> str:
    """Return the dtype to train in; each narrower dtype must be faster by a margin."""
    chosen = "float32"
    half = "bfloat16" if "bfloat16" in speeds else "float16"
    if speeds.get(half, 0.0) >= BF16_MIN_SPEEDUP * speeds["float32"]:
        chosen = half
    if speeds.get("float8", 0.0) >= FP8_MIN_SPEEDUP * speeds[chosen]:
        chosen = "float8"
    return chosen


def measure(cores: int, *, gpu: bool = False) -> Measurement:
    """Time the products. torch's thread count is restored."""
    import torch

    counts = sorted({1, cores, *(2**power for power in range(1, 12) if 2**power < cores)})
    flops: dict[str, dict[str, list[float]]] = {kind: {} for kind in CPU_DTYPES}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(cores)
        alone = available_core_fraction(cores) > UNCONTENDED_FRACTION
        for count in reversed(counts):
            torch.set_num_threads(count)
            for kind in CPU_DTYPES:
                flops[kind][str(count)] = [matmul_flops(shape, kind, "cpu") for shape in SHAPES]
        torch.set_num_threads(cores)
        bandwidth = copy_bandwidth("cpu", 64 << 20)
    finally:
        torch.set_num_threads(before)
    if not gpu:
        return Measurement(flops, bandwidth, uncontended=alone, measured_at=time.time())
    gpu_flops = {kind: [speed] for kind, speed in gpu_matmul_flops().items()}
    return Measurement(flops, bandwidth, gpu_flops, copy_bandwidth("cuda", 1 << 30), alone, time.time())


def measure_peaks(device: str, dtype: str = "float32") -> tuple[dict[str, float], float]:
    """Return this process's current FLOP/s by dtype with its threads, and bytes/s of a copy.

    Not cached, and no choice depends on it: it is the reference of a profile, contention included. `dtype` is always
    among the dtypes: an emulated product uses the rate of float32.
    """
    if device == "cuda":
        flops = gpu_matmul_flops()
    else:
        kinds = dict.fromkeys((*CPU_DTYPES, *(("float16",) if dtype == "float16" else ())))
        flops = {kind: max(matmul_flops(shape, kind, device) for shape in SHAPES) for kind in kinds}
    flops.setdefault(dtype, flops["float32"])
    return flops, copy_bandwidth(device, 1 << 30 if device == "cuda" else 64 << 20)


def _read_cache(path: Path) -> Measurement | None:
    try:
        return Measurement(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # absent, damaged or of another version: measure again
        return None


def _write_cache(path: Path, measured: Measurement) -> None:
    """Best effort: without a writable home the next run measures again."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(measured)))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
