"""The planner: filled budgets, explained arithmetic, and errors for impossible requests."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from whorl.errors import BudgetError, ConfigError
from whorl.machine.budget import Budget
from whorl.machine.device_probe import Machine
from whorl.models import TransformerConfig
from whorl.models.transformer_config import AttentionConfig
from whorl.plan import expected, planner
from whorl.plan.accounting.model_cost import decoder_config, training_cost
from whorl.plan.config import PlanConfig
from whorl.plan.forecast import RunInputs, forecast
from whorl.plan.laws.law import bytes_per_token, fitted_law
from whorl.plan.training_plan import Evidence, TrainingPlan
from whorl.recipes import load_recipe
from whorl.recipes.steps.pretrain.plan import with_first_step
from whorl.report.training import plan_table
from whorl.tracking.progress import Progress
from whorl.train.config import OptimConfig
from whorl.train.job import Job
from whorl.train.profiling.step_timer import StepTiming, time_steps

MACHINE = Machine(
    device="cpu", dtype="float32", threads=2, flops={"float32": 2e11, "bfloat16": 1e11}, memory_bandwidth=1e10,
    cpu="test", cores=2, ram_bytes=16 << 30, gpu="", note="a test machine",
)  # fmt: skip


def fake_step_timing(job: Job, seconds: float = 0.0, warmup: int = 0) -> StepTiming:
    """Return step times of a machine with 1e11 FLOP/s and 10 ms overhead per step."""
    cost = training_cost(job.model, batch_size=job.batch_size, seq_len=job.seq_len, replicas=1)
    flops = cost.token_flops * job.batch_size * job.seq_len
    startup, factor = (8.0, 0.7) if job.compile else (2.0, 1.0)
    seconds = (0.01 + flops / 1e11) * factor
    return StepTiming(startup, seconds, long_step_seconds=1.5 * seconds if job.long_ratio else 0.0)


@pytest.fixture(autouse=True)
def fake_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "time_steps", fake_step_timing)


def forbid_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "time_steps", lambda *_, **__: pytest.fail("timed"))


def plan(
    machine: Machine = MACHINE, measure: Any = None, corpus_bytes: int = 30_000_000, **config: object
) -> TrainingPlan:
    settings = PlanConfig.model_validate(config)
    return planner.make_plan(settings, machine, corpus_bytes, Progress.silent(), Evidence(probe=measure))


def test_plan_fills_time_budget() -> None:
    for budget, seconds in (("60s", 60), ("5m", 300), ("1h", 3600)):
        made = plan(budget=budget)
        assert made.expected["seconds"] == pytest.approx(seconds, rel=0.02)
        job = made.job
        assert made.expected["tokens"] == job.steps * job.batch_size * job.seq_len
        assert made.vocab_size == job.model.vocab_size
        assert any("FLOPs per token" in line for line in made.arithmetic)
        assert TrainingPlan.model_validate_json(made.model_dump_json()) == made


def test_plan_ends_with_long_rows_where_they_are_possible() -> None:
    made = plan(budget="5m")
    assert made.job.long_ratio == planner.LONG_RATIO
    assert any("2 of 1,024 tokens in the last" in line for line in made.arithmetic)
    for change in ({"steps": planner.MIN_LONG_STEPS - 1}, {"data": {"batch_size": 4}}, {"model": LLAMA}):
        assert plan(**{"budget": "5m", **change}).job.long_ratio == 0
    assert plan(replace(MACHINE, device="cuda"), budget="1e14flops").job.long_ratio == 0
    assert plan(budget="5m", long_ratio=0.0).job.steps > made.job.steps
    assert [plan(budget=budget).job.compile_long for budget in ("5m", "1h")] == [False, True]
    assert plan(steps=10, long_ratio=0.3).job.long_ratio == 0.3
    with pytest.raises(ConfigError, match=r"long_ratio is 0\.3 with plan\.data\.batch_size 4"):
        plan(steps=10, long_ratio=0.3, data={"batch_size": 4})
    with pytest.raises(ValueError, match="long_ratio: longer rows need the planner's own network"):
        PlanConfig.model_validate({"model": LLAMA, "long_ratio": 0.1})


def test_expected_loss_names_the_text_of_the_law() -> None:
    made = plan(budget="5m")
    (line,) = [line for line in made.arithmetic if "bits per byte" in line]
    assert f"about {made.expected['bits_per_byte']:.2f} bits" in line
    assert "like Python's standard library" in line and "other text may differ" in line
    assert plan_table(made.expected).rows[-1][0] == "bits per byte, test files"
    other = plan(budget="5m", model=LLAMA)  # the law does not hold for it
    assert "bits_per_byte" not in other.expected and "bits per byte" not in "".join(other.arithmetic)


def test_plan_fills_flop_budget() -> None:
    made = plan(budget="1e14flops")
    assert made.expected["tokens"] * made.expected["flops_per_token"] == pytest.approx(1e14, rel=0.01)


def test_plan_keeps_given_values_and_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(vocab_size=2048, d_model=128, n_layers=2)
    assert (made.vocab_size, made.job.model.d_model, made.job.model.n_layers) == (2048, 128, 2)
    forbid_timing(monkeypatch)
    assert plan(steps=7, d_model=64).job.steps == 7


def test_plan_rejects_too_small_budget_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "time_steps", lambda *_, **__: StepTiming(5.5, 0.1, 0.0, 0.1))
    with pytest.raises(BudgetError, match=r"a budget of 6s buys 4 steps .*5\.5 s to start(.|\n)*--budget 8s"):
        plan(budget="6s")
    forbid_timing(monkeypatch)
    slow = replace(MACHINE, flops={"float32": 1e9})
    for model in ({}, {"model": LLAMA | {"d_model": 256}}):
        with pytest.raises(
            BudgetError, match=r"a budget of 6s buys \d+ steps .*at its peak(.|\n)*--budget \d+s"
        ):
            plan(slow, budget="6s", **model)
    with pytest.raises(ValueError, match="at least 5s"):
        PlanConfig(budget="1s")


def test_short_budget_is_not_spent_on_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [plan(budget=budget).job.compile for budget in ("60s", "5m")] == [False, True]
    assert plan(budget="60s", compile=True).job.compile


@pytest.mark.parametrize(
    ("budget", "n_widths", "n_timed"), [("20s", 1, 3), ("1h", 2, 5), ("1e15flops", 0, 2)]
)
def test_few_shallow_networks_are_timed(
    budget: str, n_widths: int, n_timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two depths of each width, and the chosen shape, uncompiled only if that may be faster."""
    timed: list[Job] = []

    def time_and_record(job: Job, **options: Any) -> StepTiming:
        timed.append(job)
        slow = 1.0 if job.compile else 4.0
        return replace(fake_step_timing(job), step_seconds=slow * fake_step_timing(job).step_seconds)

    monkeypatch.setattr(planner, "time_steps", time_and_record)
    monkeypatch.setattr(planner, "SHAPES_SHARE", 0.0 if budget == "20s" else 1.0)
    made = plan(budget=budget)
    shallow = [job.model for job in timed if job.replicas == 1]
    assert [m.n_layers for m in shallow] == [1, 3] * n_widths
    assert len({m.d_model for m in shallow}) == n_widths and len(timed) == n_timed
    chosen = [job.compile for job in timed if job.replicas > 1]
    assert timed[-1].model == made.job.model and made.job.compile == (budget != "20s")
    assert chosen == {"20s": [False], "1h": [True], "1e15flops": [True, False]}[budget]


