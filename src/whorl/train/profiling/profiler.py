"""Profile of a training step: the loop of `pretrain`, run for a few steps under torch's profiler.

    3 steps        the first compiles; its excess over a later step is the compile time, reported separately
    N steps        untraced: the step time and the phases of `train_loop`
    N steps        traced: the operators. Tracing adds overhead, mostly on small operators; it is reported

Replicas run as in training, each on its share of the batch, and rank 0 is traced. Peaks are measured before the first
step by all replicas at once, so that they share the machine as the steps do.
"""

from __future__ import annotations

import gzip
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from whorl.machine.device_probe import measure_peaks
from whorl.models import LanguageModel
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.train.job import Job, row_shape
from whorl.train.learner.learner import SharedState
from whorl.train.learner.loop import Stopwatch, train_loop
from whorl.train.lm.batches import job_batches, micro_batches
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.metrics.moe_balance import MoEBalancer
from whorl.train.optim.lr_schedule import lr_scale as schedule_factor
from whorl.train.profiling.operations import Operation, read_operations
from whorl.train.profiling.step_timer import BATCHES, WARMUP_STEPS, random_batch

RANGE = "whorl: "  # prefix of the named ranges
STEP = "step"


@dataclass
class Profile:
    """The result. Times are seconds per step of rank 0, unless noted.

    phases: seconds of untraced steps in each phase of `train_loop`; operations: of traced steps, the longest first;
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
    phases: dict[str, float] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    on_device: bool = False
    trace: str = ""

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's FLOP/s as a fraction of the peak of all replicas."""
        return self.flops_per_second / self.machine_flops

    def share_of_peak(self, operation: Operation) -> float:
        """Return the FLOP/s of an operation as a fraction of the peak of this replica in the job's dtype."""
        return operation.flops / operation.seconds / self.peak_flops[self.dtype]

    def to_json(self) -> dict[str, Any]:
        operations = [{**op.to_json(), "share_of_peak": self.share_of_peak(op)} for op in self.operations]
        return {**asdict(self), "operations": operations, "mfu": self.mfu}


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
    times: list[float] = []
    with _named_kernels() if job.compile else nullcontext():
        moe = MoEBalancer(model, job.routing, process_group)
        learner = build_learner(model, job, shared, process_group, moe, choose_always=True)
        tracer = _Tracer(job, steps) if trace is not None else None
        phases: list[dict[str, float]] = []

        def on_step_end(done: int, metrics: dict[str, float], clock: Stopwatch) -> None:
            moe.on_step_end(done)
            if job.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            phases.append(clock.pop_seconds())
            if tracer is not None:
                tracer.on_step_end(done)

        def lr_factor(step: int) -> float:
            return schedule_factor(min(step, job.steps - 1), job.steps, job.schedule)

        with _open_batches(job, process_group) as records:
            times.append(time.perf_counter())
            train_loop(
                learner,
                records,
                lambda record: [micro_batches(record, job)],
                last=WARMUP_STEPS + 2 * steps,
                lr_scale=lr_factor,
                on_step_end=on_step_end,
                stopwatch=tracer,
            )
    if tracer is None or trace is None:
        return None
    durations = [end - begin for begin, end in pairwise(times)]
    untraced = slice(WARMUP_STEPS, WARMUP_STEPS + steps)
    step = median(durations[untraced])
    tracer.save(trace)
    on_device = job.device == "cuda"
    averages = tracer.profiler.key_averages(group_by_input_shape=True)
    tokens = job.batch_size * job.seq_len / step
    return Profile(
        steps=steps,
        replicas=process_group.size,
        threads=job.threads,
        dtype=job.dtype,
        compiled=job.compile and job.objective == "next_token" and not moe,
        step_seconds=step,
        traced_seconds=next(1e-6 * each.cpu_time for each in averages if each.key == RANGE + STEP),
        compile_seconds=max(0.0, sum(durations[:WARMUP_STEPS]) - WARMUP_STEPS * step),
        tokens_per_second=tokens,
        flops_per_second=tokens * model.flops_per_token(job.seq_len),
        peak_flops=flops,
        bandwidth=bandwidth,
        machine_flops=machine,
        phases={name: median(of_step[name] for of_step in phases[untraced]) for name in phases[-1]},
        operations=read_operations(averages, steps, on_device=on_device),
        on_device=on_device,
        trace=str(trace),
    )


@contextmanager
def _named_kernels() -> Iterator[None]:
    """Compile in the context without caches, so that compile time is complete, and with a range around each C++ kernel."""
    from torch._inductor import config

    settings = {"force_disable_caches": True, "cpp.enable_kernel_profile": True}
    with config.patch(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*force disabled")
        yield


def _open_batches(job: Job, process_group: ProcessGroup) -> Any:
    """This replica's share of the batches, an iterator and a context."""
    if job.tokens or job.stream is not None:
        return job_batches(job, process_group, 0, partial(row_shape, job), None)
    rows = job.batch_size // job.replicas
    made = [random_batch(job, rows, BATCHES * process_group.rank + n) for n in range(BATCHES)]
    return nullcontext(
        cycle({**dict(each), "segment_ids": torch.zeros_like(each["tokens"])} for each in made)
    )


class _Tracer(Stopwatch):
    """A stopwatch that traces the last steps, with a range around each step and each phase."""

    def __init__(self, job: Job, steps: int) -> None:
        super().__init__()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (job.device == "cuda")
        self.profiler = torch_profile(activities=activities, record_shapes=True)
        self.first, self.last = WARMUP_STEPS + steps, WARMUP_STEPS + 2 * steps
        self.step: AbstractContextManager[Any] | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with super().__call__(name), record_function(RANGE + name) if self.step else nullcontext():
            yield

    def on_step_end(self, steps_done: int) -> None:
        if self.step is not None:
            self.step.__exit__(None, None, None)
            self.step = None
        if steps_done == self.first:
            self.profiler.start()
        if self.first <= steps_done < self.last:
            self.step = record_function(RANGE + STEP)
            self.step.__enter__()  # type: ignore[no-untyped-call]
        elif steps_done == self.last:
            self.profiler.stop()

    def save(self, path: Path) -> None:
        """Write the trace."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name("whole-" + path.name.removesuffix(".gz"))
        self.profiler.export_chrome_trace(str(temporary))
        with gzip.open(path, "wb", compresslevel=5) as file:
            file.write(temporary.read_bytes())
        temporary.unlink()
