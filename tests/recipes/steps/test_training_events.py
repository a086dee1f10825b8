"""Training events reach the metrics, the curve of the artifact and the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whorl.recipes.steps.pretrain.observer import PretrainObserver, progress_note
from whorl.report import ReportData
from whorl.report.blocks import StepReport
from whorl.report.render import to_html
from whorl.report.training import training_blocks
from whorl.tracking.progress import Progress
from whorl.tracking.run import Run

SKIPPED = {
    "step": 3, "kind": "nonfinite", "message": "the loss is nan <b>", "action": "skipped (1 so far)", "loss": None,
    "documents": [{"number": 12, "id": "id-12", "path": "a/<i>.txt", "source": "s", "offset": 0}], "n_documents": 22,
}  # fmt: skip
BACK = {"step": 4, "kind": "rollback", "message": "8 failed steps", "action": "weights restored"}
BACK |= {"loss": None}


def test_event_reaches_metrics_and_page(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", tensorboard=True)
    task = SimpleNamespace(update=lambda **_: None)
    machine = SimpleNamespace(flops={"float32": 1.0})
    ctx = SimpleNamespace(run=run, name="pretrain", progress=Progress.silent(), machine=machine, summary={})
    job: Any = SimpleNamespace(steps=9, dtype="float32")
    tokenizer: Any = None
    observer = PretrainObserver(
        ctx, task, progress_note, job=job, bytes_per_token=1.0, tokenizer=tokenizer, prompt=""
    )
    for step in (1, 2, 5, 9):
        observer.on_step(step, {"nll": 5.0 - step / 10, "tokens_per_second": 9.0, "flops_per_second": 0.5})
        if step == 2:
            observer.on_event(3, SKIPPED)
            observer.on_event(4, BACK)
    observer.close()
    assert 0 < ctx.summary["first_step_seconds"] < run.seconds
    curve = list(run.read_metrics("pretrain"))
    assert [r["step"] for r in curve if "nll" in r] == [1, 2, 5, 9]
    events = [(r["step"], r["event"], r["n_documents"]) for r in curve if "event" in r]
    assert events == [(3, "nonfinite", 22), (4, "rollback", 0)]
    page = page_of(curve)
    assert "the loss is nan &lt;b&gt;" in page and "weights restored" in page
    assert "a/&lt;i&gt;.txt (id-12)" in page and "and 21 more" in page
    without_events = page_of([record for record in curve if "event" not in record])
    assert "Events</h3>" in page and "Events</h3>" not in without_events


def test_resumed_run_has_no_time_to_its_first_step(tmp_path: Path) -> None:
    ctx: Any = SimpleNamespace(
        run=Run(tmp_path), name="pretrain", machine=SimpleNamespace(flops={"float32": 1.0}), summary={}
    )
    task, job = SimpleNamespace(update=lambda **_: None), SimpleNamespace(steps=1000, dtype="float32")
    options: Any = {"job": job, "bytes_per_token": 1.0, "tokenizer": None, "prompt": ""}
    observer = PretrainObserver(ctx, task, progress_note, **options)
    for step in (400, 402):
        observer.on_step(step, {"nll": 4.0, "tokens_per_second": 9.0, "flops_per_second": 0.5})
    observer.close()
    assert ctx.summary == {}


def page_of(curve: Sequence[dict[str, Any]]) -> str:
    return to_html(ReportData(reports=[("pretrain", StepReport(blocks=[*training_blocks(curve)]))]))


def test_page_shows_first_events_of_many() -> None:
    event = {"event": "spike", "message": "the loss is 9", "action": "skipped"}
    event |= {"documents": "[]", "n_documents": 0}
    events = [{"step": n, **event} for n in range(70)]
    page = page_of([*({"step": n, "nll": 3.0} for n in range(1, 9)), *events])
    assert page.count("the loss is 9") == 50 and "And 20 later ones" in page
