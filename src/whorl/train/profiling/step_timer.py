"""Timing of training steps before data exists, for the planner.

It uses the learner, replicas and objective of a run, on random ids (their values do not affect the time).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from whorl.machine.malloc import trim_freed_memory
from whorl.machine.memory import memory_in_use
from whorl.nn.compiler import seconds_in_backend
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.tracking.seeds import generator
from whorl.train.determinism import deterministic
from whorl.train.job import Job, last_rows
from whorl.train.learner.learner import SharedState
from whorl.train.learner.update import MicroBatch
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.resilience.oom_advice import is_out_of_memory, suggest

WARMUP_STEPS = 3
BATCHES = 16  # in turn, so that rows of look-up tables come from memory, as in training


@dataclass(frozen=True)
class StepTiming:
    """Seconds of a run.

    Attributes:
        startup_seconds: until the first steps are done (processes, tracing), in a run that finds its kernels compiled.
        step_seconds: median of the steps after them.
        compile_seconds: of compilation in this timing, which later runs do not repeat (`nn/compiler.py`).
        long_step_seconds: median of steps with long rows, 0 for a job without.
        memory_bytes: held by all replicas together after them, 0 if not measured.
    """

    startup_seconds: float
    step_seconds: float
    compile_seconds: float = 0.0
    long_step_seconds: float = 0.0
    memory_bytes: float = 0.0

    def mean_step_seconds(self, long_ratio: float) -> float:
        """Return the mean over a run in which this fraction of the steps has long rows."""
        return self.step_seconds * (1 - long_ratio) + self.long_step_seconds * long_ratio


def time_steps(job: Job, seconds: float = 2.0, warmup: int = WARMUP_STEPS) -> StepTiming:
    """Time steps of `job` for about `seconds`, and three at least, after `warmup` steps.

    Raises:
        OutOfMemoryError: with the settings to reduce.
    """
    try:
        return _time_steps(job, seconds, warmup)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise suggest(error, job) from error


def _time_steps(job: Job, seconds: float, warmup: int) -> StepTiming:
    began = time.perf_counter()
    shared = allocate_shared(build_model(job), job)
    world = spawn_replicas(job.replicas, _replica, job, shared, began, (seconds, warmup))
    try:
        return _measure_with_threads(world, job, shared, began, (seconds, warmup))
    finally:
        world.close()
        del shared
        trim_freed_memory()  # the next job has other shapes


def _replica(
    process_group: ProcessGroup, job: Job, shared: SharedState, began: float, length: tuple[float, int]
) -> None:
    _measure_with_threads(process_group, job, shared, began, length)


def _measure_with_threads(
    process_group: ProcessGroup, job: Job, shared: SharedState, began: float, length: tuple[float, int]
) -> StepTiming:
    threads = torch.get_num_threads()
    if job.device == "cpu":
        torch.set_num_threads(job.threads)
    try:
        return _measure_steps(process_group, job, shared, began, length)
    finally:
        torch.set_num_threads(threads)


def _measure_steps(
    process_group: ProcessGroup, job: Job, shared: SharedState, began: float, length: tuple[float, int]
) -> StepTiming:
    """Return the timing; every rank calls it. `began` is rank 0's clock, which all processes of a machine share."""
    began = began if process_group.shares_memory else time.perf_counter()
    (seconds, warmup), compiling = length, seconds_in_backend()
    with deterministic(job.deterministic):
        learner = build_learner(build_model(job), job, shared, process_group, choose_always=True)
        (update,) = learner.updates
        rows = job.batch_size // job.replicas
        parts = [random_batch(job, rows, BATCHES * process_group.rank + n) for n in range(BATCHES)]
        update.accumulate(update.objective(parts[0]))
        # All ranks compile at once. In a run that does not compile, the slowest of them without it decides.
        own = time.perf_counter() - began - (seconds_in_backend() - compiling)
        slowest = max(rank[0] for rank in process_group.all_gather_scalars(own))
        compile_seconds = time.perf_counter() - began - slowest
        update.step(1e-3)

        def run(parts: list[MicroBatch], n: int) -> None:
            update.accumulate(update.objective(parts[n % len(parts)]))
            update.step(1e-3)
            if job.device != "cpu":
                torch.cuda.synchronize()

        def median_seconds(parts: list[MicroBatch], seconds: float) -> float:
            times: list[float] = []
            started = time.perf_counter()
            # Rank 0 decides when to stop; the all-gather carries its clock, so that all ranks stop at the same step.
            while (
                process_group.all_gather_scalars(time.perf_counter() - started)[0][0] < seconds
                or len(times) < 3
            ):
                begin = time.perf_counter()
                run(parts, len(times))
                times.append(time.perf_counter() - begin)
            return sorted(times)[len(times) // 2]

        for n in range(warmup - 1):
            run(parts, n)
        startup = time.perf_counter() - began - compile_seconds
        step, long = median_seconds(parts, seconds), 0.0
        if job.long_ratio:
            at_end = last_rows(job)
            rows = at_end.batch_size // job.replicas
            parts = [
                random_batch(job, rows, BATCHES * process_group.rank + n, at_end.seq_len) for n in range(4)
            ]
            run(parts, 3)
            long = median_seconds(parts, seconds / 4)
        memory = memory_in_use() if process_group.rank == 0 else 0
        process_group.all_gather_scalars(memory)  # until then, no replica ends
    return StepTiming(startup, step, compile_seconds, long, memory)


def random_batch(job: Job, rows: int, number: int = 0, length: int | None = None) -> MicroBatch:
    """Return a batch of random ids in the loop's format, one document per row.

    number: seeds it. length: of a row; default: the job's.
    """
    length = length or job.seq_len
    ids = torch.randint(
        0, job.model.vocab_size, (rows, length + 1), generator=generator(job.seed, "timing", number)
    ).to(job.device)
    mask = torch.ones(rows, length, dtype=torch.bool, device=job.device)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "loss_mask": mask}
