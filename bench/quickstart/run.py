"""The whole quickstart: bits per byte, its time in all and outside of training, and the share of planning and compiling.

    python bench/quickstart/run.py [--budget 5m] [--warm]

A fresh store and an empty compile cache, so the time is that of a first run without the installation. `--warm` runs it
twice with one cache and reports the second. The bars hold for a budget of five minutes on two cores of 0.9 TFLOP/s or
more in bf16; with AMX they are 0.78 bits per byte and 9 minutes. Needs ten minutes (twenty with `--warm`), alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import ROOT, claim, parse, smoke

from whorl.machine.budget import Budget
from whorl.store import Store

OUTSIDE_SECONDS, PLAN_SHARE = 120.0, 0.1
SMALL = {
    "ingest.sources": f'["{ROOT / "src" / "whorl" / "objectives"}"]',
    "rl.steps": "1",
    "rl.max_completion_tokens": "8",
}


def run(store: Path, cache: Path, budget: str) -> tuple[float, dict[str, Any]]:
    """Run the quickstart; return its seconds and its artifacts by step.

    Raises:
        SystemExit: the command failed.
    """
    began = time.monotonic()
    small = (
        [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")] if smoke() else []
    )
    words = ["run", "quickstart", "--store", str(store), "--no-live", "--budget", budget, *small]
    done = subprocess.run(
        [sys.executable, "-m", "whorl.cli", *words],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)}, text=True, capture_output=True,
    )  # fmt: skip
    seconds = time.monotonic() - began
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"the quickstart failed:\n{done.stderr[-2000:]}")
    opened = Store(store)
    return seconds, {name.rpartition("/")[2]: opened.open(name) for name in opened.names()}


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--budget", default="5m")
        parser.add_argument(
            "--warm", action="store_true", help="report a second run with the same compile cache"
        )
        parser.add_argument(
            "--quick", action="store_true", help="a budget of 10 s, whose figures have no bar"
        )

    given = parse(__doc__, arguments, smoke={"budget": "3e11flops"})
    budget = "10s" if given.quick else given.budget
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number in range(2 if given.warm else 1):
            seconds, made = run(folder / f"store{number}", folder / "cache", budget)
    amx = bool(torch.cpu._is_amx_tile_supported())  # type: ignore[attr-defined]
    evaluation, plan = made["evaluate"].summary, made["plan"].summary["expected"]
    training = made["pretrain"].summary["seconds"]
    planned = Budget.parse(budget).seconds or training
    primed = {b["name"]: b["bits_per_byte"] for b in evaluation.get("baselines", [])}.get(
        "PPMd order 10, primed", 0.0
    )
    share = plan.get("plan_seconds", 0.0) / planned  # with the compilation that the run reuses
    outside = seconds - training
    full, form = given.budget == "5m" and not given.quick and not smoke(), "warm" if given.warm else "cold"
    samples = [{name: round(artifact.manifest.seconds, 1) for name, artifact in made.items()}]
    bits, total = (0.78, 540.0) if amx else (0.82, 480.0)
    for variant, what, ours, peer, name, unit, ratio, bar in (
        ("bits", f"bits per byte on held-out files after {budget} of training", evaluation["bits_per_byte"], primed,
         "PPMd order 10, primed with the training split", "bits per byte", evaluation["bits_per_byte"], bits),
        ("total", f"quickstart with a budget of {budget}, from the command to its end", seconds, planned, "the budget", "s",
         seconds, total),
        ("outside", f"quickstart with a budget of {budget}, time outside of training", outside, planned, "the budget", "s",
         outside, OUTSIDE_SECONDS),
        ("planning", "planning and compiling as a share of the budget", share * planned, planned, "the budget", "s", share,
         PLAN_SHARE),
    ):  # fmt: skip
        claim(what, ours=round(ours, 3), peer=round(peer, 3), peer_name=name, unit=unit, ratio=ratio, bar=bar,
              ok=ratio <= bar or not full, quick=not full, variant=f"{variant}-{form}", samples=samples)  # fmt: skip


if __name__ == "__main__":
    main()
