"""Answers from numbered sources: a tiny model on facts that it has never seen, with sources and without, over seeds.

    python bench/loop/sources.py [--seeds 5]      # 5 to 7 minutes of one core for each seed

Each seed runs the recipe `cite-sources` with its own training questions, initial weights and order of texts. The suite has
other questions about other people, the same for all seeds. With sources the answer has to contain the fact. Of these answers
the citation has to be the right source and no other. Without sources the same questions measure chance: 1 / 100 (years) to
1 / 16 (instruments).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, smoke

CORRECT, CITED, CHANCE = 0.8, 0.9, 0.1
SMALL = (
    "lessons.max_train=64", "lessons.max_test=8", "init_model.d_model=16", "init_model.n_layers=1",
    "init_model.n_heads=1", "init_model.mlp_hidden=16", "init_model.vocab_size=400", "answers.items=8",
)  # fmt: skip


def measure(seed: int) -> dict[str, Any]:
    """Return the figures of one seed."""
    from whorl.recipes import load_recipe, run_recipe
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    sets = [f"{step}.seed={seed}" for step in ("lessons", "init_model", "sft")]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe("cite-sources", sets=(*sets, *(SMALL if smoke() else ())))
        done = run_recipe(recipe, Store(folder), Progress.silent(), until="answers").artifacts
        tasks = {task["task"]: task["figures"] for task in done["answers"].summary["tasks"]}
    figures = {
        f"{name}/{figure['metric']}": figure["value"] or 0.0 for name, of in tasks.items() for figure in of
    }
    found = {"seed": seed, "seconds": time.perf_counter() - began, **figures}
    print(found, flush=True)
    return found


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)

    args = parse(__doc__, arguments, smoke={"seeds": 1})
    found = [measure(seed) for seed in range(args.seeds)]

    def mean(name: str) -> float:
        return sum(one[name] for one in found) / len(found)

    correct, chance = mean("cited-answers/correct"), mean("closed-book/correct")
    claim(
        f"facts never seen, answered from numbered sources, mean of {len(found)} seeds", ours=correct, peer=chance,
        peer_name="the same questions without sources", unit="share of questions", ratio=correct, bar=CORRECT,
        ok=correct >= CORRECT and chance <= CHANCE, samples=found,
    )  # fmt: skip
    cited = mean("cited-answers/cited")
    claim(
        f"right source cited, of these answers, mean of {len(found)} seeds", ours=cited, peer=mean("closed-book/cited"),
        peer_name="without sources", unit="share of correct answers", ratio=cited, bar=CITED, ok=cited >= CITED,
        samples=found, variant="cited",
    )  # fmt: skip


if __name__ == "__main__":
    main()
