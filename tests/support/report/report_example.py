"""An invented report with every kind of block, written by the code that the steps use."""

from __future__ import annotations

import math
import random
from typing import Any

from whorl.recipes.steps.corpus import corpus_report
from whorl.recipes.steps.tokens import tokenizer_report
from whorl.report.blocks import StepReport, Text
from whorl.report.data import ReportData
from whorl.report.scores import evaluation_report
from whorl.report.stages import stage_report
from whorl.report.training import plan_table, training_report


def points(n: int = 2400, drop_at: int | None = 900) -> list[dict[str, float]]:
    """Return the records of a loss curve: a power law, optionally with a sudden drop, then a decay."""
    rng = random.Random(0)
    out = []
    for step in range(1, n + 1):
        loss = 2.2 + 4.6 * (1 + step / 25) ** -0.42
        if drop_at is not None:
            loss -= 0.55 / (1 + math.exp(-(step - drop_at) / (drop_at / 25)))
        decay = min(1.0, (n - step) / (0.4 * n))
        loss -= 0.18 * (1 - decay)
        rate, loss = 0.01 * min(1.0, step / 50) * decay, loss + rng.gauss(0, 0.07)
        out.append({"step": step, "nll": loss, "learning_rate": rate, "seconds": step / 8})
    return out


def artifact(byte: str, kind: str, name: str = "", **more: Any) -> dict[str, Any]:
    """Return a node of the lineage. byte: the address repeats it 16 times."""
    return {"address": byte * 16, "kind": kind, "name": name, **more}


def completion(prompt: str, text: str, reason: str, reward: float = 0.0) -> dict[str, Any]:
    return {"prompt": prompt, "answer": text, "passed": reward == 1.0, "reward": reward, "reason": reason}


def change(before: float, after: float) -> dict[str, float]:
    return {"before": before, "after": after}


def sft_report() -> StepReport:
    """Return a stage without held-out tasks."""
    curve = [{"step": s, "nll": 2 + 1 / s} for s in range(1, 60)]
    summary = {"seconds": 31.0, "bits_per_byte": change(0.941, 0.946)}
    loss = "nll", "Loss in nats per trained token"
    return stage_report("sft", summary, curve, objective="sft", loss=loss, trained_on="1,500 texts")


def rl_report(summary: dict[str, Any] | None = None) -> StepReport:
    """Return a stage with all fields and one empty completion; `summary` replaces figures."""
    top, pop = "def top(self):\n", "def pop(self):\n"
    wrong = "    retrun self._items[-1]\n", "syntax: invalid syntax (line 2)"
    before = [completion(top, *wrong), completion(pop, "", "empty: adds nothing", 0.25)]
    after = [completion(top, "    return self._items[-1]\n", "passed", 1.0), completion(pop, *wrong)]
    names = ("step", "accuracy", "completion_length/mean", "completion_length/incorrect")
    rising = [(s, 0.2 + 0.01 * s, 40 - 0.3 * s, 44 - 0.1 * s) for s in range(1, 41)]
    measured = {
        "before": {"accuracy": 0.25, "accuracy_greedy": 0.5},
        "after": {"accuracy": 0.625, "accuracy_greedy": 0.75},
    }
    figures = {
        "eval": measured, "bits_per_byte": change(0.946, 0.951), "seconds": 88.0, "tasks": {"test": 128},
        **(summary or {}),
    }  # fmt: skip
    return stage_report(
        "rl", figures, [dict(zip(names, row, strict=True)) for row in rising], objective="dr_grpo",
        loss=("loss", "Loss"), trained_on="rewards on 1,500 tasks", samples={"before": before, "after": after},
    )  # fmt: skip


RANKED = "    |if| not| self|.|_items|:|\n|        |raise| Key|Error|('"
UNRANKED = "empty|')|\n|    |return| self|.|_items|.|pop|()|\n\n"


def sampled_tokens() -> list[dict[str, Any]]:
    """Return the tokens of a completion, first those with alternatives."""
    rng = random.Random(1)
    tokens: list[dict[str, Any]] = []
    for piece in RANKED.split("|"):
        p = rng.random() ** 0.5
        alternatives = [(piece.encode().hex(), p), (b" other".hex(), (1 - p) / 2), (b"\n".hex(), 0.001)]
        tokens.append({"hex": piece.encode().hex(), "probability": p, "alternatives": alternatives})
    plain = [
        {"hex": piece.encode().hex(), "probability": rng.random() ** 2, "alternatives": []}
        for piece in UNRANKED.split("|")
    ]
    return tokens + plain


