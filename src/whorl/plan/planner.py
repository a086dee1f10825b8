"""The planner: from a budget to a model, a vocabulary and a number of steps.

1. Take a ladder of shapes (`ladder.py`) up to where FLOPs alone leave too few steps, or memory does not suffice.
2. Time two shallow networks of one width on this machine (uncompiled, one replica's share), which gives its step at any
   depth. Start at the width that looks best. Then time the best one by these timings and the next wider one.
3. For each shape and vocabulary, compute the text seen within the budget, and the expected bits per byte by the fitted
   scaling law. Choose the lowest; of those that the law cannot distinguish, one with the largest vocabulary.
4. Time the chosen shape as it will run, with all replicas, compiled; uncompiled where that may be faster. The number of
   steps fills the budget, including start-up, evaluation and checkpoints.

Planning is not part of the budget. Step 2 ends at SHAPES_SHARE of it, and the kernels of step 4 stay compiled for the run
and for later runs (`nn/compiler.py`). A budget of FLOPs fixes the steps of each shape, so step 2 times nothing.

With a model given in the recipe (`model`) only step 4 runs. With `deterministic` nothing is timed: the law and the FLOPs
decide, for a budget of FLOPs.

The number of steps is fixed here. Training never reads a clock, so a run is repeatable to the bit. If the machine slows
down later, the run takes longer than planned.
"""

from __future__ import annotations

import shutil

from whorl.errors import BudgetError, ConfigError
from whorl.machine.budget import Budget
from whorl.machine.device_probe import Machine, usable_cores
from whorl.models import TransformerConfig
from whorl.parallel.process_group import launched_ranks
from whorl.plan.accounting.model_cost import TrainingCost, training_cost
from whorl.plan.config import PlanConfig
from whorl.plan.expected import LOOP_OVERHEAD, build_plan, memory_error
from whorl.plan.ladder import VOCAB_SIZES, Candidate, Shape, StepTimes, choose_candidate, ladder, shape_model
from whorl.plan.training_plan import Evidence, TrainingPlan
from whorl.tracking.progress import Progress
from whorl.train.config import OptimConfig
from whorl.train.job import LONG_FACTOR, Job
from whorl.train.profiling.step_timer import StepTiming, time_steps

# Compiled / uncompiled step time, for ranking only; the chosen shape is timed. On a GPU of launches (LOG.md).
COMPILED_TIME_RATIO = {"cpu": 0.72, "cpu float32": 0.9, "cuda": 0.28}
SHAPES_SHARE = 0.03  # of a budget of seconds, after which no further width is timed
CHOSEN_SHARE = 0.007  # of a budget of seconds, for timed steps of the chosen shape, without its start
PEAK_SHARE = 0.2  # of the peak, assumed before the first timing; decides only the width that is timed first
# Rows of the evaluation window at the end of a run: 1.4 % fewer bits per byte for 0.1 of the steps (LOG.md).
LONG_RATIO = 0.1
MIN_LONG_STEPS = 200  # of a run with long rows; 1,200 steps gain by them, and shorter runs were not measured
MIN_STEPS = 20
MIN_LADDER_STEPS = 400  # of a shape that is a candidate
MIN_COMPILE_BUDGET = 120.0  # seconds; in a shorter run compiling takes longer than it saves
UNTIMED_SLOWDOWN = 1.15  # at least, by other replicas of an uncompiled step: they wait, and share caches
MIN_COMPILE_LONG_BUDGET = 1200.0  # the same for steps with long rows: a tenth of the steps
# For a network without query and key norms and with a small initial embedding. The default rates reach 3.75 nats after
# 1,000 steps, these 2.90 (LOG.md).
LLAMA_OPTIM = OptimConfig(lr_muon=0.01, lr_embedding=0.02)


