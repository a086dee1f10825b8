"""The cost of layer statistics (`train/metrics/layer_stats.py`) and of the dashboard.

    python bench/train/metrics_cost.py [--quick]

Blocks of steps run in turns, with and without layer statistics, at the shape of a quickstart. Each block holds one
measurement, as in a run. The share is the time inside the statistics' code over the time of the block. The blocks'
wall-clock times are reported too; their difference is below the noise of a shared machine. The dashboard's share is the
time of four refreshes per second.
"""

from __future__ import annotations

import io
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse_quick, sized

from whorl.machine.device_probe import probe
from whorl.models import whorl_decoder
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.dashboard import Dashboard
from whorl.tracking.progress import Progress
from whorl.tracking.seeds import generator
from whorl.train.job import Job
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.profiling.step_timer import random_batch

BAR = 0.01


def dashboard_share() -> float:
    """Fraction of a second that four refreshes take, with a new value before each."""
    from rich.console import Console

    board = Dashboard(Progress(io.StringIO(), interactive=True))
    board.braille = True
    for step in range(500):
        board.write(
            "pretrain", step, {"nll": 5 / (step + 1) ** 0.5, "tokens_per_second": 2e4, "learning_rate": 1e-3}
        )
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    times = []
    for step in range(500, sized(540, 504)):
        began = time.perf_counter()
        board.write("pretrain", step, {"nll": 1.0})
        console.print(board.render(120, 40))
        times.append(time.perf_counter() - began)
    return 4 * statistics.median(times)


def main() -> None:
    quick = parse_quick(__doc__)
    machine = probe()
    torch.set_num_threads(1)
    model_config = whorl_decoder(
        vocab_size=1024,
        d_model=128,
        n_layers=1 if quick else 3,
        n_heads=2,
        n_kv_heads=2,
        head_dim=64,
        mlp_hidden=512,
    )
    job = Job(tokens="", model=model_config, seq_len=sized(128, 32) if quick else 512, batch_size=8, steps=10**6,
              dtype=machine.dtype,
              compile=not quick)  # fmt: skip
    model = build_model(job)
    learner = build_learner(model, job, allocate_shared(model, job), ProcessGroup())
    (update,) = learner.updates
    part = random_batch(job, job.batch_size)
    ids = torch.randint(0, 1024, (4, job.seq_len + 1), generator=generator(0, "bench"))
    stats = LayerStats(
        learner, steps=job.steps, batch_rows=8, muon_every=job.optim.muon_every, model=model, ids=ids[:, :-1]
    )
    # A run of 5,000 steps measures once in 50 steps, a longer one less often.
    stats.every = sized(10, 3) if quick else 50
    done = 0

    def block(measuring: bool) -> float:
        nonlocal done
        update.grad_hook = stats if measuring else None
        began = time.perf_counter()
        for _ in range(stats.every):
            update.accumulate(update.objective(part))
            update.step(1e-3)
            done += 1
            if measuring:
                stats.on_step_end(done)
        return time.perf_counter() - began

    block(True)
    stats.pop_metrics()
    rounds = sized(2, 1) if quick else 9
    shares, blocks = [], {True: [], False: []}
    for number in range(rounds):
        for measuring in (True, False) if number % 2 else (False, True):
            stats._seconds = 0.0
            seconds = block(measuring)
            blocks[measuring].append(seconds / stats.every)
            if measuring:
                shares.append(stats._seconds / seconds)
            else:
                stats.steps_done = done  # steps without measurements
                stats._before.clear()
                stats._snapshot_weights()
    share, board = statistics.median(shares), dashboard_share()
    step = {measuring: statistics.median(times) for measuring, times in blocks.items()}
    print(
        f"step: {1e3 * step[True]:.2f} ms with one measurement in {stats.every} steps, {1e3 * step[False]:.2f} ms without; "
        f"the measurements take {share:.2%} of it, the dashboard {board:.2%} of one core"
    )
    claim(
        "a step with layer statistics; their share at most 1 %", ours=step[True], peer=step[False],
        peer_name="without statistics", unit="s/step", ratio=share, bar=BAR, ok=share <= BAR,
        samples=[*shares, {"dashboard": board}], quick=quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
