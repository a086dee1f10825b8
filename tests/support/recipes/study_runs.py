"""Studies of a tiny token set, whose runs are trained, or follow a known surface.

python -m tests.support.recipes.study_runs STORE    # a study whose runs take 0.2 s, to be killed
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.recipes.align_steps import write_code
from whorl.plan.laws import study as design
from whorl.plan.laws import study_run
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Artifact, Store
from whorl.tracking.progress import Progress
from whorl.train.config import DataConfig

DATA = DataConfig(seq_len=16, batch_size=8)
TEXT = """
name = "tiny"
steps.ingest = {{ sources = ["{code}"] }}
steps.curate.parents = ["ingest"]
steps.curate.query = "SELECT row, '' AS reason FROM attributes"
steps.curate.near_duplicate_similarity = 1.0
steps.curate.near_duplicates = "keep"
steps.curate.validation_bytes = 2000
steps.curate.test_bytes = 2000
steps.curate.max_held_out_fraction = 0.3
steps.tokenizer = {{ parents = ["ingest", "curate"], vocab_size = 300 }}
steps.tokens = {{ parents = ["ingest", "curate", "tokenizer"] }}
steps.law = {{ uses = "study", parents = ["ingest", "curate", "tokens"], budget = "{budget}" }}
"""


def surface_loss(job: Any, steps: float, noise: float = 0.005) -> float:
    """Bits per byte of a job by a known law, with noise by its seed and shape."""
    drawn = np.random.default_rng([job.seed, job.model.d_model, round(steps)]).standard_normal()
    n, d = 12.0 * job.model.n_layers * job.model.d_model**2, steps * DATA.seq_len * DATA.batch_size
    return float((0.5 + 40 / n**0.4 + 60 / d**0.3) * np.exp(noise * drawn))


def fake_training(job: Any, scratch: Path, fractions: Any = design.FRACTIONS, **options: Any) -> list[float]:
    time.sleep(0.2)
    return [surface_loss(job, share * job.steps) for share in fractions]


def shrink(fake: bool = True) -> None:
    """Make the runs of this process tiny; with `fake` they are not trained."""
    design.DATA, design.MIN_STEPS, design.MAX_EPOCHS = DATA, 16, 1e9
    if fake:
        study_run.train_run = fake_training


def make_law(store: Path, budget: str = "9e10flops", sets: Sequence[str] = ()) -> Artifact:
    """Return the law of generated code; the study looks up what the store has."""
    code = store.parent / "code"
    write_code(code)
    recipe = parse_recipe(TEXT.format(code=code, budget=budget), "tiny.toml", sets=sets, deterministic=True)
    return run_recipe(recipe, Store(store), Progress.silent()).artifacts["law"]


if __name__ == "__main__":
    shrink()
    make_law(Path(sys.argv[1]))