@pytest.mark.parametrize(
    ("factor", "replicas", "uncompiled"), [(1.0, 2, False), (1.2, 2, True), (1.1, 1, True)]
)
def test_uncompiled_step_is_timed_where_it_may_be_faster(
    factor: float, replicas: int, uncompiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """factor: time of the compiled step of all replicas, relative to the uncompiled one of one replica."""
    timed: list[bool] = []

    def time_steps(job: Job, **_: Any) -> StepTiming:
        timed.append(job.compile)
        return StepTiming(1.0, factor if job.compile else 1.0)

    monkeypatch.setattr(planner, "time_steps", time_steps)
    config = PlanConfig(budget="5m")
    model = decoder_config(64, 1, 512)
    planner._choose_compilation(config, model, MACHINE, replicas, Budget.parse("5m"), 1.0, Progress.silent())
    assert timed == [True, False][: 1 + uncompiled]


def test_plan_shows_time_to_first_training_step() -> None:
    timed = plan(budget="5m")
    made = with_first_step(timed, before=12.0, now=40.0, corpus_bytes=30_000_000)
    startup = timed.expected["startup_seconds"]
    assert made.expected["first_step_seconds"] == 40.0 + 2 * 0.1 * 30 + startup
    planning, first = made.arithmetic[-2:]
    assert planning.startswith("planning: 28 s = 9% of the budget") and f"{startup:.0f} s to start" in first
    assert plan_table(made.expected).rows[0][0] == "start of the run to the first training step"
    assert "startup_seconds" not in plan(budget="1e14flops", deterministic=True).expected


RECIPE = load_recipe("quickstart")
KNOWN = RunInputs(
    {"seconds": 300.0, "tokens_per_second": 31_167.0}, train_bytes=27.5e6, test_bytes=1e6, task_bytes=5.9e5,
    test_tasks=128, cores=2,
)  # fmt: skip


def test_forecast_is_near_a_measured_run() -> None:
    """Seconds of each step of a quickstart on two cores."""
    measured = {
        "tokenizer": 2, "tokens": 1, "pretrain": 326, "evaluate": 31, "sft": 26, "rl": 93, "report": 0,
    }  # fmt: skip
    found = forecast({name: (name, RECIPE.steps[name].config) for name in measured}, KNOWN)
    assert all(found[name] == pytest.approx(measured[name], rel=0.35, abs=3) for name in measured)
    half = replace(KNOWN, expected={**KNOWN.expected, "tokens_per_second": 15_583.0})
    assert forecast({"rl": ("rl", RECIPE.steps["rl"].config)}, half)["rl"] > 1.9 * found["rl"]


@pytest.mark.parametrize(("suite", "measured"), [("probes", 1.7), ("jailbreak", 11.0)])
def test_forecast_counts_what_a_suite_sends(suite: str, measured: float) -> None:
    """Seconds of 100 items of each task on two cores, in a quickstart with a budget of 20 s."""
    known = replace(KNOWN, expected={"seconds": 20.0, "tokens_per_second": 60_800.0})
    config = RECIPE.steps["evaluate"].config

    def seconds(**settings: Any) -> float:
        return float(forecast({"it": ("evaluate", config.model_copy(update=settings))}, known)["it"] or 0)

    without = seconds(items=0)
    found = seconds(suite=suite, items=100) - without
    assert measured / 1.5 < found < 1.5 * measured
    assert seconds(suite=suite, items=10) - without < 0.2 * found
    assert seconds(suite="no-such-suite") == without


def test_forecast_names_what_it_cannot_estimate() -> None:
    config = RECIPE.steps["report"].config
    assert forecast({"mine": ("mine", config)}, KNOWN) == {"mine": None}
    assert forecast({"report": ("report", config)}, replace(KNOWN, expected={"tokens": 9.0})) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"d_model": 100_000}, {"data": {"seq_len": 1_000_000_000}}, {"data": {"batch_size": 100_000_000}},
        {"d_model": 100_000, "steps": 3}, {"ngram_buckets": 1_000_000_000, "steps": 3},
    ],
)  # fmt: skip
def test_plan_that_does_not_fit_memory_names_settings(settings: dict[str, int]) -> None:
    with pytest.raises(BudgetError, match=r"(?s)training needs .* GB.*plan.ngram_buckets.*plan.batch_size"):
        plan(budget="1e15flops", deterministic=True, **settings)


