"""Choice among several ways to compute one product, by timing them on this machine.

    way = fastest("attention 8x3x256x64 bf16", {"blocked": blocked, "native": native}, flops=7e8)

A table of CPUs cannot replace the timing: hypervisors, sandboxes and clocks make instructions slower than their flags
suggest, and the best way changes with the shape. The first candidate is the default: another one must be faster by 3 %. A
candidate that raises, or whose result differs, is dropped with a warning.

Times and choices are kept in `kernels-MACHINE-SOURCES.json` in the cache folder, so that runs on one machine are
reproducible; MACHINE is the measurement of `device_probe.py`, SOURCES a hash of the package's C++ code. Processes that time
the same product at once all take the choice that was written first. Within `recorded_choices` a step that continues takes
the ways with which it began, unless others are forced (`forced_choices.py`).

The subtle part is when not to time: under torch's deterministic algorithms the default is taken, since timing must not
decide bits. A choice that was timed under contention expires as a measurement does. Call `fastest` once for each shape and
before a compiled region, not inside.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from whorl.errors import ConfigError, one_of
from whorl.machine import native_build
from whorl.machine.choices import VARIABLE, choose_once, record_choice
from whorl.machine.device_probe import (
    CONTENDED_CACHE_SECONDS,
    UNCONTENDED_FRACTION,
    cache_folder,
    measured_machine,
    write_atomically,
)
from whorl.machine.forced_choices import REMEDY, forced_candidate
from whorl.machine.gemm_benchmark import available_core_fraction

MIN_SPEEDUP = 1.03  # over the default
SECONDS_PER_CHOICE = 0.2
MIN_ROUNDS, MAX_ROUNDS = 3, 50
HOPELESS = 3.0  # times the fastest: timed once only

Candidates = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class TimedChoice:
    """The candidates' times for one product, and the choice.

    seconds: of the fastest repetition of each candidate that ran. dropped: reason for each of the others.
    """

    chosen: str
    seconds: dict[str, float]
    dropped: dict[str, str] = field(default_factory=dict)
    flops: float = 0.0  # of the product, as the caller gave it
    uncontended: bool = True
    measured_at: float = 0.0  # seconds since 1970

    def flops_per_second(self) -> dict[str, float]:
        """FLOP/s of each candidate that ran."""
        return {name: self.flops / seconds for name, seconds in self.seconds.items()}


def fastest(
    name: str,
    candidates: Candidates,
    *,
    flops: float = 0.0,
    forced: str | None = None,
    mismatch: Callable[[object, object], str | None] | None = None,
) -> str:
    """Return the name of the candidate to use for a product.

    Args:
        name: operation, shape and type, beginning with a word for the operation; torch's number of threads is added.
        candidates: the ways by name, the default first. Each is called several times and must not change its inputs.
        flops: of one call, for the table of choices.
        forced: a candidate that an argument requires; `forced_candidate` applies where it is None.
        mismatch: (the default's result, another's) -> the difference, or None if they agree.

    Raises:
        ConfigError: a forced candidate does not exist or cannot run here.
    """
    if not candidates:
        raise ValueError(f"{name}: no candidates")
    if _requests is not None:
        _requests.append(ChoiceRequest(name, candidates, flops))
    key = f"kernel-{sha256(_with_threads(name).encode()).hexdigest()[:16]}"
    forced = forced or forced_candidate(name)
    if forced is not None:
        _require(name, forced, candidates)
        record_choice(key, forced)
        return forced
    default = next(iter(candidates))
    if len(candidates) == 1 or _deterministic():
        return default
    memo = (_with_threads(name), tuple(candidates), os.environ.get(VARIABLE, ""))
    if memo not in _chosen:

        def choose() -> str:
            return timed_choice(name, candidates, flops=flops, mismatch=mismatch).chosen

        recorded = choose_once(key, choose)
        _chosen[memo] = recorded if recorded in candidates else choose()
    return _chosen[memo]


@dataclass(frozen=True)
class ChoiceRequest:
    """Arguments of one call of `fastest`."""

    name: str
    candidates: Candidates = field(repr=False)
    flops: float


_requests: list[ChoiceRequest] | None = None


@contextmanager
def listed_requests() -> Iterator[list[ChoiceRequest]]:
    """Within the context, each call of `fastest` is added to the list, which `whorl machine` prints."""
    global _requests
    found = list[ChoiceRequest]()
    _requests = found
    try:
        yield found
    finally:
        _requests = None


_chosen: dict[tuple[str, tuple[str, ...], str], str] = {}  # of this process
_required: set[tuple[str, str]] = set()  # forced candidates that ran


def timed_choice(
    name: str,
    candidates: Candidates,
    *,
    flops: float = 0.0,
    mismatch: Callable[[object, object], str | None] | None = None,
    refresh: bool = False,
) -> TimedChoice:
    """Return the kept times of a product, or time the candidates and keep them; arguments as of `fastest`.

    Raises:
        RuntimeError: no candidate ran.
    """
    path, name = choices_file(), _with_threads(name)
    found = None if refresh else _valid(_read(path).get(name), candidates)
    if found is None:
        found = _keep(path, name, time_candidates(name, candidates, flops, mismatch), candidates, refresh)
    return found


def _with_threads(name: str) -> str:
    import torch

    return f"{name}, {torch.get_num_threads()} threads"


def choices_file() -> Path:
    """The file of the choices of this machine."""
    return cache_folder() / f"kernels-{measured_machine()[1]}-{native_build.sources_hash()}.json"


def time_candidates(
    name: str,
    candidates: Candidates,
    flops: float = 0.0,
    mismatch: Callable[[object, object], str | None] | None = None,
) -> TimedChoice:
    """Time the candidates alternately; keeps nothing. Raises RuntimeError if none runs."""
    uncontended = _uncontended()
    seconds, dropped = dict.fromkeys(candidates, math.inf), dict[str, str]()
    reference: object = None

    def call(way: str) -> object:
        began = time.perf_counter()
        result = candidates[way]()
        seconds[way] = min(seconds[way], time.perf_counter() - began)
        return result

    for way in candidates:  # the first call packs, allocates or compiles
        try:
            result = call(way)
            if reference is None:
                reference = result
            elif mismatch is not None and (why := mismatch(reference, result)):
                raise ArithmeticError(f"its result differs: {why}")
            seconds[way] = math.inf
            call(way)
        except Exception as error:  # any kind: a library, a refused instruction, no memory
            dropped[way] = f"{type(error).__name__}: {error}"
            warnings.warn(f"{name}: {way!r} is not used, {dropped[way]}", RuntimeWarning, stacklevel=2)
    running = [way for way in candidates if way not in dropped]
    if not running:
        raise RuntimeError(f"{name}: no candidate runs: {dropped}")
    best = min(seconds[way] for way in running)
    contenders = [way for way in running if seconds[way] <= HOPELESS * best]
    began = time.perf_counter()
    for done in range(MAX_ROUNDS if len(contenders) > 1 else 0):
        if done >= MIN_ROUNDS and time.perf_counter() - began > SECONDS_PER_CHOICE:
            break
        for way in contenders:
            call(way)
    default = running[0]
    winner = min(running, key=lambda way: seconds[way])
    chosen = winner if seconds[winner] * MIN_SPEEDUP < seconds[default] else default
    return TimedChoice(
        chosen, {way: seconds[way] for way in running}, dropped, flops, uncontended, time.time()
    )


def _require(name: str, forced: str, candidates: Candidates) -> None:
    """Raise ConfigError unless the forced candidate exists and runs, which is tried once a process."""
    if forced not in candidates:
        raise ConfigError(
            f"{name}: the choice {forced!r} is impossible",
            expected=one_of(forced, list(candidates)),
            do=REMEDY,
        )
    if (name, forced) in _required:
        return
    try:
        candidates[forced]()
    except Exception as error:
        others = [way for way in candidates if way != forced]
        raise ConfigError(
            f"{name}: the choice {forced!r} is impossible here: {type(error).__name__}: {error}",
            expected=one_of(forced, others),
            do=REMEDY,
        ) from error
    _required.add((name, forced))


def _deterministic() -> bool:
    import torch

    return torch.are_deterministic_algorithms_enabled()


def _uncontended() -> bool:
    """Whether torch's threads have their cores to themselves; measured at most once a minute."""
    import torch

    threads = torch.get_num_threads()
    at, found = _contention.get(threads, (-math.inf, True))
    if time.monotonic() - at > 60.0:
        found = available_core_fraction(threads) > UNCONTENDED_FRACTION
        _contention[threads] = time.monotonic(), found
    return found


_contention: dict[int, tuple[float, bool]] = {}  # number of threads -> when, whether uncontended


def _valid(found: TimedChoice | None, candidates: Candidates) -> TimedChoice | None:
    """Return a kept choice, unless it was among other candidates or has expired."""
    if found is None or {*found.seconds, *found.dropped} != set(candidates) or found.chosen not in candidates:
        return None
    expired = not found.uncontended and time.time() - found.measured_at > CONTENDED_CACHE_SECONDS
    return None if expired else found


def _read(path: Path) -> dict[str, TimedChoice]:
    try:
        return {name: TimedChoice(**kept) for name, kept in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # absent, damaged or of another version
        return {}


def _keep(path: Path, name: str, timed: TimedChoice, candidates: Candidates, refresh: bool) -> TimedChoice:
    """Add a choice to the file and return it, or the one that another process has written in the meantime."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError:  # no writable home: the next process times again
        return timed
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        kept = _read(path)
        if not refresh and (first := _valid(kept.get(name), candidates)) is not None:
            return first
        kept[name] = timed
        write_atomically(path, {key: asdict(value) for key, value in kept.items()})
    return timed