EXPECTED = {
    "seconds": 300, "tokens": 5_000_000, "tokens_per_second": 16_600, "mfu": 0.32, "memory_bytes": 1.1e9,
    "bits_per_byte": 0.96,
}  # fmt: skip
SCORES = [
    ("n-gram, order 6", 1.262, "ngram"), ("gzip -9, file by file", 1.729, "compressor"),
    ("zstd -19, dictionary", 1.372, "compressor"), ("PPMd order 10, primed", 1.020, "compressor"),
]  # fmt: skip


def reports() -> list[tuple[str, StepReport]]:
    """Return the reports of the steps of a run, in the order of their making."""
    funnel = (("found", 1790, 31_900_000), ("read", 1771, 31_700_000), ("without generated code", 1702, 29_300_000),
              ("train", 1580, 27_300_000))  # fmt: skip
    selection = {
        "funnel": [{"stage": s, "documents": n, "bytes": b} for s, n, b in funnel],
        "dropped": {"exact duplicate": {"documents": 32}, "generated": {"documents": 37}},
        "splits": {"train": {"documents": 1580, "bytes": 27_300_000}, "test": {"documents": 62, "bytes": 1_001_000}},
    }  # fmt: skip
    quarantine = {"not UTF-8": {"documents": 14}, "empty": {"documents": 5}}
    domains = [
        {"domain": "Python code", "bytes": 1_000_000, "tokens": 390_000},
        {"domain": "English prose", "bytes": 200_000, "tokens": 90_500},
    ]
    arithmetic = ["parameters = 1024 x 128 + 4 x (...) = 1,053,312", "FLOPs a token = 6 N + attention"]
    plan = [
        Text(section="Plan", lines=["Budget: 5 min."]),
        plan_table(EXPECTED),
        Text(section="Plan", title="The planner's arithmetic", style="list", lines=arithmetic),
    ]
    held_out = [
        {"step": s, "held_out_bits_per_byte": 0.94 + 0.9 * (1 + s / 100) ** -0.9}
        for s in range(100, 2401, 100)
    ]
    params = {"total": 1_053_312, "embedding": 262_144, "matmul": 786_432, "ngram": 0}
    trained = training_report(
        [*points(), *held_out],
        {"seconds": 309.2, "steps": 2400, "tokens": 4_915_200, "tokens_per_second": 15_900, "params": params,
         "peak_memory_bytes": 1_240_000_000},
        config={"transformer": {
            "n_layers": 4, "d_model": 128, "vocab_size": 1024,
            "mixers": {"a": {"kind": "heads", "n_heads": 4, "head_dim": 32}},
        }},
        expected=EXPECTED, objective="next_token",
    )  # fmt: skip
    evaluation = {
        "files": 62, "bytes": 1_001_000, "bits_per_byte": 0.941,
        "baselines": [{"name": n, "bits_per_byte": b, "kind": k} for n, b, k in SCORES],
        "completions": {"prompts": 100, "parsed": 63, "unfinished": 9},
        "samples": [{"prompt": "def pop(self):\n", "tokens": sampled_tokens(), "note": "seed 0"}],
    }  # fmt: skip
    return [
        ("curate", corpus_report(selection, quarantine, sources=["python-stdlib"])),
        ("plan", StepReport(blocks=plan)), ("tokenizer", tokenizer_report(1024, domains)),
        ("pretrain", trained), ("evaluate", evaluation_report(evaluation, EXPECTED)), ("sft", sft_report()),
        ("rl", rl_report()),
    ]  # fmt: skip


def example() -> ReportData:
    """Return the whole report."""
    corpus = artifact("1a", "corpus", "quickstart.ingest", seconds=3.1, bytes=9_000_000)
    curated = artifact("2b", "curation", "quickstart.curate", seconds=8.0, parents={"corpus": corpus})
    tokenizer = artifact("3c", "tokenizer", parents={"corpus": corpus, "curation": curated})
    shards = artifact("5e", "tokens", parents={"tokenizer": tokenizer, "curation": curated})
    plan = artifact("6f", "plan", missing=True)
    lineage = artifact("4d", "model", "quickstart.pretrain", seconds=309.2, bytes=4_300_000)
    environment = {"python": "3.11.7", "torch": "2.13.0", "cpu": "2 cores", "compute type": "float32"}
    return ReportData.model_validate(
        {
            "title": "quickstart",
            "about": "A small language model of Python, trained on the interpreter's standard library.",
            "run": "runs/quickstart-01",
            "created": "2026-11-21 02:40 UTC",
            "reports": reports(),
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
