"""Timing of training steps before data exists, for the planner.

It uses the learner, replicas and objective of a run, on random ids (their values do not affect the time).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from whorl.machine.malloc import trim_freed_memory
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.tracking.seeds import generator
from whorl.train.determinism import deterministic
from whorl.train.job import Job
from whorl.train.learner.learner import SharedState
from whorl.train.learner.update import MicroBatch
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.resilience.oom_advice import is_out_of_memory, suggest

WARMUP_STEPS = 3


@dataclass(frozen=True)
class StepTiming:
    """startup_seconds: until the first steps are done (processes, compilation); step_seconds: median of the rest."""

    startup_seconds: float
    step_seconds: float


def time_steps(job: Job, seconds: float = 2.0) -> StepTiming:
    """Time steps of `job` for about `seconds` after the first few.

    Raises:
        OutOfMemoryError: with the settings to reduce.
    """
    try:
        return _time_steps(job, seconds)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise suggest(error, job) from error


def _time_steps(job: Job, seconds: float) -> StepTiming:
    began = time.perf_counter()
    shared = allocate_shared(build_model(job), job)
    world = spawn_replicas(job.replicas, _replica, job, shared, seconds)
    try:
        times, startup = _measure_with_threads(world, job, shared, seconds)
    finally:
        world.close()
        del shared
        trim_freed_memory()  # the next job has other shapes
    return StepTiming(startup - began, sorted(times)[len(times) // 2])


def _replica(process_group: ProcessGroup, job: Job, shared: SharedState, seconds: float) -> None:
    _measure_with_threads(process_group, job, shared, seconds)


def _measure_with_threads(
    process_group: ProcessGroup, job: Job, shared: SharedState, seconds: float
) -> tuple[list[float], float]:
    threads = torch.get_num_threads()
    if job.device == "cpu":
        torch.set_num_threads(job.threads)
    try:
        return _measure_steps(process_group, job, shared, seconds)
    finally:
        torch.set_num_threads(threads)


def _measure_steps(
    process_group: ProcessGroup, job: Job, shared: SharedState, seconds: float
) -> tuple[list[float], float]:
    with deterministic(job.deterministic):
        (update,) = build_learner(build_model(job), job, shared, process_group).updates
        rows = job.batch_size // job.replicas
        part = random_batch(job, rows)
        for _ in range(WARMUP_STEPS):
            update.accumulate(update.objective(part))
            update.step(1e-3)
        started = time.perf_counter()
        times: list[float] = []
        # Rank 0 decides when to stop; the all-gather carries its clock, so that all ranks stop at the same step.
        while (
            process_group.all_gather_scalars(time.perf_counter() - started)[0][0] < seconds or len(times) < 3
        ):
            begin = time.perf_counter()
            update.accumulate(update.objective(part))
            update.step(1e-3)
            times.append(time.perf_counter() - begin)
        return times, started


def random_batch(job: Job, rows: int) -> MicroBatch:
    """Return a batch of random ids in the loop's format, one document per row."""
    ids = torch.randint(
        0, job.model.vocab_size, (rows, job.seq_len + 1), generator=generator(job.seed, "timing")
    ).to(job.device)
    mask = torch.ones(rows, job.seq_len, dtype=torch.bool, device=job.device)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "loss_mask": mask}
