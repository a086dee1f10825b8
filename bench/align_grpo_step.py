"""A whole step of GRPO, from prompts to new weights, beside TRL's GRPOTrainer: seconds.

.venv/bin/python bench/align_grpo_step.py [--quick] [--prompt 32] [--beta 0.0] [--only trl|ours] [--plain]

A step: 16 prompts, 8 answers of exactly 32 tokens to each, sampled at temperature 1; rewards; advantages within each group;
log-probabilities with their entropies; one backward, one clipped step of AdamW. Both sides begin with the same weights, of
6.9 M parameters (`_align_work.py`), and learn at the same rate from the same prompts, in the loss that TRL has by default:
over all tokens, without a reference model (`--beta` above 0: with one, on both sides). No end comes early on either side.

TRL is tuned first (`_align_trl.py`): three precisions, the batch whole or in parts, both caches of `generate`. Continuous
batching and `torch_compile` were tried and are left out, being slower (docs/align.md). Its best and ours take turns, each in
a process of its own. Both have the same threads and the same allocator, which keeps what it was given; `--plain` measures
TRL's best once more as it comes, with glibc's habit of handing memory back.

The bar: 4 x TRL's best. The line's samples are the single steps; what each side spends on what is printed above it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import _align_ours as ours
import _align_trl as trl
import _align_work as work
from _claim import claim
from _turns import Step, Turn, table

from whorl.runs.machine import usable_cores

PROMPTS, GROUP, NEW, BAR = 16, 8, 32, 4.0
PARTS = ("generation", "rewards", "reference", "log-probs", "backward", "optimiser")


def settings(quick: bool) -> list[trl.Setting]:
    """How TRL is tried: each precision as it comes; then what may be better for the 16-bit ones."""
    first = [trl.Setting(kind) for kind in ("fp32", "autocast", "bf16")]
    more = [trl.Setting(kind, micro=32) for kind in ("fp32", "autocast", "bf16")]
    return first if quick else [*first, *more, trl.Setting("bf16", micro=32, cache="static")]


def learns(steps: list[Step], name: str) -> None:
    """Stops a contender that does no work."""
    if any(not s.report["norm"] > 0 for s in steps):
        raise SystemExit(f"{name}: a step without a gradient")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--quick", action="store_true")
    options.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    options.add_argument("--beta", type=float, default=0.0)
    options.add_argument("--only", choices=("trl", "ours"))
    options.add_argument("--plain", action="store_true")
    options.add_argument("--rounds", type=int)
    asked = options.parse_args()
    rounds, warm, threads = asked.rounds or (3 if asked.quick else 7), 2, usable_cores()
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        folder = work.write(temporary / "hf")
        prompts = work.prompts(folder, PROMPTS, asked.prompt)
        job = (prompts, GROUP, NEW, asked.beta)

        def theirs(setting: trl.Setting, **more: Any) -> Turn:
            return Turn(trl.grpo, folder, temporary / "out", setting, *job, threads=threads, **more)

        def mine(kind: str) -> Turn:
            return Turn(ours.grpo, folder, kind, *job, threads=threads)

        def tried(name: str, turn: Turn) -> float:
            with turn:
                steps = [turn.step() for _ in range(warm + 3)][warm:]
            learns(steps, name)
            print(table(name, steps, PARTS), flush=True)
            return statistics.median(s.seconds for s in steps)

        found: dict[trl.Setting, float] = {}
        if asked.only != "ours":
            for setting in settings(asked.quick):
                found[setting] = tried(f"TRL, {setting}", theirs(setting))
        kinds: dict[str, float] = {}
        if asked.only != "trl":
            kinds = {kind: tried(f"ours, {kind}", mine(kind)) for kind in ours.KINDS}
        if asked.only:
            return
        setting, kind = min(found, key=found.__getitem__), min(kinds, key=kinds.__getitem__)
        with theirs(setting) as peer, mine(kind) as us:
            for _ in range(warm):
                peer.step(), us.step()
            pairs = [(us.step(), peer.step()) for _ in range(rounds)]
        our, their = [a for a, _ in pairs], [b for _, b in pairs]
        print(table(f"ours, {kind}", our, PARTS))
        print(table(f"TRL, {setting}", their, PARTS))
        if asked.plain:
            tried(f"TRL, {setting}, its memory as it comes", theirs(setting, keep_memory=False))
    a, b = (statistics.median(s.seconds for s in steps) for steps in (our, their))
    claim(
        f"a GRPO step of {PROMPTS} prompts of {asked.prompt} tokens x {GROUP} answers of {NEW}, beta {asked.beta}, ours "
        f"({kind}) beside TRL's ({setting})",
        ours=a, peer=b, unit="s", ratio=b / a, bar=BAR, ok=b / a >= BAR,
        samples=[(round(x.seconds, 4), round(y.seconds, 4)) for x, y in pairs], quick=asked.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
