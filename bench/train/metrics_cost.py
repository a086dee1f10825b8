"""What the figures that decide nothing cost: norms, steps and activations by group of layers (`train/metrics/layer_stats.py`), and the
dashboard.

Blocks of steps in turns, with and without looking, at the shape of a quickstart; each block with one look, as in a run. The
share is that of the seconds inside the figures' own code over those of the block; the blocks' wall-clock times stand beside
it (their difference is below what a shared machine lets one see). The dashboard: a refresh, four times a second, against the
second.

    python bench/train/metrics_cost.py [--quick]
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim

from whorl.machine.device_probe import probe
from whorl.models import DecoderConfig
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.dashboard import Dashboard
from whorl.tracking.progress import Progress
from whorl.tracking.seeds import generator
from whorl.train.job import Job
from whorl.train.lm.pretrain import allocate_shared, build_learner, build_model
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.profiling.step_timer import random_batch

BAR = 0.01


def dashboard_share() -> float:
    """Of a second, by four refreshes with a new number before each."""
    from rich.console import Console

    board = Dashboard(Progress(io.StringIO(), interactive=True))
    board.braille = True
    for step in range(500):
        board.write(
            "pretrain", step, {"nll": 5 / (step + 1) ** 0.5, "tokens_per_second": 2e4, "learning_rate": 1e-3}
        )
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    times = []
    for step in range(500, 540):
        began = time.perf_counter()
        board.write("pretrain", step, {"nll": 1.0})
        console.print(board.render(120, 40))
        times.append(time.perf_counter() - began)
    return 4 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    machine = probe()
    torch.set_num_threads(1)
    model_config = DecoderConfig(
        vocab_size=1024,
        d_model=128,
        n_layers=1 if quick else 3,
        n_heads=2,
        n_kv_heads=2,
        head_dim=64,
        mlp_hidden=512,
    )
    job = Job(tokens="", model=model_config, seq_len=128 if quick else 512, batch_size=8, steps=10**6, dtype=machine.dtype,
              compile=not quick)  # fmt: skip
    model = build_model(job)
    learner = build_learner(model, job, allocate_shared(model, job), ProcessGroup())
    (update,) = learner.updates
    part = random_batch(job, job.batch_size)
    ids = torch.randint(0, 1024, (4, job.seq_len + 1), generator=generator(0, "bench"))
    figures = LayerStats(model, job, learner, ProcessGroup(), ids)
    # A run of 5,000 steps looks once in 50 steps, a longer one more rarely.
    figures.every = 10 if quick else 50
    done = 0

    def block(looking: bool) -> float:
        nonlocal done
        update.grad_hook = figures if looking else None
        began = time.perf_counter()
        for _ in range(figures.every):
            update.accumulate(update.objective(part))
            update.step(1e-3)
            done += 1
            if looking:
                figures.on_step_end(done)
        return time.perf_counter() - began

    block(True)
    figures.pop_metrics()
    rounds = 2 if quick else 9
    shares, blocks = [], {True: [], False: []}
    for number in range(rounds):
        for looking in (True, False) if number % 2 else (False, True):
            figures._seconds = 0.0
            seconds = block(looking)
            blocks[looking].append(seconds / figures.every)
            if looking:
                shares.append(figures._seconds / seconds)
            else:
                figures.steps_done = done  # the steps that were not looked at
                figures._before.clear()
                figures._snapshot_weights()
    share, board = statistics.median(shares), dashboard_share()
    step = {looking: statistics.median(times) for looking, times in blocks.items()}
    print(
        f"a step: {1e3 * step[True]:.2f} ms with one look in {figures.every} steps, {1e3 * step[False]:.2f} ms without; "
        f"the looks are {share:.2%} of it; the dashboard {board:.2%} of one core"
    )
    claim(
        "figures of a run cost at most 1 % of its steps",
        ours=step[True],
        peer=step[False],
        unit="s/step",
        ratio=share,
        bar=BAR,
        ok=share <= BAR,
        samples=[*shares, {"dashboard": board}],
        quick=quick,
    )


if __name__ == "__main__":
    main()