def make_plan(
    config: PlanConfig, machine: Machine, corpus_bytes: int, progress: Progress, evidence: Evidence | None = None
) -> TrainingPlan:  # fmt: skip
    """Choose a training run for a budget (see the top of this file).

    Args:
        corpus_bytes: size of the training split, for the number of epochs.
        evidence: default: the shipped law.

    Raises:
        BudgetError: the budget buys fewer than MIN_STEPS steps of the smallest shape.
    """
    budget, evidence = Budget.parse(config.budget), evidence or Evidence()
    replicas = config.replicas or _choose_replicas(config, machine)
    if config.steps is not None:
        model = _fixed_model(config, corpus_bytes)
        job = _build_job(config, model, machine, replicas, config.steps, compile=bool(config.compile))
        return build_plan(config, machine, job, corpus_bytes, None, [], evidence.law)
    candidates: list[Candidate] = []
    chosen: TransformerConfig
    uncompiled: float | None = None
    if config.model is not None:
        chosen = _fixed_model(config, corpus_bytes)
        _check_budget(config, budget, machine, chosen, replicas)
    else:
        ranked = _rank_candidates(config, machine, replicas, budget, corpus_bytes, progress, evidence)
        candidates, best, is_timed = ranked
        ratio = _compiled_time_ratio(config, machine)
        chosen, uncompiled = best.model, best.step_seconds / ratio if is_timed else None
    timing: StepTiming | None = None
    if config.deterministic:
        job = _build_job(config, chosen, machine, replicas, compile=bool(config.compile))
    else:
        job, timing = _choose_compilation(config, chosen, machine, replicas, budget, uncompiled, progress)
    step_flops = _step_flops(config, _cost(config, chosen, replicas))
    if budget.seconds is not None and timing is not None:
        usable = budget.seconds - timing.startup_seconds
        steps = int(usable / (timing.mean_step_seconds(job.long_ratio) * (1 + LOOP_OVERHEAD)))
        job = job.model_copy(update={"seconds": budget.seconds})
    else:
        steps = int((budget.flops or 0.0) / step_flops)
    if steps < MIN_STEPS:
        details, least = "", f"{1.05 * MIN_STEPS * step_flops:.1e}flops"
        if timing is not None:
            details = (
                f" ({timing.startup_seconds:.1f} s to start, {timing.step_seconds * 1e3:.0f} ms per step)"
            )
            least = f"{int(timing.startup_seconds + MIN_STEPS * timing.step_seconds * 1.2) + 1}s"
        raise _budget_error(config, steps, details, least)
    long_ratio = _choose_long_ratio(config, machine, replicas, steps) if job.long_ratio else 0.0
    job = job.model_copy(update={"steps": steps, "long_ratio": long_ratio})
    probe = evidence.probe(job, timing) if evidence.probe is not None and config.model is None else None
    return build_plan(config, machine, job, corpus_bytes, timing, candidates, evidence.law, probe)


def _check_budget(
    config: PlanConfig, budget: Budget, machine: Machine, model: TransformerConfig, replicas: int
) -> None:
    """Raise BudgetError, before anything is timed, for too few FLOPs, or seconds too short even at the machine's peak."""
    flops = _step_flops(config, _cost(config, model, replicas))
    if budget.flops is not None and budget.flops < MIN_STEPS * flops:
        raise _budget_error(config, int(budget.flops / flops), "", f"{1.05 * MIN_STEPS * flops:.1e}flops")
    seconds = flops / machine.peak_flops
    if budget.seconds is not None and budget.seconds < MIN_STEPS * seconds:
        details = f" at its peak of {machine.peak_flops / 1e9:,.0f} GFLOP/s"
        raise _budget_error(config, int(budget.seconds / seconds), details, f"{3 * MIN_STEPS * seconds:.0f}s")


def _budget_error(config: PlanConfig, steps: int, details: str, least: str) -> BudgetError:
    description = "this model" if config.model is not None else "the smallest model"
    return BudgetError(
        f"a budget of {config.budget} buys {max(0, steps)} steps of {description} on this machine{details}",
        expected=f"at least {MIN_STEPS} steps",
        do=f"give at least --budget {least}",
    )


def _choose_replicas(config: PlanConfig, machine: Machine) -> int:
    if machine.device != "cpu":
        return 1
    limit = launched_ranks() or (usable_cores() if config.deterministic else machine.threads)
    return max(n for n in range(1, limit + 1) if config.data.batch_size % n == 0)