def test_short_text_that_is_repeated_has_no_ngram_tables() -> None:
    def rows(corpus_bytes: int = 3_000_000, **config: object) -> int:
        made = plan(corpus_bytes=corpus_bytes, **config)
        found = made.job.model.ngram
        assert any("would memorize" in line for line in made.arithmetic) == (found is None)
        return found.buckets if found is not None else 0

    assert [rows(budget=budget) for budget in ("20s", "5h")] == [65_536, 0]
    assert rows(30_000_000, budget="5h") == 65_536
    per_pass = 3e6 / (8 * 256 * bytes_per_token(1024))
    assert [rows(steps=int(n * per_pass)) for n in (1.0, 1.4, 1.6)] == [65_536, 65_536, 0]
    assert [rows(steps=int(n * per_pass), ngram_buckets=512) for n in (1.0, 1.6)] == [512, 512]


@pytest.mark.parametrize(("steps", "warns"), [(1000, False), (200_000, True)])
def test_plan_warns_about_many_epochs(steps: int, warns: bool) -> None:
    made = plan(steps=steps, deterministic=True)
    assert any("warning: the text is read" in line for line in made.arithmetic) == warns
    assert (made.expected["epochs"] > expected.MAX_USEFUL_EPOCHS) == warns


def test_plan_without_compiler_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan().job.compile is True
    monkeypatch.setattr(planner, "can_compile", lambda: False)
    assert plan().job.compile is False
    with pytest.raises(BudgetError, match="no C\\+\\+ compiler"):
        plan(compile=True)


