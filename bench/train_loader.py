"""The loader's share of a training step: how long the trainer waits for its next batch.

    .venv/bin/python bench/train_loader.py --store .whorl      # the store must hold a quickstart

Trains the planned model for some steps with the loader in its own process, as a run does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _claim import claim
from plan_sweep import Quiet

from whorl.store import Store
from whorl.train.pretrain import Job, pretrain


class Shares(Quiet):
    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.shares.append(metrics["loader_share"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default=None)
    parser.add_argument("--steps", type=int, default=200)
    a = parser.parse_args()
    store = Store(a.store)
    plan = json.loads(store.open("quickstart/plan").file("plan.json").read_text())
    job = Job.model_validate({**plan["job"], "tokens": str(store.open("quickstart/tokens").path)})
    shares = Shares()
    with tempfile.TemporaryDirectory() as scratch:
        pretrain(job, Path(scratch), shares, checkpoint_seconds=1e9, stop_after=a.steps)
    settled = shares.shares[2:]
    share = sum(settled) / len(settled)
    claim(
        "the loader's share of a training step", ours=share, peer=1.0, unit="share", ratio=share, bar=0.01,
        ok=share < 0.01, samples=[round(s, 5) for s in settled[:20]],
    )  # fmt: skip


if __name__ == "__main__":
    main()
