"""An invented report with every section."""

from __future__ import annotations

import math
import random
from typing import Any

from whorl.objectives.catalog import CATALOG
from whorl.report.data import ReportData

POINT_FIELDS = ("step", "loss", "learning_rate", "seconds", "tokens")


def points(n: int = 2400, drop_at: int | None = 900) -> list[dict[str, float]]:
    """Return a loss curve: a power law, optionally with a sudden drop, then a decay."""
    rng = random.Random(0)
    out = []
    for step in range(1, n + 1):
        loss = 2.2 + 4.6 * (1 + step / 25) ** -0.42
        if drop_at is not None:
            loss -= 0.55 / (1 + math.exp(-(step - drop_at) / (drop_at / 25)))
        decay = min(1.0, (n - step) / (0.4 * n))
        loss -= 0.18 * (1 - decay)
        rate, loss = 0.01 * min(1.0, step / 50) * decay, loss + rng.gauss(0, 0.07)
        out.append(dict(zip(POINT_FIELDS, (step, loss, rate, step / 8, step * 2048), strict=True)))
    return out


def objective(name: str) -> dict[str, str]:
    """Return the fields of `StageObjective`."""
    info = CATALOG[name]
    return {"name": info.name, "formula": info.formula, "paper": info.paper}


def artifact(byte: str, kind: str, name: str = "", **more: Any) -> dict[str, Any]:
    """Return a node of the lineage. byte: the address repeats it 16 times."""
    return {"address": byte * 16, "kind": kind, "name": name, **more}


def completion(text: str, reason: str, reward: float = 0.0) -> dict[str, Any]:
    return {"text": text, "passed": reward == 1.0, "reward": reward, "reason": reason}


def change(before: float, after: float) -> dict[str, float]:
    return {"before": before, "after": after}


def sft_stage() -> dict[str, Any]:
    """Return a stage without held-out tasks."""
    fields = {"name": "sft", "objective": objective("sft"), "trained_on": "1,500 texts", "seconds": 31.0}
    curve = [{"step": s, "loss": 2 + 1 / s} for s in range(1, 60)]
    return {**fields, "bits_per_byte": change(0.941, 0.946), "points": curve}


def rl_stage() -> dict[str, Any]:
    """Return a stage with all fields and one empty completion."""
    wrong = completion("    retrun self._items[-1]\n", "syntax: invalid syntax (line 2)")
    right = completion("    return self._items[-1]\n", "passed", 1.0)
    half = completion("", "empty: adds nothing", 0.25)
    names = ("step", "accuracy", "completion_length", "completion_length_incorrect")
    rising = [(s, 0.2 + 0.01 * s, 40 - 0.3 * s, 44 - 0.1 * s) for s in range(1, 41)]
    return {
        "name": "rl",
        "objective": objective("dr_grpo"),
        "trained_on": "rewards on 1,500 tasks",
        "n_test_tasks": 128,
        "accuracy": change(0.25, 0.625),
        "accuracy_greedy": change(0.5, 0.75),
        "bits_per_byte": change(0.946, 0.951),
        "seconds": 88.0,
        "points": [dict(zip(names, row, strict=True)) for row in rising],
        "samples": [
            {"prompt": "def top(self):\n", "before": wrong, "after": right},
            {"prompt": "def pop(self):\n", "before": half, "after": wrong},
        ],
    }


RANKED = "    |if| not| self|.|_items|:|\n|        |raise| Key|Error|('"
UNRANKED = "empty|')|\n|    |return| self|.|_items|.|pop|()|\n\n"


def sampled_tokens() -> list[dict[str, Any]]:
    """Return the tokens of a completion, first those with alternatives."""
    rng = random.Random(1)
    tokens: list[dict[str, Any]] = []
    for piece in RANKED.split("|"):
        p = rng.random() ** 0.5
        alternatives = [(piece, p), (" other", (1 - p) / 2), ("\n", 0.001)]
        tokens.append({"text": piece, "probability": p, "alternatives": alternatives})
    plain = [{"text": piece, "probability": rng.random() ** 2} for piece in UNRANKED.split("|")]
    return tokens + plain


