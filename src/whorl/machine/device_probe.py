"""Measures the machine and chooses device, dtype and number of threads.

CPU flags mislead. A CPU with AMX multiplies bf16 matrices 5 to 9 times faster than fp32; one with `avx512_bf16` but no
AMX at half the speed of fp32. More threads than a shared host provides make small products slower. So `probe` times a
few matrix products, of shapes from small and large models, in both dtypes and at several thread counts. It chooses by
the geometric mean over the shapes. bf16 must be faster by a fifth, since casting fp32 master weights costs that much.

GPU dtypes depend on the capability (`gpu_dtypes`): bf16 from 8.0, fp8 from 8.9, fp16 with loss scaling below 8.0. fp8
loses quality, so it must be faster by more. It is timed with its overhead (two maxima, two casts) and offered only if a
product is correct. A CPU uses fp16 or fp8 (emulated) only on request.

The cache (`~/.cache/whorl`, keyed by `identity.py`, usable cores, GPU and torch version) holds the measurements. `choose`
is a pure function of one, and every choice can be forced by argument or by `WHORL_DEVICE`, `WHORL_DTYPE`, `WHORL_THREADS`.
A measurement under contention expires after ten minutes: two threads that share one core look no faster than one.

Two machines may have one identity: one is throttled, or a hypervisor hides the CPU. So a process compares the rate of a
small product with the cached one before it uses a measurement. If no cached measurement has this rate, it measures.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import ConfigError, one_of
from whorl.files import write_atomic
from whorl.machine.gemm_benchmark import (
    SHAPES,
    available_core_fraction,
    copy_bandwidth,
    gpu_matmul_flops,
    matmul_flops,
)
from whorl.machine.identity import cpu_identity

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float8")  # all valid dtypes
DTYPE_ABBREVIATIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}
CPU_DTYPES = ("float32", "bfloat16")  # timed on a CPU
DEVICES = ("cpu", "cuda")
CONTENDED_CACHE_SECONDS = 600.0  # lifetime of a measurement under contention
UNCONTENDED_FRACTION = 0.85
SAME_MACHINE_FACTOR = 3.0  # at most, between rates of one machine: neighbors on the host may halve them
QUOTAS = (
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)  # microseconds of CPU time a period, and the period; "max" or -1: no limit
MAX_MEASUREMENTS = 4  # kept of machines with one identity
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


def usable_cores(quota: bool = True) -> int:
    """Number of cores this process may use: its affinity, limited by a container's CPU quota (cgroup v2 or v1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in QUOTAS if quota else ():
        words = " ".join(path.read_text() for path in files if path.exists()).split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            cores = min(cores, max(1, math.ceil(int(words[0]) / int(words[1]))))
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
    cpu, cores = cpu_identity().full_name, usable_cores()
    measured, _ = measured_machine(cache_dir, refresh)
    return choose(
        measured, cpu=cpu, cores=cores, gpu=gpu, ram=ram_bytes(), device=device, dtype=dtype, threads=threads
    )


def cache_folder() -> Path:
    """The folder of measurements and of choices made from them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whorl"


def measured_machine(cache_dir: Path | None = None, refresh: bool = False) -> tuple[Measurement, str]:
    """Return this machine's measurement, new or cached, and its name for files of what depends on it."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    cores = usable_cores()
    identity = repr((cpu_identity(), cores, gpu, torch.__version__, SHAPES, DTYPES))
    key = sha256(identity.encode()).hexdigest()[:16]
    path = (cache_dir or cache_folder()) / f"machine-{key}.json"
    kept = [] if refresh else _read_cache(path)
    place = _find(path, kept)
    if place is not None:
        measured = kept[place]
        expired = time.time() - measured.measured_at > CONTENDED_CACHE_SECONDS
        if measured.uncontended or not expired:
            return measured, f"{key}-{place}"
    elif len(kept) < MAX_MEASUREMENTS:
        place = len(kept)
    else:
        place = min(range(len(kept)), key=lambda number: kept[number].measured_at)
    measured = measure(cores, gpu=bool(gpu))
    kept[place : place + 1] = [measured]
    _write_cache(path, kept)
    _found[path] = place
    return measured, f"{key}-{place}"


_found: dict[Path, int] = {}  # place of this machine in a cache file, found once a process


def _find(path: Path, kept: list[Measurement]) -> int | None:
    """Return the place of the measurement with the rates of now, or of one that other processes may slow down to them."""
    if kept and _found.get(path, len(kept)) >= len(kept):
        now = dict[str, float]()
        for _ in range(3):  # a passing disturbance is no other machine
            rates, fraction = current_rates()
            now = {kind: max(speed, now.get(kind, 0.0)) for kind, speed in rates.items()}
            slowed = (False, True) if fraction <= UNCONTENDED_FRACTION else (False,)
            same = (n for slow in slowed for n, found in enumerate(kept) if _may_have(found, now, slow))
            if (place := next(same, None)) is not None:
                _found[path] = place
                return place
        return None
    return _found.get(path) if kept else None


def _may_have(measured: Measurement, now: dict[str, float], slowed: bool) -> bool:
    """Whether the measured machine may have the rates of now. slowed: by other processes, which make nothing faster."""
    ratios = [speed / measured.flops[kind]["1"][0] for kind, speed in now.items()]
    least = 0.0 if slowed else 1 / SAME_MACHINE_FACTOR
    return all(least <= ratio <= SAME_MACHINE_FACTOR for ratio in ratios)


def current_rates() -> tuple[dict[str, float], float]:
    """Return FLOP/s of the smallest shape by dtype with one thread, and the share of a core that the timing got."""
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        began, used = time.perf_counter(), time.thread_time()
        rates = {kind: matmul_flops(SHAPES[0], kind, "cpu") for kind in CPU_DTYPES}
        return rates, (time.thread_time() - used) / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)


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
    rates = [(kind, peak[kind] / 1e12) for kind in reversed(DTYPES) if kind in peak]
    seen = [(DTYPE_ABBREVIATIONS[kind], f"{n:.2f}" if n >= 0.1 else f"{n:.2g}") for kind, n in rates]
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


def _read_cache(path: Path) -> list[Measurement]:
    try:
        return [Measurement(**kept) for kept in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):  # absent, damaged or of another version: measure again
        return []


def _write_cache(path: Path, kept: list[Measurement]) -> None:
    """Best effort: without a writable home the next run measures again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps([asdict(measured) for measured in kept]))
