"""The step `report`: the page that explains a run; `whorl report` makes it for a run in any state.

    [steps.report]                      # by role, since several parents are models
    parents = { model = "pretrain", sft = "sft", rl = "rl" }

A parent that was made from another model is shown as a stage after pretraining; its role does not matter. The
page omits sections for which the recipe has no parent. If a parent is not made yet, its section names the missing step.

All content comes from artifacts (summaries, training curve, evaluation), so a report can be rebuilt from the store.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage_report import (
    derived_models,
    minimized_objective,
    next_commands,
    stage_summary,
    with_ancestors,
)
from whorl.report import ReportData, render
from whorl.store import Artifact, Store

REPORT_PARENTS = {
    "documents?": "documents",
    "selection?": "selection",
    "plan?": "plan",
    "tokenizer?": "tokenizer",
    "tokens?": "tokens",
    "model?": "model",
    "evaluation?": "evaluation",
    "tasks?": "tasks",
    "base?": "model",
    "sft?": "model",
    "preference?": "model",
    "rl?": "model",
    "distil?": "model",
}
SECTION_PARENTS = {  # section -> roles, of which it needs one
    "scores": {"evaluation"},
    "samples": {"evaluation"},
    "training": {"model"},
    "stages": {"base", "sft", "preference", "rl", "distil"},
    "plan": {"plan"},
    "corpus": {"selection"},
    "tokenizer": {"tokenizer"},
}


class ReportConfig(BaseModel):
    """Title and cost of the page."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = Field(default="A small language model", description="heading of the page")
    cost_per_hour: float | None = Field(
        default=None, ge=0, description="of this machine, for the cost column"
    )
    currency: str = "USD"


@step("report", config=ReportConfig, parents=REPORT_PARENTS, version=3)
def report(ctx: StepContext, config: ReportConfig) -> None:
    """Write the report: inputs, plan, and results."""
    for artifact in ctx.parents.values():
        artifact.check()
    data = report_data(ctx.parents, ctx.store, config, run=str(ctx.run.name), roles=ctx.parents)
    render(data, ctx.out / "report.html")
    size = (ctx.out / "report.html").stat().st_size
    ctx.summary.update(bytes=size, headline=f"report.html, {size / 1e3:.0f} kB, opens offline")


def report_data(
    artifacts: Mapping[str, Artifact],
    store: Store,
    config: ReportConfig,
    *,
    run: str = "",
    roles: Collection[str] | None = None,
) -> ReportData:
    """Collect the content of the page from `artifacts` (role -> artifact; any may be missing).

    Args:
        roles: roles that the recipe has; None means all.
    """
    stages = derived_models(artifacts.values())
    pretrained = artifacts.get("model")
    if pretrained is not None and (pretrained in stages or "curve.json" not in pretrained.files):
        artifacts = {role: artifact for role, artifact in artifacts.items() if role != "model"}
        roles = [role for role in roles if role != "model"] if roles is not None else None
    found: dict[str, Any] = {
        "title": config.title,
        "run": run,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "about": "Written by `whorl run`. Every figure was measured by the steps of the run.",
    }
    if "selection" in artifacts and "documents" in artifacts:
        found["corpus"] = _corpus(artifacts)
    if "tokenizer" in artifacts:
        tokenizer = artifacts["tokenizer"]
        found["tokenizer"] = {
            "vocab_size": tokenizer.summary["vocab_size"],
            "seconds": tokenizer.seconds,
            "domains": tokenizer.summary.get("domains", []),
        }
    if "plan" in artifacts:
        found["plan"] = _plan(artifacts)
    if "model" in artifacts:
        found["model"] = _model(artifacts["model"])
        found["training"] = _training(artifacts)
        found["next_commands"] = [
            f'whorl sample {artifacts["model"].name} "def "',
            f"whorl lineage {artifacts['model'].name}",
            "whorl run quickstart --budget 20m",
        ]
    if "evaluation" in artifacts:
        found.update(_evaluation(artifacts["evaluation"]))
    if stages:
        found.setdefault("model", _model(stages[-1]))
        found["stages"] = [stage_summary(stage) for stage in stages]
        found["next_commands"] = [*next_commands(stages[-1]), *found.get("next_commands", [])[-1:]]
    if roles is not None:
        present = {
            name
            for name, needed in SECTION_PARENTS.items()
            if not needed.isdisjoint(roles) or found.get(name)
        }
        found["omitted_sections"] = [name for name in SECTION_PARENTS if name not in present]
    found["time"] = {
        "steps": [
            {"step": a.name.split("/")[-1], "seconds": a.seconds, "bytes": a.manifest.size}
            for a in with_ancestors([*artifacts.values(), *stages], store)
        ],
        "budget_seconds": _budget_seconds(artifacts),
        "cost_per_hour": config.cost_per_hour,
        "currency": config.currency,
    }
    ends = (*(artifacts[r] for r in ("evaluation", "model", "tokens", "documents") if r in artifacts),)
    if last := (*reversed(stages), *ends)[:1]:
        found["lineage"] = store.lineage(last[0])
    found["environment"] = _environment()
    return ReportData.model_validate(found)


