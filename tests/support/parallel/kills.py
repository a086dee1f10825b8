"""A small recipe whose training is killed: its processes by role, and the step that it has reached."""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "WHORL_KILL_TEST"  # environment variable: marks all processes of a run
RECIPE = """\
name = "small"
steps.ingest = {{ sources = [{sources}], include = ["*.py"] }}
steps.curate = {{ parents = ["ingest"], validation_bytes = 20000, test_bytes = 20000 }}
steps.tokenizer.parents = ["ingest", "curate", "plan"]
steps.tokens.parents = ["ingest", "curate", "tokenizer"]
steps.pretrain = {{ parents = ["plan", "tokens", "tokenizer"], run = {{ checkpoint_seconds = {seconds} }} }}
[steps.plan]
parents = ["ingest", "curate"]
steps = {steps}
vocab_size = 300
data = {{ seq_len = 64, batch_size = 8 }}
d_model = 32
n_layers = 2
ngram_buckets = 64
"""


def write_recipe(folder: Path, steps: int, seconds: float = 0.2) -> Path:
    """Write small.toml: a tiny model of a part of the standard library, trained for `steps` steps."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = ", ".join(json.dumps(str(library / name)) for name in ("json", "asyncio", "email"))
    path = folder / "small.toml"
    path.write_text(RECIPE.format(sources=sources, steps=steps, seconds=seconds))
    return path


def reached_step(store: Path) -> int:
    """Return the step of the heartbeat; -1 before the first."""
    for path in store.glob("runs/*/watch/pretrain/heartbeat.json"):
        with suppress(ValueError, OSError):
            return int(json.loads(path.read_text())["step"])
    return -1


def roles(mark: str) -> dict[str, psutil.Process]:
    """Return the running processes with MARK=`mark` in their environment: "agent", "rank 0", "writer 0", "other 17"."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment, words = process.environ(), process.cmdline()
            if environment.get(MARK) != mark or process.status() == psutil.STATUS_ZOMBIE:
                continue
            rank, role = environment.get("RANK", "-"), f"other {process.pid}"
            if "whorl.parallel.launch.rank" in words:
                role = f"rank {rank}"
            elif process.name().startswith("checkpoints"):
                role = f"writer {rank}"
            elif "torchrun" in words and process.name().startswith("python"):
                role = "agent"
            found[role] = process
    return found


def wait_for(ready: Callable[[], object], log: Path, seconds: float = 300) -> None:
    """Return when `ready` is true; after `seconds` fail with the end of a log."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.02)
