"""Seconds of the quickstart's `ingest` and `curate`, against those of an earlier version of the project.

    python bench/quickstart/corpus_steps.py --before CHECKOUT [--rounds 3] [--save]

CHECKOUT is a checkout of the version to compare with: `git worktree add CHECKOUT 165fbbee`, whose corpus room has no
units of work. Both run in this interpreter with fresh stores, in turn. The figure is the ratio of the medians of
what the two artifacts record as their time. The first run of each, which may compile native code, is not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import ROOT, claim, parse, smoke

from whorl.store import Store

STEPS = ("ingest", "curate")


def seconds(checkout: Path) -> list[float]:
    """Return the seconds of each step in a fresh store. Raises SystemExit: the command failed."""
    small = ["--set", f'ingest.sources=["{ROOT / "src" / "whorl" / "objectives"}"]'] if smoke() else []
    with tempfile.TemporaryDirectory() as store:
        command = [
            sys.executable,
            "-m",
            "whorl.cli",
            "run",
            "quickstart",
            "--until",
            "curate",
            "--store",
            store,
            *small,
        ]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(checkout / "src")},
            cwd=checkout,
            text=True,
            capture_output=True,
        )
        if done.returncode:
            sys.exit(f"the quickstart of {checkout} failed:\n{done.stderr[-2000:]}")
        opened = Store(store)
        return [round(opened.open(f"quickstart/{step}").manifest.seconds, 3) for step in STEPS]


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument("--before", type=Path, help="checkout of the earlier version"),
            parser.add_argument("--rounds", type=int, default=3),
        ),
        smoke={"rounds": 1},
    )
    if args.before is None:
        print("--before CHECKOUT is needed")
        sys.exit(77)
    before, now = list[list[float]](), list[list[float]]()
    seconds(args.before), seconds(ROOT)
    for _ in range(args.rounds):
        before.append(seconds(args.before.resolve()))
        now.append(seconds(ROOT))
        print(f"{STEPS}: before {before[-1]}, now {now[-1]}", flush=True)
    ours, peer = (statistics.median(map(sum, some)) for some in (now, before))
    claim(
        "Ingest and curate of the quickstart, against version 165fbbee", ours=round(ours, 2), peer=round(peer, 2),
        peer_name="165fbbee", unit="s", ratio=ours / peer, bar=1.2, ok=ours <= 1.2 * peer, samples=[before, now],
    )  # fmt: skip


if __name__ == "__main__":
    main()
