"""A run of a study: a stable run with its decay branches, and their losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whorl.evals.baselines import spread
from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.machine.device_probe import Machine
from whorl.plan.accounting.model_cost import training_cost
from whorl.plan.config import FRACTIONS, PlanConfig
from whorl.plan.planner import make_plan
from whorl.tokens.shards import TokenSet
from whorl.tracking.progress import Progress
from whorl.train.checkpoint.manager import branch_folder
from whorl.train.job import Job
from whorl.train.lm import decay_branches as branches
from whorl.train.lm.pretrain import pretrain
from whorl.train.profiling.step_timer import time_steps
from whorl.train.task import StepFunction

USABLE = 0.75  # of a budget of seconds: the rest starts, scores and saves runs
SCORED_BYTES = 400_000  # of the test split at most


def flops_in(seconds: float, machine: Machine) -> float:
    """Return the FLOPs that runs of a study do in a time, by timed steps of one shape."""
    job = make_plan(PlanConfig(steps=1000, d_model=128, n_layers=3), machine, 10**12, Progress.silent()).job
    cost = training_cost(job.model, batch_size=job.batch_size, seq_len=job.seq_len, replicas=1)
    rate = cost.token_flops * job.batch_size * job.seq_len / time_steps(job, seconds=0.5).step_seconds
    return USABLE * seconds * rate


def train_run(job: Job, scratch: Path, fractions: Sequence[float] = FRACTIONS, **options: Any) -> list[float]:
    """Train a stable run and its branches, and return their bits per byte. options: of `pretrain`."""
    quiet, losses = StepFunction(lambda step, metrics: None), list[float]()
    options |= {"checkpoint_seconds": 30.0}
    points = {share: branches.branch_step(job, share) for share in fractions[:-1]}
    stable = pretrain(job, scratch / "stable", quiet, branch_points=[*points.values()], **options)
    for share, at in points.items():
        start = branch_folder(scratch / "stable", at) / f"step-{at:08d}"
        branch = pretrain(
            branches.branch_job(job, share), scratch / str(share), quiet, branch_start=start, **options
        )
        losses.append(score(branch, job.tokens))
    return [*losses, score(stable, job.tokens)]


def score(model: Any, tokens: str) -> float:
    """Return bits per byte of test files at equal distances, SCORED_BYTES in all; of another split without any."""
    found = TokenSet(Path(tokens))
    split = next(s for s in map(found.split, ("test", "validation", "train")) if s.n_documents)
    chosen = spread(range(split.n_documents), min(1.0, SCORED_BYTES / split.n_bytes))
    sizes = split.documents["bytes"].to_pylist()
    nats = document_nats(model.eval(), map(split.document, chosen), model.eval_window)
    return bits_per_byte(sum(nats), sum(sizes[i] for i in chosen))
