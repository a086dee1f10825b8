"""What watching over a run costs: each step is judged and told to the pulse, every eighth of the run is copied.

    .venv/bin/python bench/train/resilience_cost.py            # the quickstart's shape
    .venv/bin/python bench/train/resilience_cost.py --quick    # a tiny one, to see that it works

Measured beside each other in one run: a training step (`train/profiling/step_timer.py`: the learner as it is, all replicas), and what the
watch adds to it: the guard over a curve as real ones are, a beat of the pulse while its thread writes the heartbeat, and the
copies to go back to, spread over the steps between them.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim

from whorl.machine.device_probe import probe
from whorl.plan.cost import decoder_config
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.config import SpikeGuardConfig
from whorl.train.job import Job
from whorl.train.lm.pretrain import allocate_shared, build_model
from whorl.train.profiling.step_timer import time_steps
from whorl.train.resilience.heartbeat import Heartbeat
from whorl.train.resilience.rollback import RollbackStore
from whorl.train.resilience.spike_guard import SpikeGuard

ROUNDS = 5
BAR = 0.01  # of a step
STEPS = 4000  # of a run of five minutes


def watched(steps: int, folder: Path) -> float:
    """Seconds a step of judging and beating."""
    rng = random.Random(0)
    guard = SpikeGuard(SpikeGuardConfig(), uniform_loss=math.log(1024), steps=steps)
    with Heartbeat(folder, steps) as pulse:
        began = time.perf_counter()
        for step in range(1, steps + 1):
            loss = 2 + 4 * math.exp(-step / 300) + rng.gauss(0, 0.15)
            guard.accept_step(
                {"loss": loss, "nll": loss, "gradient_norm": rng.lognormvariate(-1, 0.3), "count": 2048.0}
            )
            pulse.beat(step)
        return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    machine = probe()
    model = decoder_config(64, 2, 512, ngram_buckets=4096) if a.quick else decoder_config(192, 3, 2048)
    replicas = 1 if a.quick else machine.threads
    job = Job(tokens="", model=model, seq_len=256, batch_size=8, steps=STEPS, replicas=replicas, dtype=machine.dtype,
              compile=not a.quick)  # fmt: skip
    samples = []
    for _ in range(1 if a.quick else ROUNDS):
        step = time_steps(job, seconds=0.5 if a.quick else 3.0).step_seconds
        with tempfile.TemporaryDirectory() as folder:
            judged = watched(STEPS, Path(folder))
            tensors = allocate_shared(build_model(job), job).tensors()
            with CheckpointManager(Path(folder), {}) as keeper:
                keeper.prepare(tensors)
                began = time.perf_counter()
                RollbackStore(keeper).save(1, tensors)
                keeper.finish()  # written in another process; counted as if the step waited for that too
                copied = 8 * (time.perf_counter() - began) / STEPS
        samples.append({"step": step, "judged": judged, "copied": copied})
        print(
            f"a step {step * 1e3:.1f} ms; judging and beating {judged * 1e6:.0f} us, "
            f"copies to go back to {copied * 1e6:.0f} us a step"
        )
    middle = sorted(samples, key=lambda s: (s["judged"] + s["copied"]) / s["step"])[len(samples) // 2]
    added = middle["judged"] + middle["copied"]
    claim(
        "watching over a run costs at most a hundredth of its time", ours=added * 1e6, peer=middle["step"] * 1e6,
        unit="us a step", ratio=added / middle["step"], bar=BAR, ok=added / middle["step"] <= BAR, samples=samples,
        quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
