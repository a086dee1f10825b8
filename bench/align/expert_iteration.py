"""Expert iteration and GRPO on the same sums, from the same SFT model, with equally many samples.

    python bench/align/expert_iteration.py [--seeds 5] [--quick]        # about 45 minutes on 2 cores

The stages and settings are those of `arithmetic.py`. Each algorithm draws 20,480 completions: GRPO in 80 batches with one
update each, expert iteration in ten batches with two epochs of SFT on the completions that pass. Results: greedy accuracy on
held-out problems, and the share of right samples over the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, smoke
from bench.align import arithmetic

ALGORITHMS = ["grpo", "expert_iteration"]
BAR = 0.9  # of GRPO's accuracy


def one_seed(seed: int, quick: bool) -> dict[str, Any]:
    """Return the results of one seed, from another process unless this is a smoke run."""
    if smoke():
        return arithmetic.pipeline(seed, ALGORITHMS, quick)
    command = [sys.executable, arithmetic.__file__, "--one", str(seed), "--algorithms", ",".join(ALGORITHMS)]
    done = subprocess.run(command + ["--quick"] * quick, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)

    args = parse(__doc__, arguments, smoke={"seeds": 1}, quick={"seeds": 1})
    quick = getattr(args, "quick", False)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda seed: one_seed(seed, quick), range(args.seeds)))
    for one in found:
        solved = ", ".join(f"{stage} {share:.1%}" for stage, share in one["solved"].items())
        print(
            f"seed {one['seed']}: {solved}; right samples {one['expert_iteration']['accuracy']}", flush=True
        )
    grpo, ours = (statistics.fmean(one["solved"][name] for one in found) for name in ALGORITHMS)
    claim(
        "held-out sums solved after expert iteration, beside GRPO with as many samples", ours=ours, peer=grpo,
        peer_name="GRPO", unit="accuracy", ratio=ours / max(grpo, 1e-9), bar=BAR, ok=ours >= BAR * grpo, samples=found,
        quick=quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
