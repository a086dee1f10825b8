"""Choice among several ways to compute one product, by timing them on this machine.

    way = fastest("attention 8x3x256x64 bf16", {"blocked": blocked, "native": native}, flops=7e8)

A table of CPUs cannot replace the timing: hypervisors, sandboxes and clocks make instructions slower than their flags
suggest, and the best way changes with the shape. The first candidate is the default: another one must be faster by 3 %. A
candidate that raises is dropped with a warning. Times and choices are kept in `kernels-MACHINE-SOURCES.json` in the cache
folder; MACHINE is the measurement of `device_probe.py`, SOURCES a hash of the package's C++ code. Processes that time the
same product at once all take the choice that was written first.

One setting forces choices, a table [kernels] in a recipe or a variable for any program:

    whorl run quickstart --set kernels.attention=blocked
    WHORL_CHOOSE=attention=blocked,head=512
    WHORL_CHOOSE=cpu=torch              no C++ code; cpu=native: the engine's C++ step without timing
    WHORL_CHOOSE=gpu=torch              no Triton kernel; gpu=triton: one for all shapes that it supports

The name before "=" is one of OPERATIONS, the first word of a choice, or a pattern of whole names (`fnmatch`), as
`whorl machine` lists them, or a device (BACKENDS). A recipe's table is preferred to the variable. A forced choice is part
of no address: it changes the last bits of a result, as the timing does. One that cannot be made is refused, never ignored.

Choices decide bits, and measurements differ when other processes run. Within `recorded_choices` each choice (of a kernel,
the dtype, the number of threads) is made once and kept as a file in a folder. A continued step and all of its child
processes, which inherit the environment, read it there.

The subtle part is when not to time: under torch's deterministic algorithms the default is taken, since timing must not
decide bits. A choice that was timed under contention expires as a measurement does. Call `fastest` once for each shape and
before a compiled region, not inside.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock

from whorl.errors import ConfigError, one_of
from whorl.files import write_atomic
from whorl.machine.device_probe import (
    CONTENDED_CACHE_SECONDS,
    UNCONTENDED_FRACTION,
    cache_folder,
    measured_machine,
)
from whorl.machine.gemm_benchmark import available_core_fraction

FORCE = "WHORL_CHOOSE"
REMEDY = f"remove it from `kernels`, from {FORCE} or from the setting"
OPERATIONS = (
    "attention", "mlp", "linear", "cross_entropy", "head", "update", "adamw", "orthogonalize", "engine_step",
    "rollout_step", "sampling_dtype",
)  # fmt: skip
BACKENDS = {"cpu": ("torch", "native"), "gpu": ("torch", "triton")}  # choices for all operations of a device
VARIABLE = "WHORL_CHOICES"  # the folder of `recorded_choices`, for this process and its children
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
    uncontended: bool = True
    measured_at: float = 0.0  # seconds since 1970


def fastest(name: str, candidates: Candidates, *, flops: float = 0.0) -> str:
    """Return the name of the candidate to use for a product.

    Args:
        name: operation, shape and type, beginning with a word for the operation; torch's number of threads is added.
        candidates: the ways by name, the default first. Each is called several times and must not change its inputs.
        flops: of one call, for the table of `whorl machine`.

    Raises:
        ConfigError: a forced candidate does not exist or cannot run here.
    """
    if not candidates:
        raise ValueError(f"{name}: no candidates")
    if _requests is not None:
        _requests.append(ChoiceRequest(name, candidates, flops))
    key = f"kernel-{sha256(_with_threads(name).encode()).hexdigest()[:16]}"
    if (forced := forced_candidate(name)) is not None:
        _require(name, forced, candidates)
        _record(key, forced)
        return forced
    default = next(iter(candidates))
    if len(candidates) == 1 or _torch().are_deterministic_algorithms_enabled():
        return default
    memo = (_with_threads(name), tuple(candidates), os.environ.get(VARIABLE, ""))
    if memo not in _chosen:
        recorded = choose_once(key, lambda: timed_choice(name, candidates).chosen)
        _chosen[memo] = recorded if recorded in candidates else timed_choice(name, candidates).chosen
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


def timed_choice(name: str, candidates: Candidates, *, refresh: bool = False) -> TimedChoice:
    """Return the kept times of a product, or time the candidates and keep them; arguments as of `fastest`.

    Raises:
        RuntimeError: no candidate ran.
    """
    path, name = choices_file(), _with_threads(name)
    found = None if refresh else _valid(_read(path).get(name), candidates)
    return found or _keep(path, name, time_candidates(name, candidates), candidates, refresh)


def _with_threads(name: str) -> str:
    return f"{name}, {_torch().get_num_threads()} threads"


def _torch() -> Any:
    import torch  # takes seconds

    return torch


def choices_file() -> Path:
    """Return the file of the choices of this machine."""
    return cache_folder() / f"kernels-{measured_machine()[1]}-{sources_hash()}.json"


@cache
def sources_hash() -> str:
    """Hash of all C++ code of the package, which invalidates times that were measured with other code."""
    package = Path(__file__).parents[1]
    sources = sorted(path for kind in ("*.h", "*.cpp") for path in package.rglob(kind))
    return sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:8]


def time_candidates(name: str, candidates: Candidates) -> TimedChoice:
    """Time the candidates alternately; keeps nothing. Raises RuntimeError if none runs."""
    uncontended = _uncontended()
    seconds, dropped = dict.fromkeys(candidates, math.inf), dict[str, str]()

    def call(way: str) -> None:
        began = time.perf_counter()
        candidates[way]()
        seconds[way] = min(seconds[way], time.perf_counter() - began)

    for way in candidates:  # the first call packs, allocates or compiles
        try:
            call(way)
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
    default, winner = running[0], min(running, key=lambda way: seconds[way])
    chosen = winner if seconds[winner] * MIN_SPEEDUP < seconds[default] else default
    return TimedChoice(chosen, {way: seconds[way] for way in running}, dropped, uncontended, time.time())


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
        raise ConfigError(
            f"{name}: the choice {forced!r} is impossible here: {type(error).__name__}: {error}",
            expected=one_of(forced, [way for way in candidates if way != forced]),
            do=REMEDY,
        ) from error
    _required.add((name, forced))


def _uncontended() -> bool:
    """Whether torch's threads have their cores to themselves; measured at most once a minute."""
    threads = _torch().get_num_threads()
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
    with suppress(OSError):  # no writable home: the next process times again
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            kept = _read(path)
            if not refresh and (first := _valid(kept.get(name), candidates)) is not None:
                return first
            kept[name] = timed
            write_atomic(path, json.dumps({key: asdict(value) for key, value in kept.items()}))
    return timed


