"""Time to quality: the bits per byte that a plain GPT reaches in ten minutes, reached in a third of the time.

    python bench/train/time_to_quality.py --store .whorl             # after `make quickstart`; about twenty minutes
    python bench/train/time_to_quality.py --store .whorl --quick     # 20 s of the peer, which is not compiled

The corpus is the quickstart's. The peer (`_plain_gpt.py`) is tuned as a careful user would tune it. It gets the width
and depth that the planner would choose for its ten minutes, and the fastest of fp32 and autocast, eager and compiled
(timed here). Trials of a twentieth of its time each choose the best of two vocabularies and three learning rates; they
are not counted. Then it trains for the whole time, and its cosine ends with it. Ours is planned for three tenths of
that time, as machines drift, and trained once. The same code scores both on the whole validation split, in bits per
byte.

Counted is the wall-clock time of training from start to end, with compilation. Ours also includes start-up, validation
and checkpoints.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, emulates_bf16, parse, sized, smoke
from bench.plan._tiny_store import cache_folder, open_store
from bench.plan.scaling_sweep import SilentCallback, token_set, validation_bits
from bench.train._plain_gpt import KINDS, PlainGPT, Setting, Training, heads_of, seconds_per_step, train_for

from whorl.machine.device_probe import probe
from whorl.plan.config import PlanConfig
from whorl.plan.planner import make_plan
from whorl.tokens.shards import TokenSet
from whorl.tracking.progress import Progress
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain

RATES = sized((1e-3, 2e-3, 4e-3), (1e-3,))
EVERY = 8  # with --quick
VOCABULARIES = sized((1024, 4096), (512,))  # without n-gram embeddings a larger vocabulary is better


class Peer:
    """The plain GPT over one token set.

    quick: its steps are not compiled; it is scored on each `EVERY`-th document. Otherwise the fastest setting runs.
    """

    def __init__(self, job: Job, tokens: Path, setting: Setting | None, quick: bool) -> None:
        self.job, self.tokens, self.quick = job, tokens, quick
        split = TokenSet(tokens).split("train")
        self.stream = np.concatenate([np.asarray(ids) for ids in split.iter_documents()])
        self.setting, self.step_seconds = (setting, 0.1) if setting is not None else self._fastest()

    def _training(self, setting: Setting, rate: float = 1e-3) -> Training:
        torch._dynamo.reset()
        torch.manual_seed(0)
        m = self.job.model
        made = PlainGPT(m.vocab_size, m.d_model, m.n_layers, heads_of(m.d_model), self.job.seq_len)
        return Training(made, setting, rate)

    def _fastest(self) -> tuple[Setting, float]:
        found = {}
        slow = self.quick and emulates_bf16()
        for kind in KINDS[: 1 if slow else sized(2, 1)]:  # pure bf16 loses updates below 1/256 of a weight
            for compiled in (False,) if self.quick else (False, True):
                setting = Setting(kind, compiled)
                found[setting] = seconds_per_step(
                    self._training(setting),
                    self.job.model.vocab_size,
                    self.job.batch_size,
                    self.job.seq_len,
                    sized(2.0, 0.02),
                )
                print(f"plain GPT, {setting}: {found[setting] * 1e3:.0f} ms a step", flush=True)
        best = min(found, key=lambda s: found[s])
        return best, found[best]

    def run(self, rate: float, seconds: float, seed: int) -> dict[str, float]:
        training = self._training(self.setting, rate)
        began = time.perf_counter()
        steps = train_for(
            training, self.stream, self.job.batch_size, self.job.seq_len, seconds, self.step_seconds, seed
        )
        spent = time.perf_counter() - began
        return {
            "rate": rate, "seconds": round(spent, 1), "steps": steps,
            "bits_per_byte": validation_bits(
                training.model, self.tokens, self.job.seq_len, EVERY if self.quick else 1
            ),
        }  # fmt: skip


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", default=None)
        parser.add_argument("--seconds", type=float, default=600.0, help="of the peer")

    a = parse(__doc__, arguments, smoke={"seconds": 1.0}, quick={"seconds": 20.0})
    vocabularies, rates = (VOCABULARIES[:1], RATES[1:2] or RATES) if a.quick else (VOCABULARIES, RATES)
    machine = probe()
    machine.apply()
    store, cache = open_store(a.store), cache_folder(Path(tempfile.mkdtemp()))
    size = TokenSet(store.open("quickstart/tokens").path).split("train").n_bytes

    def planned(seconds: float) -> tuple[Job, Path]:
        fixed = {
            "d_model": 64,
            "n_layers": 2,
            "vocab_size": 512,
            "steps": 4,
            "data": {"seq_len": 64},
            "replicas": 1,
            "compile": False,
        }
        config = PlanConfig.model_validate(fixed if smoke() else {"budget": f"{seconds:.0f}s"})
        plan = make_plan(config, machine, size, Progress.silent())
        tokens = token_set(store, plan.vocab_size, cache)
        return plan.job.model_copy(update={"tokens": str(tokens)}), tokens

    job, _ = planned(a.seconds)
    peers: dict[int, Peer] = {}
    setting: Setting | None = None
    for vocabulary in vocabularies:
        shape = job.model.model_copy(update={"vocab_size": vocabulary})
        tokens = token_set(store, vocabulary, cache)
        peers[vocabulary] = Peer(job.model_copy(update={"model": shape}), tokens, setting, a.quick)
        setting = peers[vocabulary].setting
    trials = []
    for vocabulary, peer in peers.items():
        for rate in rates:
            trials.append({"vocabulary": vocabulary, **peer.run(rate, a.seconds / 20, seed=100)})
            print(f"trial: {trials[-1]}", flush=True)
    best = min(trials, key=lambda t: t["bits_per_byte"] if math.isfinite(t["bits_per_byte"]) else 1e9)
    peer = peers[best["vocabulary"]]
    reference = {"shape": f"{job.model.n_layers} x {job.model.d_model}", "vocabulary": best["vocabulary"]}
    reference |= peer.run(best["rate"], a.seconds, seed=0)
    print(f"plain GPT: {reference}", flush=True)

    ours, tokens = planned(0.3 * a.seconds)
    torch._dynamo.reset()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        model = pretrain(ours, Path(scratch), SilentCallback())
    spent = time.perf_counter() - began
    reached, same = (
        validation_bits(model, tokens, windows * ours.seq_len, EVERY if a.quick else 1) for windows in (2, 1)
    )
    print(
        f"ours: {ours.model.n_layers} x {ours.model.d_model}, {ours.steps} steps in {spent:.0f} s: {same:.4f} bits per "
        f"byte in windows of {ours.seq_len}, {reached:.4f} in windows of {2 * ours.seq_len}",
        flush=True,
    )
    claim(
        f"bits per byte after {spent:.0f} s; peer after {reference['seconds']:.0f} s", ours=round(same, 4),
        peer=round(reference["bits_per_byte"], 4), peer_name="plain GPT, AdamW, best rate, type and vocabulary",
        unit="bits per byte", ratio=same / reference["bits_per_byte"], bar=1.0,
        ok=same <= reference["bits_per_byte"] and spent / reference["seconds"] <= 0.34, quick=a.quick,
        samples=[
            {"peer": reference, "setting": str(peer.setting), "trials": trials, "ours": {"seconds": round(spent, 1),
             "steps": ours.steps, "longer windows": round(reached, 4)}}
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