def _fixed_model(config: PlanConfig, corpus_bytes: int) -> TransformerConfig:
    if config.model is not None:
        return TransformerConfig.model_validate(config.transformer_fields())
    vocabulary = config.vocab_size or 1024
    shape = config.d_model or 128, config.n_layers or 4
    return shape_model(config, shape, vocabulary, config.steps or 0, corpus_bytes)


def _build_job(
    config: PlanConfig, model: TransformerConfig, machine: Machine, replicas: int, steps: int | None = None, *, compile: bool
) -> Job:  # fmt: skip
    """Return the job; steps: None if they follow from a timing."""
    rates, long_ratio = LLAMA_OPTIM, 0.0
    if config.model is None:
        rates, model = OptimConfig(), model.model_copy(update={"trained_length": config.data.seq_len})
        long_ratio = _choose_long_ratio(config, machine, replicas, steps)
    overrides = {} if config.optim is None else config.optim.model_dump(exclude_unset=True)
    seconds = Budget.parse(config.budget).seconds if config.steps is None else None
    return Job(
        tokens="", model=model, optim=rates.model_copy(update=overrides), routing=config.routing, steps=steps or 1,
        seq_len=config.data.seq_len, batch_size=config.data.batch_size, long_ratio=long_ratio, seed=config.seed,
        replicas=replicas, threads=1 if config.deterministic else max(1, machine.threads // replicas), compile=compile,
        device=machine.device, dtype=_choose_dtype(config, machine), deterministic=config.deterministic,
        compile_long=long_ratio > 0 and (seconds or 0.0) >= MIN_COMPILE_LONG_BUDGET,
    )  # fmt: skip


def _choose_long_ratio(config: PlanConfig, machine: Machine, replicas: int, steps: int | None) -> float:
    """Return the fraction of steps with long rows. None on a GPU, where uncompiled steps take five times as long.

    Raises:
        ConfigError: a given fraction, and long rows that the replicas cannot share.
    """
    divides = config.data.batch_size % (LONG_FACTOR * replicas) == 0
    if config.long_ratio and not divides:
        raise ConfigError(
            f"plan.long_ratio is {config.long_ratio:g} with plan.data.batch_size {config.data.batch_size}",
            expected=f"a batch size that {LONG_FACTOR} x {replicas} replicas divide: long rows are as many times fewer",
            do="change the batch size, or set plan.long_ratio=0",
        )
    if config.long_ratio is not None:
        return config.long_ratio
    is_useful = steps is None or steps >= MIN_LONG_STEPS
    return LONG_RATIO if is_useful and divides and machine.device == "cpu" else 0.0


def _choose_dtype(config: PlanConfig, machine: Machine) -> str:
    """Return the faster type; if nothing may be timed, the usual type of the device."""
    return (machine.without_measured_choices() if config.deterministic else machine).dtype


def _compiled_time_ratio(config: PlanConfig, machine: Machine) -> float:
    kind = f"{machine.device} {_choose_dtype(config, machine)}"
    return COMPILED_TIME_RATIO.get(kind, COMPILED_TIME_RATIO[machine.device])


def _cost(config: PlanConfig, model: TransformerConfig, replicas: int) -> TrainingCost:
    return training_cost(
        model, batch_size=config.data.batch_size, seq_len=config.data.seq_len, replicas=replicas
    )


def _step_flops(config: PlanConfig, cost: TrainingCost) -> float:
    return cost.token_flops * config.data.batch_size * config.data.seq_len


def _ladder_costs(
    config: PlanConfig, machine: Machine, replicas: int, budget: Budget
) -> dict[Shape, TrainingCost]:
    """Return the shapes that the budget may buy, with their costs at a vocabulary of `config.vocab_size` or 1,024."""
    flops = budget.flops or (budget.seconds or 0.0) * machine.peak_flops * 0.5
    kept: dict[Shape, TrainingCost] = {}
    for width, depth in ladder():
        shape = config.d_model or width, config.n_layers or depth
        model = shape_model(config, shape, config.vocab_size or 1024)
        cost = _cost(config, model, replicas)
        if cost.peak_memory_bytes >= 0.6 * machine.ram_bytes:
            if not kept:
                raise memory_error(cost, cost.peak_memory_bytes, machine)
            break
        # With fewer steps the law would extrapolate too far; the smallest shape always stays.
        if kept and flops / _step_flops(config, cost) <= MIN_LADDER_STEPS:
            break
        kept[shape] = cost
        if config.d_model and config.n_layers:
            break
    return kept


def _rank_candidates(
    config: PlanConfig, machine: Machine, replicas: int, budget: Budget, corpus_bytes: int, progress: Progress,
    evidence: Evidence,
) -> tuple[list[Candidate], Candidate, bool]:  # fmt: skip
    """Return every shape with every vocabulary, the best one, and whether a shape was timed."""
    costs = _ladder_costs(config, machine, replicas, budget)
    smallest = shape_model(config, next(iter(costs)), config.vocab_size or VOCAB_SIZES[0])
    _check_budget(config, budget, machine, smallest, replicas)
    rows = config.data.model_copy(update={"batch_size": max(1, config.data.batch_size // replicas)})
    share = config.model_copy(update={"data": rows})

    ratio = _compiled_time_ratio(config, machine)

    def measure(width: int, depth: int) -> float:
        model = shape_model(config, (width, depth), config.vocab_size or 1024)
        job = _build_job(share, model, machine, 1, 1, compile=False).model_copy(update={"threads": 1})
        return time_steps(job, seconds=0.3, warmup=1).step_seconds * ratio

    flops = {shape: _step_flops(config, cost) for shape, cost in costs.items()}
    times = StepTimes(flops, measure, PEAK_SHARE * machine.peak_flops, launch_bound=machine.device != "cpu")
    found, best = choose_candidate(config, budget, corpus_bytes, costs, times, evidence.law)
    if budget.seconds is None or config.deterministic:
        return found, best, False
    with progress.task("Timing shapes", total=None) as task:
        while True:
            width = times.next_width((best.model.d_model, best.model.n_layers))
            if width is None or (times.timed and task.seconds > SHAPES_SHARE * budget.seconds):
                return found, best, True
            times.time_width(width)
            fixed, layer = times.timed[width]
            task.update(note=f"{width} wide: {fixed * 1e3:.0f} ms and {layer * 1e3:.0f} ms per layer")
            found, best = choose_candidate(config, budget, corpus_bytes, costs, times, evidence.law)


def _choose_compilation(
    config: PlanConfig, model: TransformerConfig, machine: Machine, replicas: int, budget: Budget,
    uncompiled: float | None, progress: Progress,
) -> tuple[Job, StepTiming]:  # fmt: skip
    """Time the chosen model as it will run, and choose whether to compile.

    uncompiled: seconds of an uncompiled step by the timed shapes, without the overhead of replicas; None if unknown.
    """
    plain = _build_job(config, model, machine, replicas, compile=False)
    seconds = max(0.5, CHOSEN_SHARE * (budget.seconds or 300.0))
    worthwhile = config.compile or budget.seconds is None or budget.seconds >= MIN_COMPILE_BUDGET
    options: list[tuple[Job, StepTiming]] = []
    with progress.task("Timing the chosen shape", total=None) as task:
        if config.compile is not False and worthwhile and can_compile():
            task.update(note="compiled (compiling)")
            compiled = plain.model_copy(update={"compile": True})
            options.append((compiled, time_steps(compiled, seconds=seconds)))
        slower = UNTIMED_SLOWDOWN if replicas > 1 else 1.0
        is_faster = options and uncompiled is not None and options[0][1].step_seconds < slower * uncompiled
        if config.compile is not True and not is_faster:
            task.update(note="uncompiled")
            options.append((plain, time_steps(plain, seconds=seconds)))
        if not options:
            raise BudgetError(
                "compile=true, but no C++ compiler was found", do="install g++, or omit compile"
            )

        def steps(timing: StepTiming) -> float:
            return ((budget.seconds or 1e9) - timing.startup_seconds) / timing.mean_step_seconds(
                plain.long_ratio
            )

        return max(options, key=lambda option: steps(option[1]))


def can_compile() -> bool:
    """Return whether torch.compile finds a C++ compiler."""
    return any(shutil.which(name) for name in ("g++", "c++", "clang++"))
