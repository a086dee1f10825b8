"""The harness of training steps: order of measurements, metrics, folders of checkpoints and heartbeats."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whorl.recipes.stage import train_stage
from whorl.tracking.progress import Progress
from whorl.tracking.run import Run


def test_train_stage_measures_before_and_after(tmp_path: Path) -> None:
    run, calls = Run(tmp_path / "run"), list[Any]()
    ctx: Any = SimpleNamespace(
        run=run, name="probe", progress=Progress.silent(), scratch=tmp_path / "scratch", heartbeat_dir=tmp_path / "beat"
    )  # fmt: skip

    def train(*, callback: Any, checkpoint_dir: Path, heartbeat_dir: Path, log: Any) -> None:
        assert (checkpoint_dir, heartbeat_dir) == (ctx.scratch, ctx.heartbeat_dir) and callable(log)
        calls.append("train")
        callback(1, {"loss": 2.0, "first": 1.0}, "experience")
        callback(2, {"loss": 1.0}, "experience")

    def evaluate(when: str) -> dict[str, float]:
        calls.append(when)
        return {"accuracy": float(len(calls))}

    result = train_stage(
        ctx, "Probe", train, evaluate=evaluate, bits_per_byte=lambda: float(len(calls)),
        note=lambda metrics: f"{metrics['loss']}", after_step=lambda *given: calls.append(given[0]),
    )  # fmt: skip
    assert calls == ["before", "train", 1, 2, "after"]
    assert result.evaluation == {"before": {"accuracy": 1.0}, "after": {"accuracy": 5.0}}
    assert result.bits_per_byte == {"before": 1.0, "after": 5.0}
    assert result.final == {"loss": 1.0, "first": 1.0} and result.seconds > 0
    assert [record["loss"] for record in run.read_metrics("probe")] == [2.0, 1.0]


def test_train_stage_without_measurements_only_trains(tmp_path: Path) -> None:
    ctx: Any = SimpleNamespace(
        run=Run(tmp_path), name="probe", progress=Progress.silent(), scratch=tmp_path, heartbeat_dir=tmp_path
    )
    result = train_stage(ctx, "Probe", lambda **_: None, note=str)
    assert result.evaluation == {} and result.bits_per_byte == {} and result.final == {}
