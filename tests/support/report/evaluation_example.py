"""Folders of made-up evaluations for the tests and benches of the page."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WORDS = [
    "alpha", "beta", "gamma", "delta", "river", "stone", "north", "seven", "green", "quiet", "paper", "iron",
]  # fmt: skip
WORDS += ["lamp", "field"]
OUTCOMES = (
    "right",
    "wrong",
    "not_found",
    "truncated",
    "refused",
    "error",
    "missing",
)  # the first seven of `whorl.evals.results`


def make_item(number: int, rng: random.Random, tokens: int = 24) -> dict[str, Any]:
    """Return one record of `items-TASK.jsonl`."""
    words = [rng.choice(WORDS) for _ in range(40)]
    outcome = rng.choices(OUTCOMES, (60, 25, 5, 4, 3, 1, 2))[0]
    answer = " ".join(words[:tokens])
    return {
        "item": f"item-{number:05d}",
        "scores": {} if outcome == "missing" else {"acc": float(outcome == "right")},
        "outcome": outcome,
        "reason": "" if outcome == "right" else f"expected {words[0]}",
        "cluster": "",
        "group": WORDS[number % 4],
        "prompt": f"Question {number}: which word follows?\n" + " ".join(words),
        "answers": [] if outcome == "missing" else [answer],
        "gold": words[0],
        "details": {
            "confidence": rng.random(),
            "tokens": [[f" {word}", -rng.random() * 6] for word in words[:tokens]],
            "choices": [{"text": word, "log_prob": -rng.random() * 9, "chosen": i == 1} for i, word in enumerate(words[:4])],
        },
    }  # fmt: skip


def write_evaluation(
    folder: Path,
    name: str,
    n: int,
    *,
    seed: int = 0,
    change: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda number, item: item,
    results: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder of an evaluation with one task `words`, and return it.

    change: (number, item) -> item, for special content. results: replaces fields of the task's summary.
    """
    rng = random.Random(seed)
    items = [change(number, make_item(number, rng)) for number in range(n)]
    folder.mkdir(parents=True, exist_ok=True)
    counts = {kind: sum(item["outcome"] == kind for item in items) for kind in OUTCOMES}
    answered = max(n - counts["missing"], 1)
    accuracy = counts["right"] / answered
    measure = {
        "metric": "acc", "value": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05, "n": n, "chance": 0.25,
    }  # fmt: skip
    task = {
        "task": "words", "model": name, "address": f"{seed:040x}", "hash": "0123456789ab", "kind": "choice", "version": "1",
        "about": "words that follow",
        "outcomes": counts, "metrics": ["acc"], "measures": [measure], "requests": n, "seconds": 10.0 + seed,
    }  # fmt: skip
    cost = {"tokens_per_second": 500.0 + 100 * seed, "memory_bytes": 4e8 * (1 + seed)}
    summary = {"format": 1, "cost": cost, "tasks": [task | dict(results or {})]}
    (folder / "results.json").write_text(json.dumps(summary))
    with (folder / "items-words.jsonl").open("w") as out:
        for item in items:
            out.write(json.dumps(item) + "\n")
    return folder
