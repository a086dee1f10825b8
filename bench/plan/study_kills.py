"""A study that is killed with SIGKILL at ten moments, and one that is not: the same law, to the bit.

    python bench/plan/study_kills.py           # about 8 minutes

The runs are real, of rows of 32 tokens of Python, in deterministic mode. Each life has
the time of a start and a part of the work, so that all lives together do not end it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import ROOT, claim, parse, smoke
from bench.plan._tiny_store import small_sources

from whorl.plan.laws import study, study_run
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress
from whorl.train.config import DataConfig

RECIPE = """
name = "kills"
steps.ingest = {{ sources = ["{sources}"] }}
steps.curate = {{ parents = ["ingest"], validation_bytes = 8000, test_bytes = 8000 }}
steps.tokenizer = {{ parents = ["ingest", "curate"], vocab_size = 320 }}
steps.tokens = {{ parents = ["ingest", "curate", "tokenizer"] }}
steps.law = {{ uses = "study", parents = ["ingest", "curate", "tokens"], budget = "{budget}" }}
"""


def run(sources: Path, folder: Path, budget: str) -> None:
    """Make the law of a folder; in a new process."""
    study.DATA, study.MIN_STEPS, study.MAX_EPOCHS = DataConfig(seq_len=32, batch_size=8), 16, 1e9
    study_run.SCORED_BYTES = 4000
    if smoke():
        study.SHARES = (1 / 8, 1 / 6)  # few runs
    recipe = parse_recipe(RECIPE.format(sources=sources, budget=budget), "kills.toml", deterministic=True)
    run_recipe(recipe, Store(folder), Progress.silent())


def law(folder: Path) -> bytes:
    return Store(folder).open("kills/law").file("law.json").read_bytes()


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kills", type=int, default=10)
        parser.add_argument("--budget", default="2.4e11flops")
        parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)

    a = parse(__doc__, arguments, smoke={"kills": 1, "budget": "1.1e11flops"})
    if a.child:
        run(Path(a.child[0]), Path(a.child[1]), a.budget)
        return
    top = Path(tempfile.mkdtemp())
    try:
        sources = small_sources(top / "sources")

        def start(folder: Path) -> subprocess.Popen[bytes]:
            command = [sys.executable, __file__, "--budget", a.budget, "--child", str(sources), str(folder)]
            path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
            return subprocess.Popen(command, start_new_session=True, env={**os.environ, "PYTHONPATH": path})

        def timed(folder: Path) -> float:
            began = time.monotonic()
            assert start(folder).wait() == 0
            return time.monotonic() - began

        seconds = timed(top / "whole")
        idle = seconds / 2 if smoke() else timed(top / "whole")  # the second finds all runs done
        killed, draw = 0, random.Random(0)
        for _ in range(a.kills):
            child = start(top / "killed")
            try:
                child.wait(idle + (seconds - idle) / (a.kills + 1) * draw.uniform(0.4, 1.0))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                killed += 1
        assert start(top / "killed").wait() == 0
        same = law(top / "killed") == law(top / "whole")
        claim(
            f"a study killed {killed} times ends with the law of an undisturbed one", ours=float(same), peer=1.0,
            peer_name="undisturbed", unit="equal bits", ratio=float(same), bar=1.0, ok=same, quick=killed < 10,
            samples=[{"seconds undisturbed": seconds}],
        )  # fmt: skip
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
