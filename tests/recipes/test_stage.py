"""The harness of training steps: order of measurements, metrics, folders, resumed runs, and the panel of the report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whorl.recipes.stage import Likelihood, format_likelihood_change, train_stage
from whorl.recipes.stage_recorder import StageRecorder
from whorl.report import ReportData
from whorl.report.blocks import Curve, StepReport, Table
from whorl.report.render import to_html
from whorl.tracking.progress import Progress
from whorl.tracking.run import Run
from whorl.train.trainer import StepFunction

SKIPPED = {"kind": "nonfinite", "message": "the loss is nan", "action": "skipped", "n_documents": 0}


def context(folder: Path) -> Any:
    return SimpleNamespace(
        run=Run(folder / "run"), name="probe", progress=Progress.silent(), scratch=folder / "scratch",
        heartbeat_dir=folder / "beat", report=StepReport(),
    )  # fmt: skip


def test_train_stage_measures_before_and_after(tmp_path: Path) -> None:
    ctx, calls = context(tmp_path), list[Any]()

    def train(*, callback: Any, checkpoint_dir: Path, heartbeat_dir: Path, log: Any) -> str:
        assert (checkpoint_dir, heartbeat_dir) == (ctx.scratch, ctx.heartbeat_dir) and callable(log)
        calls.append("train")
        callback(1, {"loss": 2.0, "first": 1.0}, "experience")
        callback(2, {"loss": 1.0}, "experience")
        return "weights"

    def evaluate(when: str) -> dict[str, float]:
        calls.append(when)
        return {"accuracy": float(len(calls))}

    result = train_stage(
        ctx, "Probe", train, evaluate=evaluate, likelihood=lambda: Likelihood(len(calls), 2.0 * len(calls)),
        note=lambda metrics: f"{metrics['loss']}", after_step=lambda *given: calls.append(given[0]),
    )  # fmt: skip
    assert calls == ["before", "train", 1, 2, "after"]
    assert result.evaluation == {"before": {"accuracy": 1.0}, "after": {"accuracy": 5.0}}
    assert result.bits_per_byte == {"before": 1.0, "after": 5.0}
    assert result.perplexity == {"before": 2.0, "after": 10.0}
    change = "; first 60 kB of test 1.000 then 5.000 bits per byte, perplexity 2.00 then 10.00"
    assert format_likelihood_change(**result.likelihood) == change
    assert result.final == {"loss": 1.0, "first": 1.0} and result.seconds > 0
    assert [record["loss"] for record in ctx.run.read_metrics("probe")] == [2.0, 1.0]
    assert result.trained == "weights" and [record["step"] for record in result.curve] == [1, 2]


def test_train_stage_without_measurements_only_trains(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    result = train_stage(ctx, "Probe", lambda **_: None, note=str)
    assert result.evaluation == {} and result.bits_per_byte == {} and result.final == {}
    assert format_likelihood_change(**result.likelihood) == "" and ctx.report.blocks == []


def test_bar_gets_the_steps_of_the_task_and_names_measurements(tmp_path: Path) -> None:
    ctx, lines = context(tmp_path), list[str]()
    ctx.progress.sinks.append(lines.append)

    def train(*, callback: Any, **_: Any) -> None:
        receiver = StepFunction(callback)
        receiver.on_start(4)
        receiver.on_step(1, {"loss": 1.0})

    train_stage(ctx, "Probe", train, note=lambda _: "", evaluate=lambda when: {})
    assert [line.partition(",")[0] for line in lines[:2]] == [
        "Evaluating before training: 0.0 s",
        "Probe: 1 of 4 steps (25 %)",
    ]
    assert lines[2].startswith("Evaluating after training: ")


def test_resumed_stage_keeps_earlier_records(tmp_path: Path) -> None:
    def train(first: int, last: int, *, callback: Any, **_: Any) -> None:
        for step in range(first, last + 1):
            callback(step, {"loss": 9.0 - step, **({"start": 1.0} if step == 1 else {})})
            if step == 4 and first == 1:
                raise KeyboardInterrupt

    ctx = context(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train_stage(ctx, "Probe", partial(train, 1, 6), note=str)
    result = train_stage(ctx, "Probe", partial(train, 3, 6), note=str)  # the checkpoint was of step 2
    assert [(r["step"], r["loss"]) for r in result.curve] == [(n, 9.0 - n) for n in range(1, 7)]
    assert result.final == {"loss": 3.0, "start": 1.0}
    done = train_stage(ctx, "Probe", lambda **_: None, note=str)  # killed after the last step
    assert done.curve == result.curve and done.final == result.final


def test_new_step_has_a_panel_with_loss_and_events(tmp_path: Path) -> None:
    """The training function reports as the trainer does; the step itself writes no block."""

    def train(*, callback: Any, **_: Any) -> None:
        reports = StepFunction(lambda step, metrics: callback(step, metrics), callback)
        reports.on_step(1, {"loss": 2.0})
        reports.on_event(2, SKIPPED)
        reports.on_step(3, {"loss": 1.5})
        reports.on_evaluation(3, {"held_out": 0.5}, None)
        reports.on_checkpoint(3, 0.25)

    ctx = context(tmp_path)
    result = train_stage(ctx, "Probe", train, note=str)
    curve, table = ctx.report.blocks
    assert isinstance(curve, Curve) and curve.lines[0].y == [2.0, 1.5]
    assert isinstance(table, Table) and table.rows[0][1] == "nonfinite: the loss is nan"
    assert result.final == {"loss": 1.5, "held_out": 0.5}
    assert "checkpoint of step 3: stall 0.250 s" in (ctx.run.dir / "log.txt").read_text()
    page = to_html(ReportData(reports=[("probe", ctx.report)]))
    assert "<h2" in page and "probe" in page and "the loss is nan" in page


def test_recorder_thins_records_and_keeps_last_values(tmp_path: Path) -> None:
    ctx = context(tmp_path)

    def train(*, callback: Any, **_: Any) -> None:
        for step in range(1, 8):
            callback(step, {"loss": float(step)})

    recorder = partial(StageRecorder, log_if=lambda step, metrics: step % 3 == 0)
    result = train_stage(ctx, "Probe", train, note=str, recorder=recorder)
    assert [record["step"] for record in result.curve] == [3, 6] and result.final == {"loss": 7.0}
