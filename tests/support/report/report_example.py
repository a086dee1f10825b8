"""An invented report with every section."""

from __future__ import annotations

import math
import random
from typing import Any

from whorl.objectives.catalog import CATALOG
from whorl.report.data import ReportData

CODE = "    if not self._items:\n        raise KeyError('empty')\n    return self._items.pop()\n"


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
        rate = 0.01 * min(1.0, step / 50) * decay
        out.append(
            {
                "step": step,
                "loss": loss + rng.gauss(0, 0.07),
                "learning_rate": rate,
                "seconds": step * 0.125,
                "tokens": step * 2048,
            }
        )
    return out


def objective(name: str) -> dict[str, str]:
    """Return the fields of `StageObjective`."""
    info = CATALOG[name]
    return {"name": info.name, "formula": info.formula, "paper": info.paper}


def stages() -> list[dict[str, Any]]:
    """Return an SFT stage without held-out tasks and an RL stage with all fields and one empty completion."""
    wrong = {
        "text": "    retrun self._items[-1]\n",
        "passed": False,
        "reason": "syntax: invalid syntax (line 2)",
    }
    right = {"text": "    return self._items[-1]\n", "passed": True, "reward": 1.0, "reason": "passed"}
    half = {"text": "", "passed": False, "reward": 0.25, "reason": "empty: adds nothing"}
    rising = [
        {
            "step": s,
            "accuracy": 0.2 + 0.01 * s,
            "completion_length": 40 - 0.3 * s,
            "completion_length_incorrect": 44 - 0.1 * s,
        }
        for s in range(1, 41)
    ]
    return [
        {
            "name": "sft",
            "objective": objective("sft"),
            "trained_on": "1,500 texts",
            "bits_per_byte": {"before": 0.941, "after": 0.946},
            "seconds": 31.0,
            "points": [{"step": s, "loss": 2 + 1 / s} for s in range(1, 60)],
        },
        {
            "name": "rl",
            "objective": objective("dr_grpo"),
            "trained_on": "rewards on 1,500 tasks",
            "n_test_tasks": 128,
            "accuracy": {"before": 0.25, "after": 0.625},
            "accuracy_greedy": {"before": 0.5, "after": 0.75},
            "bits_per_byte": {"before": 0.946, "after": 0.951},
            "seconds": 88.0,
            "points": rising,
            "samples": [
                {"prompt": "def top(self):\n", "before": wrong, "after": right},
                {"prompt": "def pop(self):\n", "before": half, "after": wrong},
            ],
        },
    ]


def example() -> ReportData:
    """Return the whole report."""
    rng = random.Random(1)
    tokens = []
    for piece in [
        "    ",
        "if",
        " not",
        " self",
        ".",
        "_items",
        ":",
        "\n",
        "        ",
        "raise",
        " Key",
        "Error",
        "('",
    ]:
        p = rng.random() ** 0.5
        tokens.append(
            {
                "text": piece,
                "probability": p,
                "alternatives": [(piece, p), (" other", (1 - p) / 2), ("\n", 0.001)],
            }
        )
    for piece in ["empty", "')", "\n", "    ", "return", " self", ".", "_items", ".", "pop", "()", "\n\n"]:
        tokens.append({"text": piece, "probability": rng.random() ** 2})
    scores = [
        ("whorl 4 x 128", "file by file", 0.941, "model"),
        ("n-gram, order 6", "file by file", 1.262, "ngram"),
        ("gzip -9", "file by file", 1.729, "compressor"),
        ("gzip -9", "one stream", 1.636, "compressor"),
        ("xz -9e", "file by file", 1.655, "compressor"),
        ("xz -9e", "one stream", 1.339, "compressor"),
        ("xz -9e", "primed", 1.016, "compressor"),
        ("zstd -19", "one stream", 1.385, "compressor"),
        ("zstd -19", "dictionary", 1.372, "compressor"),
        ("PPMd order 10", "one stream", 1.230, "compressor"),
        ("PPMd order 10", "primed", 1.020, "compressor"),
    ]
    corpus = {
        "address": "1a" * 16,
        "kind": "corpus",
        "name": "quickstart.ingest",
        "seconds": 3.1,
        "bytes": 9_000_000,
    }
    curated = {
        "address": "2b" * 16,
        "kind": "curation",
        "name": "quickstart.curate",
        "seconds": 8.0,
        "parents": {"corpus": corpus},
    }
    tokenizer = {
        "address": "3c" * 16,
        "kind": "tokenizer",
        "name": "",
        "parents": {"corpus": corpus, "curation": curated},
    }
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
                    {"stage": "without exact duplicates", "documents": 1739, "bytes": 31_510_000},
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
                    {"domain": "docstrings and comments", "bytes": 200_000, "tokens": 82_000},
                    {"domain": "English prose", "bytes": 200_000, "tokens": 90_500},
                ],
            },
            "model": {
                "name": "quickstart.pretrain",
                "parameters": 1_053_312,
                "shape": {"layers": "4", "width": "128"},
            },
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
                "held_out": [
                    {"step": s, "bits_per_byte": 0.94 + 0.9 * (1 + s / 100) ** -0.9}
                    for s in range(100, 2401, 100)
                ],
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
            "samples": [
                {
                    "prompt": "def pop(self):\n",
                    "tokens": tokens,
                    "note": "temperature 0.8, top-p 0.95, seed 0",
                }
            ],
            "stages": stages(),
            "time": {
                "budget_seconds": 300,
                "steps": [
                    {"step": "ingest", "seconds": 3.1, "cached": True, "bytes": 9_000_000},
                    {"step": "curate", "seconds": 8.0},
                    {"step": "plan", "seconds": 21.4},
                    {"step": "tokenizer", "seconds": 4.2, "bytes": 60_000},
                    {"step": "tokens", "seconds": 2.5, "bytes": 22_000_000},
                    {"step": "pretrain", "seconds": 309.2, "bytes": 4_300_000},
                    {"step": "evaluate", "seconds": 44.0},
                    {"step": "report", "seconds": 0.3},
                ],
            },
            "lineage": {
                "address": "4d" * 16,
                "kind": "model",
                "name": "quickstart.pretrain",
                "seconds": 309.2,
                "bytes": 4_300_000,
                "config": {"seed": 0},
                "parents": {
                    "tokens": {
                        "address": "5e" * 16,
                        "kind": "tokens",
                        "parents": {"tokenizer": tokenizer, "curation": curated},
                    },
                    "plan": {"address": "6f" * 16, "kind": "plan", "missing": True},
                },
            },
            "environment": {
                "python": "3.11.7",
                "torch": "2.13.0",
                "cpu": "2 cores",
                "compute type": "float32",
            },
            "next_commands": ['whorl sample quickstart.pretrain "def "', "whorl lineage quickstart.pretrain"],
        }
    )
