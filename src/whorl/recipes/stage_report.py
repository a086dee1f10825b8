"""Figures of alignment stages for the report: before and after, curves, objectives, answers to the same tasks.

A stage is any model that was made from a model; name and role do not matter. Its summary holds the measurements (`eval`,
`bits_per_byte`), `curve.json` the metrics of each step, `samples.json` the answers. Each of them may be missing.
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
OBJECTIVE_OF_STEP = {  # step -> name in `objectives/catalog.py`, or the configuration field that holds it
    "pretrain": "next_token",
    "decay_branch": "next_token",
    "sft": "sft",
    "preference": "config.objective",
    "rl": "config.algorithm",
    "distil": "config.divergence",
    "reward_model": "reward_model",
    "embedder": "info_nce",
}
MAX_PROMPT_CHARS = 60  # longest prompt that is shown in a command to type


def derived_models(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Return the models that were made from a model, in the order of creation."""
    found = {a.address: a for a in artifacts if a.kind == "model" and "model" in a.parents}
    return sorted(found.values(), key=lambda a: a.created)


def with_ancestors(artifacts: Iterable[Artifact], store: Store) -> list[Artifact]:
    """Return the artifacts and their ancestors that the store still has, in the order of creation."""
    found = {a.address: a for a in artifacts}
    pending = list(found.values())
    while pending:
        for address in pending.pop().parents.values():
            if address not in found and (parent := store.find(address)) is not None:
                found[address] = parent
                pending.append(parent)
    return sorted(found.values(), key=lambda a: a.created)


def stage_summary(stage: Artifact) -> dict[str, Any]:
    """Return the fields of `report.data.StageSection`."""
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
        "objective": minimized_objective(stage),
        "loss_description": description,
        "points": _curve_points(stage, {"loss": loss, **CURVE_METRICS}),
        "samples": _sample_pairs(stage),
    }


def minimized_objective(model: Artifact) -> dict[str, str] | None:
    """Return name, formula and paper of the objective that trained a model; None for a step without training."""
    from whorl.objectives.catalog import CATALOG

    name = OBJECTIVE_OF_STEP.get(model.step, "")
    info = CATALOG.get(
        str(model.config.get(name.removeprefix("config."))) if name.startswith("config.") else name
    )
    return None if info is None else {"name": info.name, "formula": info.formula, "paper": info.paper}


def next_commands(stage: Artifact) -> list[str]:
    """Return commands that sample from the model of the last stage and show its lineage."""
    prompt = next((s["prompt"] for s in _sample_pairs(stage) if len(s["prompt"]) <= MAX_PROMPT_CHARS), "def ")
    return [f"whorl sample {stage.name} {_shell_quote(prompt)}", f"whorl lineage {stage.name}"]


def _shell_quote(text: str) -> str:
    """Quote a text for a POSIX shell; line ends become $'...' escapes."""
    inside = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f'"{text}"' if text == inside and not set('"$`!') & set(text) else f"$'{inside}'"


def _before_after(values: dict[str, float | None]) -> dict[str, float] | None:
    before, after = values.get("before"), values.get("after")
    return None if before is None or after is None else {"before": before, "after": after}


def _loss_metric(summary: dict[str, Any]) -> tuple[str, str]:
    """Return (name of the loss metric, its description)."""
    if objective := summary.get("objective"):
        return "loss", f"Loss of {objective.upper()} per {'completion' if objective == 'kto' else 'pair'}"
    if "teacher" in summary.get("sizes", {}):
        return "kl", "Divergence from the teacher in nats per trained token"
    return "nll", "Loss in nats per trained token"


def _curve_points(stage: Artifact, curves: dict[str, str]) -> list[dict[str, float]]:
    """Return the metrics by step; of a step repeated after an interruption, the last record counts."""
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
