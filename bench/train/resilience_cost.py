"""The cost of the spike guard, the heartbeat and the rollback snapshots, as a share of a training step.

    python bench/train/resilience_cost.py            # the quickstart's shape
    python bench/train/resilience_cost.py --quick    # a tiny one, to check that it runs

Both sides are measured in one run. The step is that of `train/profiling/step_timer.py`, with all replicas. The added
cost is the guard on a realistic loss curve, a heartbeat while its thread writes the file, and the rollback snapshots.
There is a snapshot every eighth of the run; its time is divided by the steps in between.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse_quick, sized

from whorl.machine.device_probe import probe
from whorl.plan.accounting.model_cost import decoder_config
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.config import SpikeGuardConfig
from whorl.train.job import Job
from whorl.train.lm.build import allocate_shared, build_model
from whorl.train.profiling.step_timer import time_steps
from whorl.train.resilience.heartbeat import Heartbeat
from whorl.train.resilience.rollback import RollbackStore
from whorl.train.resilience.spike_guard import SpikeGuard

ROUNDS = 5
BAR = 0.01  # of a step
STEPS = sized(4000, 100)  # of a run of five minutes


def guard_seconds(steps: int, folder: Path) -> float:
    """Seconds per step of the guard and the heartbeat."""
    rng = random.Random(0)
    guard = SpikeGuard(SpikeGuardConfig(), uniform_loss=math.log(1024), steps=steps)
    with Heartbeat(folder, steps) as heartbeat:
        began = time.perf_counter()
        for step in range(1, steps + 1):
            loss = 2 + 4 * math.exp(-step / 300) + rng.gauss(0, 0.15)
            guard.accept_step(
                {"loss": loss, "nll": loss, "grad_norm": rng.lognormvariate(-1, 0.3), "loss_tokens": 2048.0}
            )
            heartbeat.beat(step)
        return (time.perf_counter() - began) / steps


def main() -> None:
    quick = parse_quick(__doc__)
    machine = probe()
    model = decoder_config(64, 2, 512, ngram_buckets=4096) if quick else decoder_config(192, 3, 2048)
    replicas = 1 if quick else machine.threads
    job = Job(tokens="", model=model, seq_len=sized(256, 64), batch_size=8, steps=STEPS, replicas=replicas,
              dtype=machine.dtype,
              compile=not quick)  # fmt: skip
    samples = []
    for _ in range(1 if quick else ROUNDS):
        step = time_steps(job, seconds=sized(0.5, 0.02) if quick else 3.0).step_seconds
        with tempfile.TemporaryDirectory() as folder:
            guard = guard_seconds(STEPS, Path(folder))
            tensors = allocate_shared(build_model(job), job).tensors()
            with CheckpointManager(Path(folder), {}) as keeper:
                keeper.prepare(tensors)
                began = time.perf_counter()
                RollbackStore(keeper).save(1, tensors)
                keeper.finish()  # written in another process, but counted in full
                snapshots = 8 * (time.perf_counter() - began) / STEPS
        samples.append({"step": step, "guard": guard, "snapshots": snapshots})
        print(
            f"step {step * 1e3:.1f} ms; per step: guard and heartbeat {guard * 1e6:.0f} us, "
            f"snapshots {snapshots * 1e6:.0f} us"
        )
    middle = sorted(samples, key=lambda s: (s["guard"] + s["snapshots"]) / s["step"])[len(samples) // 2]
    added = middle["guard"] + middle["snapshots"]
    claim(
        "spike guard, heartbeat and snapshots per step", ours=added * 1e6, peer=middle["step"] * 1e6,
        peer_name="training step", unit="us per step", ratio=added / middle["step"], bar=BAR,
        ok=added / middle["step"] <= BAR,
        samples=samples,
        quick=quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
