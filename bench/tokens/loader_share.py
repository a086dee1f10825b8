"""The loader's share of a training step: how long the trainer waits for its next batch.

    .venv/bin/python bench/tokens/loader_share.py --store .whorl      # the store must hold a quickstart

Trains the planned model for some steps, first from ready shards with the loader in its own process, as a run does;
then from the same documents as JSONL, read, tokenised and packed on the way by one process for each replica.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.plan.scaling_sweep import Quiet

from whorl.corpus import Corpus
from whorl.corpus.blocks import Source
from whorl.store import Store
from whorl.train.job import Job, TextStreamConfig
from whorl.train.lm.pretrain import pretrain


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
    corpus = Corpus(store.open("quickstart/ingest").path, store.open("quickstart/curate").path)
    with tempfile.TemporaryDirectory() as folder:
        jsonl = Path(folder) / "train.jsonl"
        with jsonl.open("w") as file:
            file.writelines(json.dumps({"text": d.text}) + "\n" for d in corpus.documents("train"))
        words = str(store.open("quickstart/tokenizer").path)
        raw = TextStreamConfig(tokenizer=words, sources=[Source([str(jsonl)])])
        for name, one in (("ready shards", job), ("raw text", job.model_copy(update={"raw": raw}))):
            shares = Shares()
            pretrain(one, Path(folder) / name, shares, checkpoint_seconds=1e9, stop_after=a.steps)
            settled = shares.shares[2:]
            share = sum(settled) / len(settled)
            claim(
                f"the loader's share of a training step, from {name}", ours=share, peer=1.0, unit="share", ratio=share,
                bar=0.01, ok=share < 0.01, samples=[round(s, 5) for s in settled[:20]],
            )  # fmt: skip


if __name__ == "__main__":
    main()