def forced_choices() -> dict[str, str]:
    """Return the forced choices by operation or pattern of names. A candidate may contain commas.

    Raises:
        ConfigError: a part of WHORL_CHOOSE is no `NAME=CANDIDATE`, or names no operation.
    """
    found, last = dict[str, str](), ""
    for part in filter(None, os.environ.get(FORCE, "").split(",")):
        name, equals, way = (text.strip() for text in part.rpartition("="))
        if last and not equals:
            found[last] += f", {way}"
            continue
        check_forced(FORCE, name, way)
        found[name], last = way, name
    return found


def check_forced(source: str, name: str, way: object) -> None:
    """Raise ConfigError unless a forced choice is text for an operation or a pattern. source: for the message."""
    if not (name and isinstance(way, str) and way) or "=" in name + way:
        given = f"{name} = {way!r}" if name else repr(way)
        raise ConfigError(f"{source} has {given}", expected="NAME=CANDIDATE, separated by commas")
    if name.isidentifier() and name not in (known := (*OPERATIONS, *BACKENDS)):
        raise ConfigError(f"{source} names {name!r}", expected=one_of(name, known))
    if name in BACKENDS and way not in BACKENDS[name]:
        raise ConfigError(f"{source} has {name} = {way!r}", expected=one_of(way, BACKENDS[name]))


def forced_candidate(name: str) -> str | None:
    """Return the candidate that a user requires for a product, or None."""
    forced, operation = forced_choices().items(), name.partition(" ")[0]
    return next((way for pattern, way in forced if pattern == operation or fnmatchcase(name, pattern)), None)


@contextmanager
def force_choices(choices: Mapping[str, str]) -> Iterator[None]:
    """Within the context, force these choices in this process and in the children that it starts."""
    if not choices:
        yield
        return
    merged = {**choices, **{name: way for name, way in forced_choices().items() if name not in choices}}
    with _variable(FORCE, ",".join(f"{name}={way}" for name, way in merged.items())):
        yield


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def refuse_forced(operations: Iterable[str], reason: str, allowed: str = "") -> None:
    """Raise ConfigError if a candidate of these operations is forced where there is no choice.

    reason: for the message. allowed: the candidate that runs without a choice, if it has a name.
    """
    forced = forced_choices()
    for operation in operations:
        way = forced.get(operation)
        if way is not None and way != allowed:
            raise ConfigError(
                f"{operation}: the choice {way!r} is impossible here: {reason}",
                expected=one_of(way, [allowed]) if allowed else "no choice",
                do=REMEDY,
            )


@contextmanager
def recorded_choices(folder: Path) -> Iterator[None]:
    """Within the context, `choose_once` keeps its values in `folder`, or in that of an outer context."""
    with _variable(VARIABLE, os.environ.get(VARIABLE) or str(folder)):
        yield


def choose_once(name: str, choose: Callable[[], Any]) -> Any:
    """Return the recorded value of a choice, or make it and record it. Values are JSON.

    If several processes choose at the same time, all return the value of the first. Outside of `recorded_choices`, or with
    an unreadable record, each call makes the choice.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return choose()
    path = Path(folder) / f"{name}.json"
    if (found := _recorded(path)) is not None:
        return found
    value = choose()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        write_atomic(own, json.dumps(value))
        try:
            os.link(own, path)  # fails if another process was first
        finally:
            own.unlink()
    found = _recorded(path)
    return value if found is None else found


def _record(name: str, value: Any) -> None:
    """Record a choice that was forced, in place of an earlier one; does nothing outside of `recorded_choices`."""
    folder = os.environ.get(VARIABLE)
    if folder and _recorded(path := Path(folder) / f"{name}.json") != value:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(value))


def _recorded(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None
