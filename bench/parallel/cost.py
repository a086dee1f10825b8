"""Predicted against measured time of a step under layouts that the prediction was not fitted to.

    python bench/parallel/cost.py              # two ranks, gloo; minutes on a quiet machine

The cluster is this machine: latency and bandwidth from two all-reduces, FLOP/s and seconds per layer from two steps of one
model with dp=2. All other rows of the table are predictions: other layouts, models, lengths and micro-batches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse

from whorl.models import make_model
from whorl.models.transformer_config import AttentionConfig, MoEConfig, TransformerConfig, whorl_decoder
from whorl.nn.compiler import meta_device
from whorl.parallel.distributed import drive
from whorl.parallel.layout import Layout
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.parallel.ranks import run_ranks
from whorl.plan.cluster import ClusterSpec, Link
from whorl.plan.layout_cost import layout_cost
from whorl.train.config import OptimConfig
from whorl.train.job import Job
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.lm.laid_out import whole_pass

RANKS = 2
FIT = [
    ("llama", "dp=2", 256, 4, 1),
    ("llama", "dp=2", 256, 32, 1),
]  # model, layout, length, rows, micro-batches
CASES = [
    ("llama", "fsdp=2", 256, 16, 1), ("llama", "fsdp=2,zero=2", 256, 16, 2), ("llama", "fsdp=2,zero=1", 256, 16, 1),
    ("llama", "tp=2", 256, 16, 1), ("llama", "tp=2", 512, 4, 1), ("llama", "pp=2", 256, 16, 4),
    ("llama", "pp=2", 256, 16, 8), ("llama", "cp=2", 512, 8, 1), ("llama", "dp=2", 512, 16, 2),
    ("wide", "dp=2", 256, 16, 1), ("wide", "fsdp=2", 256, 16, 1), ("wide", "tp=2", 256, 8, 1),
    ("wide", "pp=2", 256, 16, 4), ("wide", "cp=2", 512, 8, 1), ("ours", "dp=2", 256, 16, 1),
    ("ours", "tp=2", 256, 16, 1), ("ours", "pp=2", 256, 16, 4), ("experts", "dp=2,ep=2", 256, 16, 1),
]  # fmt: skip


def config(name: str) -> TransformerConfig:
    if name == "ours":
        return whorl_decoder(1024, 256, 6, 4, 4, ngram_buckets=4096, mlp_hidden=1024)
    width = 512 if name == "wide" else 256
    attention = AttentionConfig(n_heads=width // 32, n_kv_heads=width // 64, head_dim=32, backend="blocked")
    experts = MoEConfig(n_experts=8, top_k=2, hidden=512) if name == "experts" else None
    return TransformerConfig(
        vocab_size=1024, d_model=width, n_layers=6, mixers={"attention": attention}, mlp_hidden=4 * width,
        mlp="swiglu", experts=experts,
    )  # fmt: skip


def job_of(name: str, text: str, length: int, rows: int, micro: int) -> Job:
    layout = Layout.parse(text)
    return Job(
        tokens="", model=config(name), seq_len=length, batch_size=rows, steps=1, replicas=layout.data_ranks,
        micro_batch_size=rows // layout.data_ranks // micro, layout=text, compile=False, deterministic=True,
        optim=OptimConfig(muon_every=1),
    )  # fmt: skip


def step_seconds(group: ProcessGroup, case: Sequence[Any], steps: int) -> float:
    """Median seconds of a step of this rank."""
    job = job_of(*case)
    model = build_model(job)
    learner = build_learner(model, job, allocate_shared(model, job), group)
    (update,), times = learner.updates, []
    rows, size = job.batch_size // job.replicas, job.micro_batch_size or 1
    ids = torch.randint(0, 1024, (rows, job.seq_len + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    batch["loss_mask"] = torch.ones(rows, job.seq_len, dtype=torch.bool)
    parts: Any = [{n: t[i : i + size] for n, t in batch.items()} for i in range(0, rows, size)]
    for _ in range(steps + 2):
        dist.barrier()
        began = time.perf_counter()
        update.accumulate(update.objective(whole_pass(parts, job)))
        update.step(1.0)
        times.append(time.perf_counter() - began)
    return median(times[2:])


def link(group: ProcessGroup) -> tuple[float, float]:
    """Latency and bandwidth of an all-reduce of two ranks."""
    seconds = []
    for size in (256, 1 << 21):
        tensor, times = torch.ones(size), []
        for _ in range(30):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        seconds.append(median(times))
    return seconds[0] / 2, 4 * (1 << 21) / (seconds[1] - seconds[0])


def measure(cases: Sequence[Sequence[Any]], steps: int) -> tuple[tuple[float, float], list[float]]:
    """The driver: the link, and the seconds of each case."""
    group = spawn_replicas(RANKS, _link)
    try:
        found = link(group)
    finally:
        group.close()
    times = []
    for case in cases:
        group = spawn_replicas(RANKS, _steps, case, steps)
        try:
            times.append(step_seconds(group, case, steps))
        finally:
            group.close()
        print(*case, f"{times[-1]:.4f} s", flush=True)
    return found, times


def _link(group: ProcessGroup) -> None:
    link(group)


def _steps(group: ProcessGroup, case: Sequence[Any], steps: int) -> None:
    step_seconds(group, case, steps)


def predict(case: Sequence[Any], cluster: ClusterSpec) -> Any:
    job = job_of(*case)
    with meta_device():
        model = make_model(job.model)
    found = layout_cost(job, model, cluster, Layout.parse(job.layout or ""))
    assert not found.refused, found.refused
    return found


def fitted(found: tuple[float, float], times: Sequence[float]) -> ClusterSpec:
    """FLOP/s and seconds per layer with which the cases of FIT are predicted exactly."""
    given = {
        "devices_per_node": RANKS,
        "memory_bytes": 1e12,
        "node": Link(latency=found[0], bandwidth=found[1]),
    }
    low, high = 1e9, 1e13
    for _ in range(60):  # the seconds per layer follow from the first case, the FLOP/s from the second
        flops = (low * high) ** 0.5
        bare = predict(FIT[0], ClusterSpec(flops=flops, **given)).seconds
        layer = max(0.0, (times[0] - bare) / config(FIT[0][0]).n_layers)
        cluster = ClusterSpec(flops=flops, layer_seconds=layer, **given)
        low, high = (low, flops) if predict(FIT[1], cluster).seconds < times[1] else (flops, high)
    return cluster


def main() -> None:
    args = parse(__doc__, lambda p: p.add_argument("--steps", type=int, default=7), smoke={"steps": 1})
    cases = [*FIT, *(CASES[::6] if args.smoke else CASES)]
    found, times = run_ranks(
        RANKS,
        drive,
        measure,
        cases,
        args.steps,
        timeout=1800.0,
        preload=("whorl.parallel.layout", "whorl.train.lm.build"),
    )[0]
    cluster = fitted(found, times)
    print(f"flops {cluster.flops:.3g}, layer {cluster.layer_seconds:.3g} s, {cluster.node}")
    rows = []
    for case, seconds in zip(cases[2:], times[2:], strict=True):
        cost = predict(case, cluster)
        rows.append([*case, round(cost.seconds, 4), round(seconds, 4), round(cost.seconds / seconds - 1, 3)])
        print(
            *case,
            f"predicted {cost.seconds:.4f} s, measured {seconds:.4f} s: {rows[-1][-1]:+.1%}  ({cost.why})",
        )
    errors = [abs(row[-1]) for row in rows]
    claim(
        f"predicted time of a step, {len(rows)} layouts that were not fitted: median error", ours=median(errors), peer=0.15,
        unit="relative error", ratio=median(errors), bar=0.15, ok=median(errors) <= 0.15, samples=rows, peer_name="bar",
    )  # fmt: skip


if __name__ == "__main__":
    main()