def example() -> ReportData:
    """Return the whole report."""
    scores = [
        ("whorl 4 x 128", "file by file", 0.941, "model"),
        ("n-gram, order 6", "file by file", 1.262, "ngram"),
        ("gzip -9", "file by file", 1.729, "compressor"),
        ("xz -9e", "primed", 1.016, "compressor"),
        ("zstd -19", "dictionary", 1.372, "compressor"),
        ("PPMd order 10", "primed", 1.020, "compressor"),
    ]
    corpus = artifact("1a", "corpus", "quickstart.ingest", seconds=3.1, bytes=9_000_000)
    curated = artifact("2b", "curation", "quickstart.curate", seconds=8.0, parents={"corpus": corpus})
    tokenizer = artifact("3c", "tokenizer", parents={"corpus": corpus, "curation": curated})
    shards = artifact("5e", "tokens", parents={"tokenizer": tokenizer, "curation": curated})
    plan = artifact("6f", "plan", missing=True)
    lineage = artifact("4d", "model", "quickstart.pretrain", seconds=309.2, bytes=4_300_000)
    shape = {"layers": "4", "width": "128"}
    environment = {"python": "3.11.7", "torch": "2.13.0", "cpu": "2 cores", "compute type": "float32"}
    steps = range(100, 2401, 100)
    held_out = [{"step": s, "bits_per_byte": 0.94 + 0.9 * (1 + s / 100) ** -0.9} for s in steps]
    return ReportData.model_validate(
        {
            "title": "quickstart",
            "about": "A small language model of Python, trained on the interpreter's standard library.",
            "run": "runs/quickstart-01",
            "created": "2026-11-21 02:40 UTC",
            "corpus": {
                "sources": ["python-stdlib"],
                "funnel": [
                    {"stage": "found", "documents": 1790, "bytes": 31_900_000},
                    {"stage": "read", "documents": 1771, "bytes": 31_700_000},
                    {"stage": "without generated code", "documents": 1702, "bytes": 29_300_000},
                    {"stage": "train", "documents": 1580, "bytes": 27_300_000},
                ],
                "quarantine": {"not UTF-8": 14, "empty": 5},
                "dropped": {"exact duplicate": 32, "generated": 37},
                "splits": {"train": (1580, 27_300_000), "validation": (60, 990_000), "test": (62, 1_001_000)},
            },
            "tokenizer": {
                "vocab_size": 1024,
                "seconds": 4.2,
                "domains": [
                    {"domain": "Python code", "bytes": 1_000_000, "tokens": 390_000},
                    {"domain": "English prose", "bytes": 200_000, "tokens": 90_500},
                ],
            },
            "model": {"name": "quickstart.pretrain", "parameters": 1_053_312, "shape": shape},
            "plan": {
                "budget": "5 min",
                "rows": [
                    {"quantity": "training time", "planned": 300, "actual": 309.2, "unit": "s"},
                    {"quantity": "tokens", "planned": 5_000_000, "actual": 4_915_200, "unit": "tokens"},
                    {"quantity": "speed", "planned": 16_600, "actual": 15_900, "unit": "tokens/s"},
                    {"quantity": "compute", "planned": 3.1e13, "actual": 3.0e13, "unit": "FLOP"},
                    {"quantity": "held-out loss", "planned": 0.96, "actual": 0.941, "unit": "bits/byte"},
                    {"quantity": "peak memory", "planned": 1.1e9, "unit": "bytes"},
                ],
                "arithmetic": [
                    "parameters = 1024 x 128 + 4 x (...) = 1,053,312",
                    "FLOPs a token = 6 N + attention",
                ],
            },
            "training": {
                "objective": objective("next_token"),
                "points": points(),
                "held_out": held_out,
                "tokens_per_second": 15_900,
                "mfu": 0.31,
                "peak_memory_bytes": 1_240_000_000,
            },
            "scores": {
                "files": 62,
                "bytes": 1_001_000,
                "scores": [{"name": n, "setting": s, "bits_per_byte": b, "kind": k} for n, s, b, k in scores],
            },
            "completions": {"prompts": 100, "parsed": 63, "unfinished": 9, "real_parsed": 100},
            "samples": [{"prompt": "def pop(self):\n", "tokens": sampled_tokens(), "note": "seed 0"}],
            "stages": [sft_stage(), rl_stage()],
            "time": {
                "budget_seconds": 300,
                "steps": [
                    {"step": "ingest", "seconds": 3.1, "cached": True, "bytes": 9_000_000},
                    {"step": "curate", "seconds": 8.0},
                    {"step": "tokenizer", "seconds": 4.2, "bytes": 60_000},
                    {"step": "pretrain", "seconds": 309.2, "bytes": 4_300_000},
                    {"step": "evaluate", "seconds": 44.0},
                    {"step": "report", "seconds": 0.3},
                ],
            },
            "lineage": {**lineage, "config": {"seed": 0}, "parents": {"tokens": shards, "plan": plan}},
            "environment": environment,
            "next_commands": ['whorl sample quickstart.pretrain "def "', "whorl lineage quickstart.pretrain"],
        }
    )
