"""A store with a tiny quickstart (corpus, plan, tokenizer, tokens, pretrained decoder), made in seconds, for `--smoke`."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from bench._run import smoke
from bench.plan._tiny_store import RECIPE, small_sources

from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress

PRETRAIN = """
[steps.pretrain]
parents = ["tokenizer", "tokens", "plan"]
"""


def open_store(path: str | Path | None) -> Store:
    """The store at `path`; under `--smoke` a new one with a tiny quickstart, removed at exit."""
    if not smoke():
        return Store(path)
    top = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, top, ignore_errors=True)
    store = Store(top / "store")
    text = RECIPE.replace("{sources}", str(small_sources(top / "sources"))) + PRETRAIN
    run_recipe(parse_recipe(text, "quickstart.toml"), store, Progress.silent())
    return store
