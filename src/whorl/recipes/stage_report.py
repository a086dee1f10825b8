"""What the artifacts of stages tell the report: figures before and after, curves, answers to the same tasks.

A stage is known by what it is, not by its name or its role: a model that was made of a model. Its summary holds what was
measured (`solved`, `bits_per_byte`), its `curve.json` the metrics of each step, its `samples.json` the answers; each may be
missing, since no stage must measure everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from whorl.store import Artifact, Store

CURVE_METRICS = {
    "accuracy": "accuracy",
    "completion_length": "completion_length/mean",
    "completion_length_incorrect": "completion_length/incorrect",
}
MAX_PROMPT_CHARS = 60  # characters of a prompt that is short enough to be typed


def derived_models(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Those that are models made of a model, each once, in the order in which they were made."""
    found = {a.address: a for a in artifacts if a.kind == "model" and "model" in a.parents}
    return sorted(found.values(), key=lambda a: a.created)


def with_ancestors(artifacts: Iterable[Artifact], store: Store) -> list[Artifact]:
    """These and all that they were made from, as far as the store still has it, in the order in which they were made."""
    found = {a.address: a for a in artifacts}
    waiting = list(found.values())
    while waiting:
        for address in waiting.pop().parents.values():
            if address not in found and (parent := store.find(address)) is not None:
                found[address] = parent
                waiting.append(parent)
    return sorted(found.values(), key=lambda a: a.created)


def stage_summary(stage: Artifact) -> dict[str, Any]:
    """A stage as `report/data.py` has it."""
    summary = stage.summary
    measured, tasks = summary.get("eval", {}), summary.get("tasks", {})
    trained_on, (loss, description) = "", _loss_metric(summary)
    if "texts" in summary:
        trained_on = f"{summary['texts']:,} texts"
    elif "held_out" in summary:
        trained_on = f"{summary['items']['train']:,} preferences"
    elif "train" in tasks:
        trained_on = f"rewards on {tasks['train']:,} tasks"
    return {
        "name": stage.name.split("/")[-1],
        "trained_on": trained_on,
        "n_test_tasks": tasks.get("test"),
        "accuracy": _before_after({when: figures.get("accuracy") for when, figures in measured.items()}),
        "accuracy_greedy": _before_after(
            {when: figures.get("accuracy_greedy") for when, figures in measured.items()}
        ),
        "bits_per_byte": _before_after(summary.get("bits_per_byte", {})),
        "seconds": summary.get("seconds", stage.seconds),
        "loss_description": description,
        "points": _curve_points(stage, {"loss": loss, **CURVE_METRICS}),
        "samples": _sample_pairs(stage),
    }


def next_commands(stage: Artifact) -> list[str]:
    """What to type to ask the last stage's model, and to see where it came from."""
    asked = next((s["prompt"] for s in _sample_pairs(stage) if len(s["prompt"]) <= MAX_PROMPT_CHARS), "def ")
    return [f"whorl sample {stage.name} {_shell_quote(asked)}", f"whorl lineage {stage.name}"]


def _shell_quote(text: str) -> str:
    """As a shell reads it; line ends as $'...' has them."""
    inside = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f'"{text}"' if text == inside and not set('"$`!') & set(text) else f"$'{inside}'"


def _before_after(told: dict[str, float | None]) -> dict[str, float] | None:
    before, after = told.get("before"), told.get("after")
    return None if before is None or after is None else {"before": before, "after": after}


def _loss_metric(summary: dict[str, Any]) -> tuple[str, str]:
    """(the metric of a stage's steps that is its loss, what that is in words)."""
    if objective := summary.get("objective"):  # of preferences
        return "loss", f"The loss of {objective.upper()}, {'an answer' if objective == 'kto' else 'a pair'}"
    if "teacher" in summary.get("sizes", {}):
        return "kl", "Divergence from the teacher, in nats a token that was to be learnt"
    return "nll", "Nats a token that was to be learnt"


def _curve_points(stage: Artifact, curves: dict[str, str]) -> list[dict[str, float]]:
    """By step; a step that was taken again after an interruption counts once, as it was the last time."""
    if "curve.json" not in stage.files:
        return []
    records = {record["step"]: record for record in json.loads(stage.file("curve.json").read_text())}
    return [
        {"step": step, **{name: record[key] for name, key in curves.items() if key in record}}
        for step, record in sorted(records.items())
    ]


def _sample_pairs(stage: Artifact) -> list[dict[str, Any]]:
    if "samples.json" not in stage.files:
        return []
    kept = json.loads(stage.file("samples.json").read_text())

    def answer(sample: dict[str, Any]) -> dict[str, Any]:
        return {"text": sample["answer"], **{key: sample[key] for key in ("passed", "reward", "reason")}}

    return [
        {"prompt": before["prompt"], "before": answer(before), "after": answer(after)}
        for before, after in zip(kept["before"], kept["after"], strict=True)
    ]
