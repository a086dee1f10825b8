"""Tokens per second of supervised fine-tuning with packing at 512 tokens, against TRL's SFTTrainer.

    python bench/align/sft_throughput.py [--quick] [--kind fp32|bf16] [--rows 8] [--only trl|ours] [--plain]

Both sides get the same functions of the standard library as token ids, each with an end id. They pack whole functions
into rows of 512 with document masks, and take one clipped step of AdamW per `--rows` rows. Every token is a target.
Both start from the same weights, of 6.9 M parameters (`_workload.py`). The count holds targets only: no padding and no
first tokens.

TRL is tuned (`_trl.py`): three precisions, and the number of rows per forward pass. That number matters, because TRL
concatenates the rows and its attention computes all pairs. "wrapped" is TRL's other packing strategy: it cuts texts
anywhere and has no document mask. That is less work, and its tokens per second are used if they are higher. The
contenders run their steps in turn, each in a separate process, with equal threads and allocator settings. `--plain`
also runs TRL with glibc's default allocator settings. The highest median of each side is compared.

The bar depends on the CPU: 2.5 times TRL's best with AMX, 1.75 times without. `--smoke` runs Whorl alone, because TRL takes
half a minute to start; `--smoke --only trl` runs TRL.
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

LENGTH, TOKENS = sized((512, 200_000), (128, 4_000))
PARTS = ("data", "forward", "logprobs", "backward", "optimizer")


def bar() -> float:
    """Return the required ratio: 2.5 on a CPU with AMX for bf16, 1.75 on others."""
    file = Path("/proc/cpuinfo")
    return 2.5 if file.exists() and "amx_bf16" in file.read_text() else 1.75


def settings(kinds: list[str], quick: bool) -> list[trl.Setting]:
    """Return the settings of TRL; with `quick` the one that is the fastest on every machine so far."""
    first = [trl.Setting(kind, micro=1) for kind in kinds]
    wrapped = [trl.Setting(kind, packing="wrapped") for kind in kinds]
    return wrapped[-1:] if quick else [*first, *wrapped, trl.Setting(kinds[-1], micro=2)]


def rate(steps: list[Step]) -> float:
    """Return the median tokens per second of the steps.

    Raises:
        SystemExit: the loss does not fall, or a step has no gradient.
    """
    losses = [s.report["loss"] for s in steps]
    falls = losses[-1] < losses[0] or smoke()
    if not falls or any(not s.report["norm"] > 0 for s in steps):
        raise SystemExit(f"the loss of a contender does not fall: {losses}")
    return statistics.median(s.report["tokens"] / s.seconds for s in steps)


def main() -> None:
    given = trl.parse_options(
        __doc__,
        lambda p: p.add_argument("--rows", type=int, default=8, help="packed rows per step"),
        {"rows": 2},
    )
    steps = trl.measure(
        given, settings, trl.sft, ours.sft, lambda folder: (work.texts(folder, TOKENS, LENGTH), given.rows, LENGTH)
    )  # fmt: skip
    for name, timed in steps.items():
        losses = " to ".join(f"{s.report['loss']:.3f}" for s in (timed[0], timed[-1]))
        print(f"{table(name, timed, PARTS)}, {rate(timed):.0f} tokens/s, loss {losses}")
    if given.only and not smoke():
        return
    best = trl.best_of(steps, rate)
    (a_name, a), (b_name, b) = best["ours"], best["TRL"]
    ratio = a / b if b else 0.0
    claim(
        f"SFT packed at {LENGTH}, {given.rows} rows per step: {a_name}",
        ours=a, peer=b, peer_name=b_name, unit="tokens/s", ratio=ratio, bar=bar(), ok=ratio >= bar(),
        samples=[[n, *(round(s.report["tokens"] / s.seconds) for s in timed)] for n, timed in steps.items()],
        quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
