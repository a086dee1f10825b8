"""Profile of a training step: the loop of `pretrain`, run for a few steps under torch's profiler.

    3 steps        the first compiles; its excess over a later step is the compile time, reported separately
    N steps        untraced: the step time
    N steps        traced: the breakdown. Tracing adds overhead, mostly on small operators; it is reported

Replicas run as in training, each on its share of the batch, and rank 0 is traced. Peaks are measured before the first
step by all replicas at once, so that they share the machine as the steps do.

Ranges are added from outside, on this learner's objects, so models and loop contain no profiling code. Compiled code is
instrumented by `inductor.py`; `trace.py` reads the trace.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from whorl.machine.device_probe import measure_peaks
from whorl.models import LanguageModel
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.train.job import Job, row_shape
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch, train_loop
from whorl.train.lm import objective as language
from whorl.train.lm.batches import job_batches, micro_batches
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.moe_balance import MoEBalancer
from whorl.train.optim.lr_schedule import lr_scale as schedule_factor
from whorl.train.profiling.inductor import KernelInstrumentation
from whorl.train.profiling.native_passes import instrumented_passes
from whorl.train.profiling.step_timer import BATCHES, random_batch
from whorl.train.profiling.trace import PARTS, RANGE, STEP, UNNAMED, OpCost, read_trace

WARMUP_STEPS = 3


@dataclass
class Profile:
    """The result. Times are seconds per step of rank 0, unless noted.

    parts: part -> {"forward", "backward"}; classes: class -> `OpCost`; costs: part -> class -> `OpCost`;
        peak_flops: by dtype, of this replica; machine_flops: of all replicas together, in the job's dtype.
    """

    steps: int
    replicas: int
    threads: int
    dtype: str
    compiled: bool
    step_seconds: float  # median of the untraced steps
    traced_seconds: float
    compile_seconds: float
    tokens_per_second: float  # all replicas
    flops_per_second: float  # of the model's matrix products, all replicas
    peak_flops: dict[str, float]
    bandwidth: float
    machine_flops: float
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    classes: dict[str, OpCost] = field(default_factory=dict)
    costs: dict[str, dict[str, OpCost]] = field(default_factory=dict)
    on_device: bool = False
    trace: str = ""

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's FLOP/s as a fraction of the peak of all replicas."""
        return self.flops_per_second / self.machine_flops

    @property
    def accounted(self) -> float:
        """Fraction of a traced step that is in named parts of the model and the loop."""
        named = (part for part in self.parts if part not in UNNAMED)
        return sum(sum(self.parts[part].values()) for part in named) / self.traced_seconds

    def roofline_seconds(self, kind: str) -> float:
        """Roofline bound of a class in seconds (`bound_seconds`)."""
        return self.bound_seconds(self.classes[kind])

    def bound_seconds(self, cost: OpCost) -> float:
        """Roofline bound in seconds: the longer of arithmetic and memory traffic, each at its peak."""
        return max(cost.flops / self.peak_flops[self.dtype], cost.bytes / self.bandwidth)

    def to_json(self) -> dict[str, Any]:
        classes = {
            kind: {
                **asdict(cost),
                "bound_seconds": self.roofline_seconds(kind),
                "intensity": cost.flops / cost.bytes if cost.bytes else 0.0,
            }
            for kind, cost in self.classes.items()
        }
        return {**asdict(self), "classes": classes, "mfu": self.mfu, "accounted": self.accounted}


