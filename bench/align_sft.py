"""Supervised fine-tuning with packing at 512, beside TRL's SFTTrainer: tokens a second.

.venv/bin/python bench/align_sft.py [--quick] [--rows 8] [--only trl|ours] [--plain]

Both sides are given the same functions of the standard library as ids, an end behind each; pack whole ones into rows of 512
with a mask between them; and take one clipped step of AdamW from `--rows` rows, every token a target. Both begin with the
same weights, of 6.9 M parameters (`_align_work.py`). Tokens are counted as they come in, padding left out.

TRL is tuned first (`_align_trl.py`): three precisions, and how many rows a forward takes, which matters: it lays them behind
one another, and its attention looks at all pairs. "wrapped" is its other way to pack, which cuts texts anywhere and has no
mask between them: less work, measured too, and its figure counts if it is the better one. Its best and ours take turns, each
in a process of its own, with the same threads and the same allocator (`--plain`: TRL's once more with glibc's own).

The bar, by what the machine can do: 4 x TRL's best with AMX, 1.5 x without.
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

LENGTH, TOKENS = 512, 400_000
PARTS = ("forward", "backward", "optimiser")


def bar() -> float:
    """What was asked for: 4 x where the CPU multiplies tiles of bf16, 1.5 x elsewhere."""
    file = Path("/proc/cpuinfo")
    return 4.0 if file.exists() and "amx_bf16" in file.read_text() else 1.5


def settings(quick: bool) -> list[trl.Setting]:
    """How TRL is tried."""
    first = [trl.Setting(kind, micro=1) for kind in ("fp32", "autocast", "bf16")]
    more = [trl.Setting("bf16", micro=2), trl.Setting("autocast", micro=2)]
    wrapped = [trl.Setting(kind, packing="wrapped") for kind in ("autocast", "bf16")]
    return [*first, wrapped[1]] if quick else [*first, *more, *wrapped]


def rate(steps: list[Step]) -> float:
    """Tokens a second: the median of the steps."""
    return statistics.median(s.report["tokens"] / s.seconds for s in steps)


def learns(steps: list[Step], name: str) -> None:
    """Stops a contender that does no work."""
    losses = [s.report["loss"] for s in steps]
    if not losses[-1] < losses[0] or any(not s.report["norm"] > 0 for s in steps):
        raise SystemExit(f"{name} does not learn: losses {losses}")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--quick", action="store_true")
    options.add_argument("--rows", type=int, default=8, help="packed rows a step")
    options.add_argument("--only", choices=("trl", "ours"))
    options.add_argument("--plain", action="store_true")
    options.add_argument("--rounds", type=int)
    asked = options.parse_args()
    rounds, warm, threads = asked.rounds or (3 if asked.quick else 7), 2, usable_cores()
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        folder = work.write(temporary / "hf")
        job = (work.texts(folder, TOKENS, LENGTH), asked.rows, LENGTH)

        def theirs(setting: trl.Setting, **more: Any) -> Turn:
            return Turn(trl.sft, folder, temporary / "out", setting, *job, threads=threads, **more)

        def mine(kind: str) -> Turn:
            return Turn(ours.sft, folder, kind, *job, threads=threads)

        def tried(name: str, turn: Turn) -> float:
            with turn:
                steps = [turn.step() for _ in range(warm + 3)]
            learns(steps, name)
            print(f"{table(name, steps[warm:], PARTS)}, {rate(steps[warm:]):.0f} tokens/s", flush=True)
            return rate(steps[warm:])

        found: dict[trl.Setting, float] = {}
        if asked.only != "ours":
            for setting in settings(asked.quick):
                found[setting] = tried(f"TRL, {setting}", theirs(setting))
        kinds: dict[str, float] = {}
        if asked.only != "trl":
            kinds = {kind: tried(f"ours, {kind}", mine(kind)) for kind in ours.KINDS}
        if asked.only:
            return
        setting, kind = max(found, key=found.__getitem__), max(kinds, key=kinds.__getitem__)
        with theirs(setting) as peer, mine(kind) as us:
            for _ in range(warm):
                peer.step(), us.step()
            pairs = [(us.step(), peer.step()) for _ in range(rounds)]
        if asked.plain:
            tried(f"TRL, {setting}, its memory as it comes", theirs(setting, keep_memory=False))
    our, their = [a for a, _ in pairs], [b for _, b in pairs]
    a, b = rate(our), rate(their)
    print(table(f"ours, {kind}", our, PARTS))
    print(table(f"TRL, {setting}", their, PARTS))
    claim(
        f"SFT packed at {LENGTH}, {asked.rows} rows a step, ours ({kind}) beside TRL's ({setting})",
        ours=a, peer=b, unit="tokens/s", ratio=a / b, bar=bar(), ok=a / b >= bar(),
        samples=[(round(rate([x])), round(rate([y]))) for x, y in pairs], quick=asked.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