def test_plan_deterministic_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_timing(monkeypatch)
    monkeypatch.delenv("WHORL_DTYPE", raising=False)
    monkeypatch.setattr(planner, "usable_cores", lambda: 4)
    made = plan(budget="2e13flops", deterministic=True)
    other = replace(MACHINE, dtype="bfloat16", threads=1, flops={"float32": 1e10, "bfloat16": 9e11})
    again = plan(other, budget="2e13flops", deterministic=True)
    assert made.job == again.job, "the plan depends on measurements"
    job = made.job
    assert job.deterministic and not job.compile
    assert (job.dtype, job.threads, job.replicas) == ("float32", 1, 4)
    monkeypatch.setenv("WHORL_DTYPE", "bfloat16")
    forced = plan(steps=30, deterministic=True, compile=True, replicas=2).job
    assert (forced.dtype, forced.compile, forced.replicas) == ("bfloat16", True, 2)
    with pytest.raises(ValueError, match=r"a budget of 300s needs timing(.|\n)*--budget 1e14flops"):
        plan(deterministic=True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_least_budget_of_flops_is_named_before_anything_is_timed(
    monkeypatch, deterministic: bool
) -> None:
    with monkeypatch.context() as patched:
        forbid_timing(patched)
        with pytest.raises(BudgetError, match="buys 0 steps of the smallest model") as caught:
            plan(budget="1000flops", deterministic=deterministic)
        least = re.search(r"give at least --budget (\S+)flops", str(caught.value))
        assert least is not None
        with pytest.raises(BudgetError):
            plan(budget=f"{0.9 * float(least[1])}flops", deterministic=deterministic)
    assert plan(budget=f"{least[1]}flops", deterministic=deterministic).job.steps >= planner.MIN_STEPS


def test_scaling_law_is_monotone_with_optimal_vocabulary() -> None:
    bits, best = fitted_law().loss, fitted_law().optimal_vocab * 3**0.5
    assert bits(2e6, 2e7, 1024) < bits(1e6, 2e7, 1024) < bits(1e6, 1e7, 1024)
    assert all(bits(3e6, 2e7, round(best)) < bits(3e6, 2e7, round(best * off)) for off in (4, 1 / 4))


def test_memory_grows_with_width_batch_and_replicas() -> None:
    def memory(width: int = 128, rows: int = 8, replicas: int = 1) -> float:
        config = decoder_config(width, 4, 1024)
        return training_cost(config, batch_size=rows, seq_len=256, replicas=replicas).peak_memory_bytes

    assert memory() < memory(width=256) and memory() < memory(rows=32) and memory() < memory(replicas=2)


def test_time_steps_runs_real_replicas() -> None:
    model = decoder_config(32, 1, 300, ngram_buckets=64)
    job = Job(tokens="", model=model, seq_len=16, batch_size=4, steps=1, replicas=2, compile=False)
    timing = time_steps(job, seconds=0.1)
    assert 0 < timing.step_seconds < timing.startup_seconds


HEADS = {"n_heads": 2, "n_kv_heads": 2, "head_dim": 16}
LLAMA = {"d_model": 32, "n_layers": 2, "mlp_hidden": 64, "mixers": {"m": HEADS}}
EXPERTS = {"n_experts": 4, "top_k": 2, "hidden": 32}


def test_plan_of_given_transformer_fills_budget() -> None:
    for change in ({}, {"experts": EXPERTS}):
        made = plan(budget="60s", vocab_size=512, model=LLAMA | change)
        job = made.job
        assert isinstance(job.model, TransformerConfig) and made.vocab_size == job.model.vocab_size == 512
        assert job.optim == planner.LLAMA_OPTIM and "bits_per_byte" not in made.expected
        assert job.optim.lr_muon != OptimConfig().lr_muon
        assert made.expected["seconds"] == pytest.approx(60, rel=0.02)
        assert any("2 heads of 16" in line for line in made.arithmetic)
    assert (
        AttentionConfig.model_validate(HEADS | {"n_heads": 1, "n_kv_heads": 1})
        .describe()
        .startswith("1 head of ")
    )
    assert any("with every expert" in line for line in made.arithmetic)


@pytest.mark.parametrize(
    ("model", "more", "field"),
    [
        ({}, {"d_model": 64}, "together with model"),
        ({"n_layer": 1}, {}, "model.n_layer"),
        ({"experts": EXPERTS | {"groups": [3, 1]}}, {}, "groups"),
        ({"experts": EXPERTS | {"shared_gate": True}}, {}, "shared_gate"),
        ({"experts": EXPERTS | {"top_k": 1}}, {}, "top_k"),
        ({"experts": EXPERTS | {"routing": "expert_choice"}}, {}, "expert"),
        ({"mixers": {"m": {"kind": "mamba", "options": {"heads": 2}}}}, {}, "options of 'mamba'"),
        ({"mixers": {"m": {"kind": "linear", "options": {"n_heads": 3}}}}, {}, "n_heads"),
        ({"mixers": {"m": {"kind": "mamba", "options": {"d_state": "x"}}}}, {}, "wrong type"),
        ({"learned_positions": True, "max_length": 128}, {"data": {"seq_len": 256}}, "max_length"),
    ],
)
def test_plan_config_names_bad_field(model: dict[str, Any], more: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        PlanConfig.model_validate({"model": LLAMA | model, **more})


def test_plan_optim_override_keeps_other_defaults() -> None:
    made = plan(steps=5, vocab_size=512, model=LLAMA, optim={"weight_decay": 0.1})
    assert made.job.optim == planner.LLAMA_OPTIM.model_copy(update={"weight_decay": 0.1})