def profile(job: Job, trace: Path, *, steps: int = 8) -> Profile:
    """Profile `steps` steps of `job` from its untrained weights; write the trace to `trace` (.json.gz).

    A job without a token set (`tokens` is "") runs on random ids.

    Raises:
        the errors of `pretrain`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # suppresses the tracer's start and stop messages
    model = build_model(job)
    shared = allocate_shared(model, job)
    threads = torch.get_num_threads()
    world = spawn_replicas(job.replicas, _replica, job, shared, steps)
    try:
        found = _run(world, job, model, shared, steps, trace)
    finally:
        world.close()
        torch.set_num_threads(threads)
    assert found is not None
    return found


def _replica(process_group: ProcessGroup, job: Job, shared: SharedState, steps: int) -> None:
    _run(process_group, job, build_model(job), shared, steps, None)


def _run(
    process_group: ProcessGroup,
    job: Job,
    model: LanguageModel,
    shared: SharedState,
    steps: int,
    trace: Path | None,
) -> Profile | None:
    """The part that every replica runs; the one with `trace` set is traced."""
    if job.device == "cpu":
        torch.set_num_threads(job.threads)
    process_group.all_gather_scalars()  # barrier: all replicas measure their peaks at the same time
    flops, bandwidth = measure_peaks(job.device, job.dtype)
    machine = process_group.all_reduce_scalars(flops[job.dtype])[0]
    kernels = KernelInstrumentation()
    watching = trace is not None and job.compile
    times: list[float] = []
    with kernels() if watching else nullcontext(), instrumented_passes(kernels):
        moe = MoEBalancer(model, job.routing, process_group)
        learner = build_learner(model, job, shared, process_group, moe, choose_always=True)
        ranges = ProfilerRanges()
        if trace is not None:
            ranges.instrument(learner, model, process_group)
        tracer = _Tracer(job, ranges, kernels, steps) if trace is not None else None

        def on_step_end(done: int, metrics: dict[str, float], clock: Stopwatch) -> None:
            moe.on_step_end(done)
            if job.device == "cuda":
                torch.cuda.synchronize()
            if tracer is not None:
                tracer.on_step_end(done)
            times.append(time.perf_counter())

        def minibatches(record: Any) -> list[Any]:
            with ranges("data wait"):
                return [micro_batches(record, job)]

        def lr_factor(step: int) -> float:
            return schedule_factor(min(step, job.steps - 1), job.steps, job.schedule)

        with _open_batches(job, process_group) as records:
            times.append(time.perf_counter())
            waiting = ranges.wrap_batches(records)
            train_loop(
                learner,
                waiting,
                minibatches,
                last=WARMUP_STEPS + 2 * steps,
                lr_scale=lr_factor,
                on_step_end=on_step_end,
            )
    if tracer is None or trace is None:
        return None
    durations = [end - begin for begin, end in pairwise(times)]
    untraced = sorted(durations[WARMUP_STEPS : WARMUP_STEPS + steps])
    step = untraced[len(untraced) // 2]
    events = tracer.save(trace)
    reading = read_trace(events, kernels.kernels)
    tokens = job.batch_size * job.seq_len / step
    return Profile(
        steps=steps,
        replicas=process_group.size,
        threads=job.threads,
        dtype=job.dtype,
        compiled=job.compile and job.objective == "next_token" and not moe,
        step_seconds=step,
        traced_seconds=reading.seconds,
        compile_seconds=max(0.0, sum(durations[:WARMUP_STEPS]) - WARMUP_STEPS * step),
        tokens_per_second=tokens,
        flops_per_second=tokens * model.flops_per_token(job.seq_len),
        peak_flops=flops,
        bandwidth=bandwidth,
        machine_flops=machine,
        parts={
            part: {
                name: reading.parts.get((part, back), 0.0)
                for name, back in (("forward", False), ("backward", True))
            }
            for part in PARTS
        },
        classes=reading.classes,
        costs={part: {k: c for (p, k), c in reading.costs.items() if p == part} for part in PARTS},
        on_device=reading.on_device,
        trace=str(trace),
    )


def _open_batches(job: Job, process_group: ProcessGroup) -> Any:
    """This replica's share of the batches, an iterator and a context."""
    if job.tokens or job.stream is not None:
        return job_batches(job, process_group, 0, partial(row_shape, job), None)
    rows = job.batch_size // job.replicas
    made = [random_batch(job, rows, BATCHES * process_group.rank + n) for n in range(BATCHES)]
    return nullcontext(
        cycle({**dict(each), "segment_ids": torch.zeros_like(each["tokens"])} for each in made)
    )


