"""The step `plan`: dollars, and the law that a study has fitted to the same texts."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

from whorl.plan.laws.law import fitted_law
from whorl.plan.training_plan import TrainingPlan
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Artifact, Build, Store
from whorl.tracking.progress import Progress

IDS = {"bos_id": 0, "eos_id": 1, "pad_id": 2}
RECIPE = """
[steps.ingest]
sources = ["{folder}"]
[steps.curate]
parents = ["ingest"]
validation_bytes = 0
test_bytes = 0
[steps.plan]
parents = ["ingest", "curate"]
budget = "1e-6usd@h100"
deterministic = true
"""


def make_plan(store: Store, folder: Path) -> tuple[dict[str, Artifact], TrainingPlan]:
    recipe = parse_recipe(RECIPE.format(folder=folder), "mine.toml")
    made = dict(run_recipe(recipe, store, Progress.silent()).artifacts)
    return made, TrainingPlan.model_validate_json(made["plan"].file("plan.json").read_bytes())


def test_plan_uses_the_law_of_its_texts(tmp_path: Path) -> None:
    """A law of the same selection becomes a parent of the plan; without it the plan names Python."""
    store, folder = Store(tmp_path / "store"), tmp_path / "texts"
    folder.mkdir()
    for name in ("statistics.py", "ast.py", "shutil.py", "argparse.py", "typing.py"):
        shutil.copy(Path(statistics.__file__).with_name(name), folder)
    made, plan = make_plan(store, folder)
    assert plan.budget == "1e-06usd@h100" and plan.arithmetic[0].startswith("budget: 1e-06usd@h100 = ")
    assert plan.probe is None and any("Python's standard library" in line for line in plan.arithmetic)

    own = replace(fitted_law(), irreducible=3.0, corpus="my texts", vocab_coef=0.0)
    with Build(store, kind="tokens", name="t", parents={}, config={}, version=1, step="t") as tokens:
        (tokens.path / "tokens.json").write_text(
            json.dumps({**IDS, "vocab_size": 512, "dtype": "uint16", "splits": {}})
        )
    with Build(
        store, kind="law", name="law", config={}, version=1, step="study",
        parents={"documents": made["ingest"], "selection": made["curate"], "tokens": tokens.artifact},
    ) as law:  # fmt: skip
        (law.path / "law.json").write_text(json.dumps(own.to_json()))
    again, plan = make_plan(store, folder)
    assert (
        again["plan"].address != made["plan"].address and again["plan"].parents["law"] == law.artifact.address
    )
    assert plan.vocab_size == 512 and plan.expected["bits_per_byte"] > 3
    assert any(line.startswith("law: my texts") for line in plan.arithmetic)
    assert make_plan(store, folder)[0]["plan"].address == again["plan"].address
