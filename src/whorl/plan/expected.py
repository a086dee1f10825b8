"""The figures that a plan expects, and the lines that explain them."""

from __future__ import annotations

from typing import Any

from whorl.errors import BudgetError
from whorl.machine.budget import Budget
from whorl.machine.device_probe import Machine
from whorl.plan.accounting.model_cost import TrainingCost, training_cost
from whorl.plan.config import PlanConfig
from whorl.plan.dial.prediction import predict
from whorl.plan.dial.probe import Probe
from whorl.plan.ladder import Candidate
from whorl.plan.laws.law import ScalingLaw, bytes_per_token
from whorl.plan.training_plan import TrainingPlan
from whorl.train.job import Job, first_long_step, last_rows
from whorl.train.profiling.step_timer import StepTiming

# Evaluation, samples, statistics and checkpoints, relative to steps; 0.056 in a quickstart.
LOOP_OVERHEAD = 0.055
# Of a replica in training, beyond a timing: its loaders hold 0.28 GB, and a timing 0.1 GB of its compiler. Measured.
LOADER_BYTES = 0.2e9
MAX_USEFUL_EPOCHS = 4  # up to here repeated text is nearly worth new text (arXiv:2305.16264)


def build_plan(
    config: PlanConfig, machine: Machine, job: Job, corpus_bytes: int, timing: StepTiming | None,
    candidates: list[Candidate], law: ScalingLaw, probe: Probe | None = None,
) -> TrainingPlan:  # fmt: skip
    """Return the plan of a job with its expected figures.

    candidates: of the planner, of which the best twelve are listed. probe: corrects the law.

    Raises:
        BudgetError: weights and optimizer state alone exceed the memory.
    """
    model = job.model
    tokens = job.steps * job.batch_size * job.seq_len
    per_token = bytes_per_token(model.vocab_size)
    cost = training_cost(model, batch_size=job.batch_size, seq_len=job.seq_len, replicas=job.replicas)
    # Settings of pretrain can lower activations, but not the rest.
    resident = cost.peak_memory_bytes - cost.activation_bytes
    if machine.device == "cpu" and resident > machine.ram_bytes:
        raise memory_error(cost, resident, machine)
    flops, longest = cost.token_flops, last_rows(job)
    at_end = training_cost(
        model, batch_size=longest.batch_size, seq_len=longest.seq_len, replicas=job.replicas
    )
    expected: dict[str, int | float] = {
        "parameters": cost.total_params,
        "matrix_parameters": cost.matmul_params,
        "flops_per_token": flops,
        "tokens": tokens,
        "epochs": tokens * per_token / max(1, corpus_bytes),
        "memory_bytes": at_end.peak_memory_bytes,
        "activation_bytes": at_end.activation_bytes,
    }
    if timing is not None:
        if timing.memory_bytes:
            expected["memory_bytes"] = timing.memory_bytes + LOADER_BYTES * job.replicas
        expected |= {"compile_seconds": timing.compile_seconds, "startup_seconds": timing.startup_seconds}
        step_seconds = timing.mean_step_seconds(job.long_ratio)
        expected["seconds"] = timing.startup_seconds + job.steps * step_seconds * (1 + LOOP_OVERHEAD)
        expected["tokens_per_second"] = job.batch_size * job.seq_len / timing.step_seconds
        expected["mfu"] = expected["tokens_per_second"] * flops / machine.peak_flops
    lines = [
        f"machine: {machine.note}",
        f"shape: {model.n_layers} layers x {model.d_model} wide, {model.describe_layers()}, vocabulary {model.vocab_size:,}",
        f"parameters: {cost.block_params:,} in blocks + {cost.head_params:,} in the head (multiplied) "
        f"+ {cost.lookup_params:,} looked up ({model.describe_lookups()})"
        + (f"; {cost.total_params:,} in total with every expert" if model.experts else ""),
        f"FLOPs per token: 6 x {cost.matmul_params:,} + attention = {flops / 1e6:.2f} M (Kaplan et al. 2020)",
        f"step: {job.batch_size} rows x {job.seq_len} tokens over {job.replicas} replicas of {job.threads} thread(s), "
        f"{job.dtype}, {'compiled' if job.compile else 'not compiled'}",
        f"steps: {job.steps:,}; tokens: {tokens:,} = {expected['epochs']:.2f} epochs of {corpus_bytes / 1e6:.1f} MB "
        f"at about {per_token:.2f} bytes per token",
        f"memory: {expected['memory_bytes'] / 1e9:.2f} GB expected peak, {at_end.activation_bytes / 1e9:.2f} GB of it "
        "activations (pretrain.run.activation_budget or pretrain.train.micro_batch_size lower them)",
    ]
    if model.ngram is None and config.model is None:
        lines.append(
            f"no n-gram tables: they would memorize text that is read {expected['epochs']:.1f} times "
            "(plan.ngram_buckets=65536 keeps them)"
        )
    if expected["epochs"] > MAX_USEFUL_EPOCHS:
        smaller = Budget.parse(config.budget).scaled(MAX_USEFUL_EPOCHS / expected["epochs"])
        instead = f"or --budget {smaller}" if config.steps is None else "or fewer plan.steps"
        lines.append(
            f"warning: the text is read {expected['epochs']:.0f} times, and repeated text is worth little beyond "
            f"{MAX_USEFUL_EPOCHS} (Muennighoff et al. 2023); give {tokens * per_token / MAX_USEFUL_EPOCHS / 1e6:.0f} MB of "
            f"text, {instead}"
        )
    lines += _row_and_time_lines(config, machine, job, timing, expected)
    if config.model is None:  # the law is that of the planner's own shapes
        others = (
            [] if config.serve_tokens else candidates
        )  # the choice with tokens to serve is not by the loss alone
        predicted = predict(job, corpus_bytes, law, probe, others)
        expected |= predicted.figures
        lines = [*predicted.warning, *lines, *predicted.lines]
    ranked = sorted(candidates, key=lambda c: c.bits_per_byte)[:12]
    table: list[dict[str, Any]] = [
        {**c.model.model_dump(include={"d_model", "n_layers", "vocab_size"}), "step_seconds": c.step_seconds,
         "steps": c.steps, "bits_per_byte": c.bits_per_byte}
        for c in ranked
    ]  # fmt: skip
    return TrainingPlan(
        job=job, budget=config.budget, expected=expected, arithmetic=lines, candidates=table, probe=probe
    )


