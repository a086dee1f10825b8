"""The fraction of a training step that the trainer waits for its next batch.

    python bench/tokens/loader_share.py --store .whorl      # the store must hold a quickstart

Trains the planned model for some steps, first from ready shards with the loader in a separate process, as in a recipe.
The second run has the same documents as JSONL. One process for each replica reads, tokenizes and packs them during
training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.plan._tiny_store import open_store
from bench.plan.scaling_sweep import SilentCallback

from whorl.corpus import Corpus
from whorl.corpus.blocks import Source
from whorl.train.job import Job, JobStreamConfig
from whorl.train.lm.pretrain import pretrain


class WaitRecorder(SilentCallback):
    """A callback that stores the fraction of each step spent waiting for data."""

    def __init__(self) -> None:
        self.fractions: list[float] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.fractions.append(metrics["time/data_fraction"])


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", default=None)
        parser.add_argument("--steps", type=int, default=200)

    a = parse(__doc__, arguments, smoke={"steps": 6}, quick={"steps": 30})
    store = open_store(a.store)
    plan = json.loads(store.open("quickstart/plan").file("plan.json").read_text())
    job = Job.model_validate({**plan["job"], "tokens": str(store.open("quickstart/tokens").path)})
    if a.quick:
        job = job.model_copy(update={"evaluations": 1, "compile": False})
    corpus = Corpus(store.open("quickstart/ingest").path, store.open("quickstart/curate").path)
    with tempfile.TemporaryDirectory() as folder:
        jsonl = Path(folder) / "train.jsonl"
        with jsonl.open("w") as file:
            file.writelines(json.dumps({"text": d.text}) + "\n" for d in corpus.documents("train"))
        tokenizer = str(store.open("quickstart/tokenizer").path)
        stream = JobStreamConfig(tokenizer=tokenizer, sources=[Source([str(jsonl)])])
        for name, one in (("ready shards", job), ("raw text", job.model_copy(update={"stream": stream}))):
            recorder = WaitRecorder()
            pretrain(one, Path(folder) / name, recorder, checkpoint_seconds=1e9, stop_after=a.steps)
            settled = recorder.fractions[sized(2, 0) :]
            percent = 100 * sum(settled) / len(settled)
            claim(
                f"share of a step spent waiting for data, {name}", ours=percent, peer=1.0, peer_name="bar", unit="%",
                ratio=percent, bar=1.0, ok=percent < 1.0, quick=a.quick, variant="" if name == "ready shards" else "raw",
                samples=[round(s, 5) for s in settled[:20]],
            )  # fmt: skip


if __name__ == "__main__":
    main()
