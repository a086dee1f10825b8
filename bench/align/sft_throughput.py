"""Supervised fine-tuning with packing at 512, beside TRL's SFTTrainer: tokens a second.

.venv/bin/python bench/align/sft_throughput.py [--quick] [--kind fp32|bf16] [--rows 8] [--only trl|ours] [--plain]

Both sides are given the same functions of the standard library as ids, an end behind each; pack whole ones into rows of 512
with a mask between them; and take one clipped step of AdamW from `--rows` rows, every token a target. Both begin with the
same weights, of 6.9 M parameters (`_align_work.py`). What is counted are targets: neither padding nor first tokens.

TRL is tuned (`_align_trl.py`): three precisions, and how many rows a forward takes, which matters: it lays them behind one
another, and its attention looks at all pairs. "wrapped" is its other way to pack, which cuts texts anywhere and has no mask
between them: less work, and its figure counts if it is the better one. All take turns, each in a process of its own, with
the same threads and the same allocator (`--plain`: TRL's also with glibc's own). The best median of each side counts.

The bar, by what the machine can do: 4 x TRL's best with AMX, 1.5 x without.
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

LENGTH, TOKENS = 512, 200_000
PARTS = ("forward", "backward", "gradients", "step", "optimiser")
KINDS = {"fp32": ("fp32",), "bf16": ("autocast", "bf16")}  # what TRL calls them


def bar() -> float:
    """What was asked for: 4 x where the CPU multiplies tiles of bf16, 1.5 x elsewhere."""
    file = Path("/proc/cpuinfo")
    return 4.0 if file.exists() and "amx_bf16" in file.read_text() else 1.5


def settings(kinds: list[str], quick: bool) -> list[trl.Setting]:
    """How TRL is tried."""
    first = [trl.Setting(kind, micro=1) for kind in kinds]
    wrapped = [trl.Setting(kind, packing="wrapped") for kind in kinds]
    return [*first, wrapped[-1]] if quick else [*first, *wrapped, trl.Setting(kinds[-1], micro=2)]


def rate(steps: list[Step]) -> float:
    """Tokens a second: the median of the steps. Stops at a contender that does not learn."""
    losses = [s.report["loss"] for s in steps]
    if not losses[-1] < losses[0] or any(not s.report["norm"] > 0 for s in steps):
        raise SystemExit(f"a contender does not learn: losses {losses}")
    return statistics.median(s.report["tokens"] / s.seconds for s in steps)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--quick", action="store_true")
    options.add_argument("--kind", choices=tuple(KINDS), help="of both sides; default: all")
    options.add_argument("--rows", type=int, default=8, help="packed rows a step")
    options.add_argument("--only", choices=("trl", "ours"))
    options.add_argument("--plain", action="store_true")
    options.add_argument("--rounds", type=int)
    asked = options.parse_args()
    rounds, threads = asked.rounds or (3 if asked.quick else 7), usable_cores()
    wanted = [asked.kind] if asked.kind else list(KINDS)
    with tempfile.TemporaryDirectory() as name:
        folder, out = work.write(Path(name) / "hf"), Path(name) / "out"
        job = (work.texts(folder, TOKENS, LENGTH), asked.rows, LENGTH)
        turns: dict[str, Turn] = {}
        if asked.only != "ours":
            for setting in settings([k for kind in wanted for k in KINDS[kind]], asked.quick):
                for keep in (True, False) if asked.plain else (True,):
                    turns[f"TRL, {setting}{'' if keep else ', plain memory'}"] = Turn(
                        trl.sft, folder, out, setting, *job, threads=threads, keep_memory=keep
                    )
        if asked.only != "trl":
            for kind in wanted:
                turns[f"ours, {kind}"] = Turn(ours.sft, folder, kind, *job, threads=threads)
        steps = in_turn(turns, warm=2, rounds=rounds)
    for name, made in steps.items():
        losses = " to ".join(f"{s.report['loss']:.3f}" for s in (made[0], made[-1]))
        print(f"{table(name, made, PARTS)}, {rate(made):.0f} tokens/s, loss {losses}")
    if asked.only:
        return
    best = {
        side: max((n for n in steps if n.startswith(side)), key=lambda n: rate(steps[n]))
        for side in ("ours", "TRL")
    }
    a, b = rate(steps[best["ours"]]), rate(steps[best["TRL"]])
    claim(
        f"SFT packed at {LENGTH}, {asked.rows} rows a step: {best['ours']}; {best['TRL']}",
        ours=a, peer=b, unit="tokens/s", ratio=a / b, bar=bar(), ok=a / b >= bar(),
        samples=[[n, *(round(s.report["tokens"] / s.seconds) for s in made)] for n, made in steps.items()],
        quick=asked.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
