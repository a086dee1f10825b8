"""The last lines of `whorl run`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whorl.cli.jobs.run import closing_lines


def artifact(kind: str, name: str, *files: str) -> Any:
    return SimpleNamespace(kind=kind, name=name, path=Path("store", name), files=files, file=Path, summary={})


def test_next_command_samples_last_model() -> None:
    models = [artifact("model", "r/pretrain"), artifact("model", "r/sft")]
    artifacts = [artifact("tokens", "r/tokens"), *models, artifact("report", "r/report", "report.html")]
    assert closing_lines(artifacts, " --store s") == [
        "model:  r/pretrain: store/r/pretrain",
        "model:  r/sft: store/r/sft",
        "report: report.html",
        'next:   whorl sample r/sft "def " --store s',
    ]
    assert closing_lines([artifacts[3]], "") == ["report: report.html"]
    assert closing_lines(artifacts[:1], "") == ["next:   whorl show r/tokens"]


def test_next_command_uses_sampled_prompt(tmp_path: Path) -> None:
    one = {"prompt": "1+2\n", "answer": "3", "passed": True, "reward": 1.0, "reason": ""}
    (tmp_path / "samples.json").write_text(json.dumps({"before": [one], "after": [one]}))
    made = artifact("model", "r/rl", "samples.json")
    made.file = lambda name: tmp_path / name
    assert closing_lines([made], "")[-1] == r"next:   whorl sample r/rl $'1+2\n'"
