"""A whole step of GRPO, from prompts to new weights, beside TRL's GRPOTrainer: seconds.

.venv/bin/python bench/align/grpo_step.py [--quick] [--kind fp32|bf16] [--prompt 32] [--beta 0.0] [--only trl|ours] [--plain]

A step: 16 prompts, 8 answers of exactly 32 tokens to each, sampled at temperature 1; rewards; advantages within each group;
log-probabilities with their entropies; one backward, one clipped step of AdamW. Both sides begin with the same weights, of
6.9 M parameters (`_align_work.py`), and learn at the same rate from the same prompts, in the loss that TRL has by default:
over all tokens, without a reference model (`--beta` above 0: with one, on both sides). No end comes early on either side.

TRL is tuned (`_align_trl.py`): three precisions, the batch whole or in parts, both caches of `generate`, `torch_compile`
or not. (Continuous batching is left out: on a CPU it sampled six times slower.) All take turns, each in a process of its
own, with the same threads and the same allocator, which keeps what it was given; `--plain`: TRL's also as it comes, with
glibc's habit of handing memory back. The best median of each side counts.

The bar: 4 x TRL's best. What each contender spends on what is printed above the line.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from _turns import Step, Turn, in_turn, table
from bench._run import claim
from bench.align import _ours as ours
from bench.align import _trl as trl
from bench.align import _workload as work

from whorl.machine.device_probe import usable_cores

PROMPTS, GROUP, NEW, BAR = 16, 8, 32, 4.0
PARTS = (
    "generation",
    "rewards",
    "reference",
    "log-probs",
    "backward",
    "wait",
    "gradients",
    "step",
    "optimiser",
)
KINDS = {"fp32": ("fp32",), "bf16": ("autocast", "bf16")}  # what TRL calls them


def settings(kinds: list[str], quick: bool) -> list[trl.Setting]:
    """How TRL is tried: each precision in parts that fit a cache; else whole too, with the other cache, and compiled."""
    first = [trl.Setting(kind, micro=32) for kind in kinds]
    whole = [trl.Setting(kind) for kind in kinds]
    static = trl.Setting(kinds[-1], micro=32, cache="static")
    return first if quick else [*first, *whole, static, trl.Setting(kinds[-1], micro=32, compiled=True)]


def median(steps: list[Step]) -> float:
    """Seconds a step. Stops at a contender that does not learn."""
    if any(not s.report["norm"] > 0 for s in steps):
        raise SystemExit("a step without a gradient")
    return statistics.median(s.seconds for s in steps)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--quick", action="store_true")
    options.add_argument("--kind", choices=tuple(KINDS), help="of both sides; default: all")
    options.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    options.add_argument("--beta", type=float, default=0.0)
    options.add_argument("--only", choices=("trl", "ours"))
    options.add_argument("--plain", action="store_true")
    options.add_argument("--rounds", type=int)
    asked = options.parse_args()
    rounds, threads = asked.rounds or (3 if asked.quick else 7), usable_cores()
    wanted = [asked.kind] if asked.kind else list(KINDS)
    with tempfile.TemporaryDirectory() as name:
        folder, out = work.write(Path(name) / "hf"), Path(name) / "out"
        job = (work.prompts(folder, PROMPTS, asked.prompt), GROUP, NEW, asked.beta)
        turns: dict[str, Turn] = {}
        if asked.only != "ours":
            for setting in settings([k for kind in wanted for k in KINDS[kind]], asked.quick):
                for keep in (True, False) if asked.plain else (True,):
                    turns[f"TRL, {setting}{'' if keep else ', plain memory'}"] = Turn(
                        trl.grpo, folder, out, setting, *job, threads=threads, keep_memory=keep
                    )
        if asked.only != "trl":
            for kind in wanted:
                turns[f"ours, {kind}"] = Turn(ours.grpo, folder, kind, *job, threads=threads)
        steps = in_turn(turns, warm=2, rounds=rounds)
    for name, made in steps.items():
        rewards = " to ".join(f"{s.report['reward']:.3f}" for s in (made[0], made[-1]))
        parity = max(s.report.get("parity", 0.0) for s in made)
        told = f", sampler and trainer apart by {parity:.1e} at most" if parity else ""
        print(table(name, made, PARTS) + f", reward {rewards}{told}")
    if asked.only:
        return
    best = {
        side: min((n for n in steps if n.startswith(side)), key=lambda n: median(steps[n]))
        for side in ("ours", "TRL")
    }
    a, b = median(steps[best["ours"]]), median(steps[best["TRL"]])
    claim(
        f"a GRPO step, {PROMPTS} prompts of {asked.prompt} tokens x {GROUP} answers of {NEW}, beta {asked.beta:g}: "
        f"{best['ours']}; {best['TRL']}",
        ours=a, peer=b, unit="s", ratio=b / a, bar=BAR, ok=b / a >= BAR,
        samples=[[n, *(round(s.seconds, 4) for s in made)] for n, made in steps.items()], quick=asked.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