def _row_and_time_lines(
    config: PlanConfig,
    machine: Machine,
    job: Job,
    timing: StepTiming | None,
    expected: dict[str, int | float],
) -> list[str]:
    lines = []
    if job.long_ratio:
        long, taken = last_rows(job), ""
        if timing is not None:
            taken = f": {timing.long_step_seconds * 1e3:.1f} in place of {timing.step_seconds * 1e3:.1f} ms"
        how = "compiled" if job.compile and job.compile_long else "not compiled"
        lines.append(
            f"rows at the end: {long.batch_size} of {long.seq_len:,} tokens in the last "
            f"{job.steps - first_long_step(job):,} steps, {how}{taken}"
        )
    if timing is not None:
        mean = timing.mean_step_seconds(job.long_ratio)
        lines += [
            f"time: {timing.startup_seconds:.1f} s to start + {job.steps:,} x {mean * 1e3:.1f} ms "
            f"x {1 + LOOP_OVERHEAD:.3f} = {expected['seconds']:.0f} s of {config.budget}",
            f"speed: {expected['tokens_per_second']:,.0f} tokens/s, {expected['mfu']:.0%} of "
            f"{machine.peak_flops / 1e12:.2f} TFLOP/s measured on this machine",
        ]
    return lines


def memory_error(cost: TrainingCost, needed: float, machine: Machine) -> BudgetError:
    return BudgetError(
        f"training needs {needed / 1e9:,.1f} GB: {cost.total_params:,} parameters, {cost.activation_bytes / 1e9:,.1f} GB of "
        "activations",
        expected=f"at most 60 % of {machine.ram_bytes / 1e9:,.1f} GB of memory, so that other programs have room",
        do="lower plan.d_model, plan.n_layers, plan.vocab_size or plan.ngram_buckets for the parameters, plan.batch_size or "
        "plan.seq_len for the activations",
    )
