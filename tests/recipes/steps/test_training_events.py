"""What went wrong in training gets from the loop to the metrics, the artifact's curve and the page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whorl.recipes.steps.model import _PretrainObserver
from whorl.recipes.steps.report import _training
from whorl.report import ReportData
from whorl.report.render import to_html
from whorl.tracking.progress import Progress
from whorl.tracking.run import Run

SKIPPED = {
    "step": 3, "kind": "nonfinite", "message": "the loss is nan <b>", "action": "skipped (1 so far)", "loss": None,
    "documents": [{"number": 12, "id": "id-12", "path": "a/<i>.txt", "source": "s", "offset": 0}], "n_documents": 22,
}  # fmt: skip
BACK = {
    "step": 4,
    "kind": "rollback",
    "message": "8 steps went wrong",
    "action": "weights went back",
    "loss": None,
}


class Steps(dict[str, Any]):
    """A stand-in for the model's artifact."""

    summary: dict[str, Any] = {"tokens_per_second": 1.0}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str) -> Path:
        return self.folder / name


def test_an_event_is_in_the_metrics_and_on_the_page(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", tensorboard=True)
    task = SimpleNamespace(update=lambda **_: None)
    ctx = SimpleNamespace(
        run=run, name="pretrain", progress=Progress.silent(), machine=SimpleNamespace(flops={"float32": 1.0})
    )
    watch = _PretrainObserver(ctx, SimpleNamespace(steps=9, dtype="float32"), 1.0, None, task)  # type: ignore[arg-type]
    for step in (1, 2, 5, 9):
        watch.on_step(step, {"nll": 5.0 - step / 10, "tokens_per_second": 9.0, "flops_per_second": 0.5})
        if step == 2:
            watch.on_event(3, SKIPPED)
            watch.on_event(4, BACK)
    watch.close()
    curve = list(run.read_metrics("pretrain"))
    (tmp_path / "curve.json").write_text(json.dumps(curve, allow_nan=False))
    training = _training({"model": Steps(tmp_path)})  # type: ignore[dict-item]
    assert [p["step"] for p in training["points"]] == [1, 2, 5, 9]
    assert [(e["step"], e["kind"], e["n_documents"]) for e in training["events"]] == [
        (3, "nonfinite", 22), (4, "rollback", 0)
    ]  # fmt: skip
    page = to_html(ReportData.model_validate({"training": training}))
    assert "the loss is nan &lt;b&gt;" in page and "weights went back" in page
    assert "a/&lt;i&gt;.txt (id-12)" in page and "and 21 more" in page
    quiet = {**training, "events": []}
    assert "Events</h3>" in page and "Events</h3>" not in to_html(
        ReportData.model_validate({"training": quiet})
    )


def test_a_page_shows_the_first_of_very_many_events(tmp_path: Path) -> None:
    event = {"kind": "spike", "message": "the loss is 9", "action": "skipped"}
    training = {
        "points": [{"step": n, "loss": 3.0} for n in range(1, 9)],
        "events": [{"step": n, **event} for n in range(70)],
    }
    page = to_html(ReportData.model_validate({"training": training}))
    assert page.count("the loss is 9") == 50 and "And 20 later ones" in page