class _Tracer:
    """Starts and stops the profiler and the step ranges."""

    def __init__(self, job: Job, ranges: ProfilerRanges, kernels: KernelInstrumentation, steps: int) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (job.device == "cuda")
        self.profiler = torch_profile(activities=activities, record_shapes=True)
        self.ranges, self.kernels = ranges, kernels
        self.first, self.last = WARMUP_STEPS + steps, WARMUP_STEPS + 2 * steps
        self.step: AbstractContextManager[Any] | None = None

    def on_step_end(self, steps_done: int) -> None:
        if self.step is not None:
            self.step.__exit__(None, None, None)
            self.step = None
        if steps_done == self.first:
            self.ranges.enabled = self.kernels.enabled = True
            self.profiler.start()
        if self.first <= steps_done < self.last:
            self.step = record_function(RANGE + STEP)
            self.step.__enter__()  # type: ignore[no-untyped-call]
        elif steps_done == self.last:
            self.profiler.stop()
            self.ranges.enabled = self.kernels.enabled = False

    def save(self, path: Path) -> list[dict[str, Any]]:
        """Write the trace and return its events."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name("whole-" + path.name.removesuffix(".gz"))
        self.profiler.export_chrome_trace(str(temporary))
        text = temporary.read_bytes()
        with gzip.open(path, "wb", compresslevel=5) as file:
            file.write(text)
        temporary.unlink()
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
        return events


class ProfilerRanges:
    """Ranges around the parts of a step, opened while `enabled` is true."""

    def __init__(self) -> None:
        self.enabled = False

    def __call__(self, part: str) -> AbstractContextManager[Any]:
        return record_function(RANGE + part) if self.enabled else nullcontext()

    def wrap_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, with each wait in a range."""
        while True:
            with self("data wait"):
                record = next(batches)
            yield record

    def instrument(self, learner: Learner, model: LanguageModel, process_group: ProcessGroup) -> None:
        """Wrap the methods of one replica's objects."""
        self._wrap_method(process_group, "all_gather_scalars", "all-gather")
        self._wrap_method(model, "prepare", "embed")
        for update in learner.updates:
            self._wrap_method(update, "accumulate", "gradient accumulation")
            self._wrap_method(update, "step", "optimizer")
            objective = update.objective
            if isinstance(objective, LMObjective):  # compiled code is instrumented by `inductor.py`
                plain, compiled = objective._loss, objective.compiled_loss != objective._loss
                instrumented = self._instrumented_loss(plain, model)
                objective._loss = instrumented  # type: ignore[method-assign]
                objective.compiled_loss = objective.compiled_loss if compiled else instrumented

    def _wrap_method(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def run(*arguments: Any, **named: Any) -> Any:
            with self(part):
                return inner(*arguments, **named)

        object.__setattr__(owner, name, run)

    def _instrumented_loss(self, loss: Callable[..., Any], model: LanguageModel) -> Callable[..., Any]:
        """Return the uncompiled loss with ranges inside.

        They are removed after each call, or compiled code would trace them.
        """

        def run(*arguments: Any, **named: Any) -> Any:
            if not self.enabled:
                return loss(*arguments, **named)
            with self._instrumented_model(model):
                return loss(*arguments, **named)

        return run

    @contextmanager
    def _instrumented_model(self, model: LanguageModel) -> Iterator[None]:
        trunk, next_token = model.trunk, vars(language)["next_token"]

        def ranged(function: Callable[..., Any], part: str) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                with self(part):
                    return function(*arguments, **named)

            return run

        hooks: list[Any] = []
        for module, part in _module_parts(model):
            open_: list[Any] = []

            def enter(*_: Any, part: str = part, open_: list[Any] = open_) -> None:
                open_.append(self(part))
                open_[-1].__enter__()

            def leave(*_: Any, open_: list[Any] = open_) -> None:
                open_.pop().__exit__(None, None, None)

            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        object.__setattr__(model, "trunk", ranged(trunk, "norms, residuals"))
        vars(language)["next_token"] = ranged(next_token, "head, loss")
        try:
            yield
        finally:
            object.__delattr__(model, "trunk")
            vars(language)["next_token"] = next_token
            for hook in hooks:
                hook.remove()


def _module_parts(model: LanguageModel) -> Iterable[tuple[nn.Module, str]]:
    for block in model.blocks:
        for name, child in block.named_children():
            if name in ("attention", "mixer"):
                yield child, "attention"
            elif name == "mlp":
                yield child, "MLP, experts"