def _corpus(artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    selection = artifacts["selection"].summary
    documents = artifacts["documents"]
    return {
        "sources": documents.config.get("sources", []),
        "funnel": selection["funnel"],
        "quarantine": {k: v["documents"] for k, v in documents.summary["quarantine"].items()},
        "dropped": {k: v["documents"] for k, v in selection.get("dropped", {}).items()},
        "splits": {k: (v["documents"], v["bytes"]) for k, v in selection["splits"].items()},
    }


def _budget_seconds(artifacts: Mapping[str, Artifact]) -> float | None:
    from whorl.machine.budget import Budget

    return Budget.parse(artifacts["plan"].summary["budget"]).seconds if "plan" in artifacts else None


def _plan(artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    summary = artifacts["plan"].summary
    expected: dict[str, float] = summary["expected"]
    model = artifacts["model"].summary if "model" in artifacts else {}
    evaluation = artifacts["evaluation"].summary if "evaluation" in artifacts else {}
    params = model.get("params", {})
    actual = {
        "seconds": model.get("seconds"),
        "tokens": model.get("tokens"),
        "tokens_per_second": model.get("tokens_per_second"),
        "parameters": params.get("total"),
        "memory_bytes": model.get("peak_memory_bytes"),
        "bits_per_byte": evaluation.get("bits_per_byte"),
        "flops_per_token": expected.get("flops_per_token"),
        "mfu": (
            expected["mfu"] * model["tokens_per_second"] / expected["tokens_per_second"]
            if "mfu" in expected and "tokens_per_second" in model
            else None
        ),
    }
    names = {
        "seconds": ("training time", "s"),
        "tokens": ("tokens", "tokens"),
        "tokens_per_second": ("speed", "tokens/s"),
        "mfu": ("MFU, of the measured peak", "share"),
        "parameters": ("parameters", "parameters"),
        "flops_per_token": ("FLOPs per token", "FLOP"),
        "memory_bytes": ("peak memory", "bytes"),
        "epochs": ("epochs", ""),
        "bits_per_byte": ("held-out bits per byte", "bits/byte"),
    }
    rows = [
        {"quantity": quantity, "planned": expected.get(key), "actual": actual.get(key), "unit": unit}
        for key, (quantity, unit) in names.items()
        if key in expected
    ]
    return {"budget": summary["budget"], "rows": rows, "arithmetic": summary["arithmetic"]}


def _model(model: Artifact) -> dict[str, Any]:
    shape = json.loads(model.file("config.json").read_text())
    shape = shape.get("transformer", shape)
    params = model.summary["params"]
    shape_rows = {
        "layers": f"{shape['n_layers']}",
        "width": f"{shape['d_model']}",
        "vocabulary": f"{shape['vocab_size']:,}",
        "embedding and head": f"{params['embedding']:,}",
    }
    if "mixers" in shape:
        shape_rows["mixers"] = ", ".join(sorted({m["kind"] for m in shape["mixers"].values()}))
        if experts := shape.get("experts"):
            shape_rows["experts"] = f"{experts['n_experts']}, {experts['top_k']} per token"
            shape_rows["active parameters"] = f"{params['active']:,}"
    else:
        shape_rows["heads"] = f"{shape['n_heads']} of {shape['head_dim']}"
        shape_rows["weight matrices"] = f"{params['matmul']:,}"
        shape_rows["n-gram tables"] = f"{params['ngram']:,}"
    if stored := model.summary.get("checkpoints"):
        shape_rows["state in training"] = stored["size_report"]
        shape_rows["checkpoints"] = stored["line"]
    return {"name": model.name, "parameters": params["total"], "shape": shape_rows}


def _training(artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    model = artifacts["model"]
    curve = json.loads(model.file("curve.json").read_text())
    points = [
        {
            "step": r["step"],
            "loss": r["nll"],
            "learning_rate": r.get("learning_rate"),
            "seconds": r.get("seconds"),
        }
        for r in curve
        if "nll" in r
    ]
    held_out = [
        {"step": r["step"], "bits_per_byte": r["held_out_bits_per_byte"]}
        for r in curve
        if "held_out_bits_per_byte" in r
    ]
    induction = [{"step": r["step"], "nll": r["induction_nll"]} for r in curve if "induction_nll" in r]
    layers = sorted({int(k.split("/")[1]) for r in curve for k in r if re.match(r"moe/\d", k)})
    experts = [_expert_usage(n, [r for r in curve if f"moe/{n}/gini" in r]) for n in layers]
    expected = artifacts["plan"].summary["expected"] if "plan" in artifacts else {}
    speed = model.summary.get("tokens_per_second")
    mfu = None
    if speed and expected.get("tokens_per_second"):
        mfu = min(1.0, expected["mfu"] * speed / expected["tokens_per_second"])
    return {
        "objective": minimized_objective(model),
        "points": points,
        "held_out": held_out,
        "induction": induction,
        "experts": experts,
        "events": [_training_event(r) for r in curve if "event" in r],
        "tokens_per_second": speed,
        "mfu": mfu,
        "peak_memory_bytes": model.summary.get("peak_memory_bytes"),
    }


def _training_event(record: dict[str, Any]) -> dict[str, Any]:
    documents = json.loads(record["documents"])
    return {
        "step": record["step"],
        "kind": record["event"],
        "message": record["message"],
        "action": record["action"],
        "documents": [f"{d['path']} ({d.get('id', d.get('offset'))})" for d in documents],
        "n_documents": int(record["n_documents"]),
    }


def _expert_usage(n: int, records: list[dict[str, Any]]) -> dict[str, Any]:
    last, share = records[-1], f"moe/{n}/load_fraction/"
    return {
        "layer": n,
        "gini_points": [{"step": r["step"], "gini": r[f"moe/{n}/gini"]} for r in records],
        "load_fractions": [
            last[k]
            for k in sorted((k for k in last if k.startswith(share)), key=lambda k: int(k[len(share) :]))
        ],
        "dropped_fraction": max(r[f"moe/{n}/dropped_fraction"] for r in records),
    }


def _evaluation(evaluation: Artifact) -> dict[str, Any]:
    from whorl.report.data import SampleToken

    found = json.loads(evaluation.file("evaluation.json").read_text())
    scores = [
        {
            "name": "this model",
            "setting": "file by file",
            "bits_per_byte": found["bits_per_byte"],
            "kind": "model",
        }
    ]
    for baseline in found.get("baselines", []):
        name, _, setting = baseline["name"].partition(", ")
        scores.append({**baseline, "name": name, "setting": setting})
    samples = [
        {
            "prompt": sample["prompt"],
            "note": sample["note"],
            "tokens": [
                SampleToken.of_bytes(
                    bytes.fromhex(t["hex"]),
                    min(1.0, t["probability"]),
                    [(bytes.fromhex(h), min(1.0, p)) for h, p in t["alternatives"]],
                )
                for t in sample["tokens"]
            ],
        }
        for sample in found.get("samples", [])
    ]
    completions = found.get("completions")
    return {
        "scores": {"files": found["files"], "bytes": found["bytes"], "scores": scores},
        "samples": samples,
        "completions": (
            {k: completions[k] for k in ("prompts", "parsed", "unfinished", "real_parsed")}
            if completions
            else None
        ),
    }


def _environment() -> dict[str, str]:
    from whorl.tracking.run import environment

    flat: dict[str, str] = {}
    for key, value in environment().items():
        if isinstance(value, dict):
            flat.update({f"{key} {k}": str(v) for k, v in value.items()})
        else:
            flat[key] = str(value)
    return flat
