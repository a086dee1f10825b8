"""Duration of a whole GRPO step, from prompts to new weights, against TRL's GRPOTrainer.

    python bench/align/grpo_step.py [--quick] [--kind fp32|bf16] [--prompt 32] [--beta 0.0] [--only trl|ours] [--plain]

A step has 16 prompts and 8 completions of exactly 32 tokens for each, sampled at temperature 1. It computes rewards,
advantages within each group, log-probabilities and entropies, one backward pass and one clipped step of AdamW. Both
sides start from the same weights, of 6.9 M parameters (`_workload.py`). Learning rate, prompts and loss are equal too.
The loss is TRL's default: the mean over all tokens, without a reference model. `--beta` above 0 adds a reference model
on both sides. No completion ends early on either side.

TRL is tuned (`_trl.py`): three precisions, the batch whole or in micro-batches, both caches of `generate`, with and
without `torch_compile`. Continuous batching is left out: on a CPU it sampled six times slower. So is vLLM: its CPU backend
frees the weights that it has packed, so TRL's update of its weights fails (TRL 1.16, vLLM 0.32). The contenders run their
steps in turn, each in a separate process, with equal threads and an allocator that keeps freed memory. `--plain` also
runs TRL with glibc's default allocator settings. The lowest median of each side is compared.

The bar: TRL's best setting takes 4 times as long. The lines before the claim show the seconds of each contender by
part. `--smoke` runs Whorl alone, because TRL takes half a minute to start; `--smoke --only trl` runs TRL.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, sized, smoke
from bench._turns import Step, table
from bench.align import _ours as ours
from bench.align import _trl as trl
from bench.align import _workload as work

PROMPTS, GROUP, NEW = sized((16, 8, 32), (2, 2, 8))
BAR = 4.0
PARTS = (
    "generation", "rewards", "reference", "data", "logprobs", "backward", "optimizer",
)  # fmt: skip


def settings(kinds: list[str], quick: bool) -> list[trl.Setting]:
    """Return the settings of TRL: each precision in micro-batches; without `quick` also whole, static cache, compiled."""
    first = [trl.Setting(kind, micro=32) for kind in kinds]
    whole = [trl.Setting(kind) for kind in kinds]
    static = trl.Setting(kinds[-1], micro=32, cache="static")
    return first if quick else [*first, *whole, static, trl.Setting(kinds[-1], micro=32, compiled=True)]


def median(steps: list[Step]) -> float:
    """Return the median seconds per step.

    Raises:
        SystemExit: a step has no gradient.
    """
    if any(not s.report["norm"] > 0 for s in steps):
        raise SystemExit("a step without a gradient")
    return statistics.median(s.seconds for s in steps)


def main() -> None:
    given = trl.parse_options(
        __doc__,
        lambda p: (
            p.add_argument("--prompt", type=int, default=32, help="tokens of each prompt"),
            p.add_argument("--beta", type=float, default=0.0),
        ),
        {},
    )
    steps = trl.measure(
        given, settings, trl.grpo, ours.grpo,
        lambda folder: (work.prompts(folder, PROMPTS, given.prompt), GROUP, NEW, given.beta),
    )  # fmt: skip
    for name, timed in steps.items():
        rewards = " to ".join(f"{s.report['reward']:.3f}" for s in (timed[0], timed[-1]))
        difference = max(s.report.get("logprob_diff", 0.0) for s in timed)
        suffix = f", logprob_diff_max {difference:.1e}" if difference else ""
        print(table(name, timed, PARTS) + f", reward {rewards}{suffix}")
    if given.only and not smoke():
        return
    best = trl.best_of(steps, lambda timed: -median(timed))
    (a_name, a), (b_name, b) = ((name, -score) for name, score in (best["ours"], best["TRL"]))
    ratio = b / a if a else 0.0
    claim(
        f"GRPO step, {PROMPTS} prompts of {given.prompt} tokens x {GROUP} completions of {NEW}, beta {given.beta:g}: "
        f"{a_name}",
        peer_name=b_name, variant=str(given.prompt),
        ours=a, peer=b, unit="s", ratio=ratio, bar=BAR, ok=ratio >= BAR,
        samples=[[n, *(round(s.seconds, 4) for s in timed)] for n, timed in steps.items()], quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
