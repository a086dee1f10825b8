"""Recipe texts with a tiny byte model and small data sets, for tests of the alignment steps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Artifact, Store
from whorl.tracking.progress import Progress

INIT_MODEL = """
name = "stages"
[steps.init_model]
d_model = 32
n_layers = 2
n_heads = 2
mlp_hidden = 32
"""
ARITHMETIC = """
[steps.sums]
uses = "tasks"
source = "arithmetic"
max_train = 40
max_test = 6
levels = {1 = 1.0}
columns = false
"""
PREFERENCES = """
[steps.likes]
uses = "preferences"
source = "files"
path = "likes.jsonl"
test_fraction = 0.25
"""


CORPUS = """
[steps.ingest]
sources = ["code"]
[steps.curate]
parents = ["ingest"]
query = "SELECT row, '' AS reason FROM attributes"
near_duplicate_similarity = 1.0
validation_bytes = 2000
test_bytes = 2000
max_held_out_fraction = 0.3
"""


def write_code(folder: Path, n: int = 60) -> None:
    """Write Python files with one documented function each."""
    folder.mkdir(exist_ok=True)
    for i in range(n):
        body = f"    total = value + {i}\n    if total > {i * 7}:\n        return total - {i}\n"
        doc = f'    """Work out the number that belongs to {i}, for the value."""\n'
        text = f"def work_{i}(value):\n{doc}{body}    return total * {i + 2}\n"
        (folder / f"m{i}.py").write_text(text + f"\n\nX{i} = {i}\n" * 3)


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    """Write JSON lines; a string among the records is written unchanged."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def write_preferences(path: Path, n: int = 48) -> Path:
    """Write pairs in which `yes` is preferred to `nay`, which has the same length."""
    return write_jsonl(path, [{"prompt": f"{i}?", "chosen": "yes", "rejected": "nay"} for i in range(n)])


def run_text(text: str, store: Path, *sets: str) -> dict[str, Artifact]:
    """Run a recipe text and return its artifacts."""
    recipe = parse_recipe(text, "stages.toml", sets=sets)
    return dict(run_recipe(recipe, Store(store), Progress.silent()).artifacts)
