"""A store with the artifacts that benches read from a quickstart, made in seconds, for `--smoke`."""

from __future__ import annotations

import atexit
import shutil
import statistics
import tempfile
from pathlib import Path

from bench._run import quickstart_store, smoke

from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress

RECIPE = """
name = "quickstart"
[steps.ingest]
sources = ["{sources}"]
include = ["*.py"]
[steps.curate]
parents = ["ingest"]
validation_bytes = 8000
test_bytes = 8000
[steps.plan]
parents = ["ingest", "curate"]
steps = 8
vocab_size = 512
data.seq_len = 64
d_model = 96
n_layers = 3
ngram_buckets = 4096
replicas = 1
compile = false
[steps.tokenizer]
parents = ["ingest", "curate", "plan"]
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
"""


def small_sources(folder: Path, total_bytes: int = 120_000) -> Path:
    """Copy files of the standard library to `folder`, about `total_bytes` in all."""
    folder.mkdir(parents=True)
    for path in sorted(Path(statistics.__file__).parent.glob("*.py")):
        size = path.stat().st_size
        if 2000 < size < 20_000:
            shutil.copy(path, folder)
            total_bytes -= size
        if total_bytes < 0:
            break
    return folder


def open_store(path: str | Path | None) -> Store:
    """The quickstart's store (`quickstart_store`); under `--smoke` a new one with a tiny quickstart, removed at exit."""
    if not smoke():
        return quickstart_store(path, "quickstart/tokens")
    top = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, top, ignore_errors=True)
    store = Store(top / "store")
    text = RECIPE.replace("{sources}", str(small_sources(top / "sources")))
    run_recipe(parse_recipe(text, "quickstart.toml"), store, Progress.silent())
    return store


def cache_folder(path: Path) -> Path:
    """`path`; under `--smoke` a temporary folder, so that token sets of real runs are not mixed with tiny ones."""
    if not smoke():
        return path
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
