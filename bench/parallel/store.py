"""Two ranks over gloo give the bits of two replicas that share memory, and are about as fast.

    python bench/parallel/store.py --ref COMMIT        # also shared memory now against that commit

Each measurement is one process, which times steps of one job, 6 layers of width 384; the kinds take turns.

    shared          replicas that share memory            ref           the same at another commit
    gloo            ranks of a world                      shared_adamw, gloo_adamw    AdamW alone, no look-up tables
    ddp             torch's DistributedDataParallel and ZeroRedundancyOptimizer(AdamW, fused) with the same model
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import ROOT, claim, parse

KINDS = ("shared", "ref", "gloo", "gloo_adamw", "ddp")


def make_job(args: argparse.Namespace, kind: str) -> Any:
    """Return the job of a kind."""
    from whorl.plan.accounting.model_cost import decoder_config
    from whorl.train.job import Job

    adamw = kind.endswith("adamw") or kind == "ddp"
    tables: Any = {"ngram_orders": ()} if adamw else {"ngram_buckets": 1 << 16}
    model = decoder_config(args.width, args.layers, 4096, **tables)
    settings = {"tokens": "", "model": model, "seq_len": args.length, "batch_size": args.rows, "steps": 100, "replicas": 2,
                "compile": False, "dtype": args.dtype}  # fmt: skip
    if adamw:
        settings["optim"] = {"optimizer": "adamw"}
    return Job.model_validate({**settings, "deterministic": kind.startswith("bits")})


def seconds_of(job: Any, seconds: float) -> float:
    """Return the seconds of a step."""
    from whorl.train.profiling.step_timer import time_steps

    return time_steps(job, seconds).step_seconds


def train(group: Any, job: Any, shared: Any) -> None:
    """Train five steps; every rank calls this."""
    from whorl.train.determinism import deterministic
    from whorl.train.lm.build import build_learner, build_model
    from whorl.train.profiling.step_timer import random_batch

    with deterministic():
        (update,) = build_learner(build_model(job), job, shared, group).updates
        for step in range(5):
            batch = random_batch(job, job.batch_size // job.replicas, 16 * group.rank + step)
            update.accumulate(update.objective(batch))
            update.step(1.0)


def bits_of(job: Any) -> str:
    """Return a hash of the weights after some steps on two ranks."""
    from whorl.parallel.process_group import spawn_replicas
    from whorl.train.lm.build import allocate_shared, build_model

    shared = allocate_shared(build_model(job), job)
    group = spawn_replicas(2, train, job, shared)
    try:
        train(group, job, shared)
    finally:
        group.close()
    digest = hashlib.sha256()
    for name, weight in sorted(shared.weights.items()):
        digest.update(name.encode() + weight.contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def on_world(function: Any, *args: Any) -> Any:
    """Run a function on the driver of a world."""
    from whorl.parallel.distributed import drive

    return drive(function, *args)


def ddp_seconds(job: Any, seconds: float) -> float:
    """Return the seconds of a step of torch's DDP with sharded AdamW."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from whorl.parallel.process_group import ProcessGroup
    from whorl.train.lm.build import build_model
    from whorl.train.lm.objective import LMObjective
    from whorl.train.metrics.moe_balance import MoEBalancer
    from whorl.train.profiling.step_timer import random_batch

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(job)
            moe = MoEBalancer(self.model, job.routing, ProcessGroup())
            self.objective = LMObjective(self.model, moe, z_loss=job.z_loss, compile=False)

        def forward(self, batch: Any) -> Any:
            loss = self.objective(batch)
            return loss.total / loss.count

    net: Any = DistributedDataParallel(Whole(), gradient_as_bucket_view=True)
    kind = torch.optim.AdamW
    optimizer: Any = ZeroRedundancyOptimizer(net.parameters(), kind, lr=1e-3, fused=True)
    rank = torch.distributed.get_rank()
    batches = [random_batch(job, job.batch_size // 2, 16 * rank + n) for n in range(16)]
    times: list[float] = []
    stop = torch.zeros(1)
    while not stop.item():
        began = time.perf_counter()
        net(batches[len(times) % 16]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        stop.fill_(len(times) >= 6 and sum(times[3:]) > seconds)
        torch.distributed.broadcast(stop, 0)
    return median(times[3:])


def measure(args: argparse.Namespace) -> None:
    """Print one measurement as JSON."""
    kind, (function, *rest) = args.measure, (seconds_of, args.seconds)
    job = make_job(args, kind)
    if kind.startswith("bits"):
        function, rest = bits_of, []
    if kind == "ddp":
        from whorl.parallel.ranks import run_ranks

        found = max(run_ranks(2, ddp_seconds, job, args.seconds, timeout=1200.0))
    elif "gloo" in kind:
        from whorl.parallel.ranks import run_ranks

        found = run_ranks(2, on_world, function, job, *rest, timeout=1200.0)[0]
    else:
        found = function(job, *rest)
    print(json.dumps(found))


def run(kind: str, source: Path, args: argparse.Namespace) -> Any:
    """Measure a kind in a new process, with the package in `source`."""
    given = {n: getattr(args, n) for n in ("width", "layers", "length", "rows", "seconds", "dtype")}
    options = [f"--{name}={value}" for name, value in given.items()]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", kind, *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ref", help="a commit to compare shared memory with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--measure", help="print one measurement of a kind")


def main() -> None:
    tiny = {"rounds": 1, "seconds": 0.1, "width": 64, "layers": 1, "length": 32, "rows": 4}
    args = parse(__doc__, add_options, smoke=tiny)
    if args.measure:
        measure(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        kinds = [kind for kind in KINDS if kind != "ref" or args.ref]
        sources = dict.fromkeys(kinds, ROOT / "src")
        if args.ref:
            archive = subprocess.run(
                ["git", "archive", args.ref, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True
            )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            sources["ref"] = Path(folder) / "src"
        bits = [run(f"bits {kind}", ROOT / "src", args) for kind in ("shared", "gloo")]
        claim(
            "two ranks over gloo have the bits of shared memory after five steps", ours=float(bits[0] == bits[1]),
            peer=1.0, unit="equal", ratio=float(bits[0] == bits[1]), bar=1.0, ok=bits[0] == bits[1], variant="bits",
        )  # fmt: skip
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(args.rounds):
            for kind in kinds[:: 1 if number % 2 else -1]:
                found[kind].append(run(kind, sources[kind], args))
                print(f"{kind}: {found[kind][-1] * 1e3:.1f} ms", file=sys.stderr, flush=True)
    pairs = [("shared", "ref", 0.98), ("gloo", "shared", 0.85), ("gloo_adamw", "ddp", 1.0)]
    for ours, peer, bar in pairs:
        if peer not in found:
            continue
        ratio = median(b / a for a, b in zip(found[ours], found[peer], strict=True))
        claim(
            f"speed of a step, {ours} against {peer}", ours=1 / median(found[ours]), peer=1 / median(found[peer]),
            unit="steps/s", ratio=ratio, bar=bar, ok=ratio >= bar, peer_name=peer, variant=f"{ours}-{peer}",
            samples=[found[ours], found[peer]], quick=args.smoke,
        )  # fmt: skip


if __name__ == "__main__":
    main()
