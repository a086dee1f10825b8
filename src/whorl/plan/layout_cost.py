"""Memory and step time of a job under each layout of a number of ranks, and the choice of `--layout auto`.

    seconds = m S + (pp - 1) S / v  (S: slowest stage of one micro-batch; v: 3 with a zero-bubble schedule)
              + parameters and gradients (fsdp, data) + update

    S = tokens x FLOPs per token of the stage / flops + blocks x layer_seconds + messages of tp, cp and ep.

    A message of an axis with R ranks takes (R - 1) x latency + sent bytes / bandwidth, a send one latency

Nothing is assumed to overlap, so a GPU's step may be shorter. Bytes and calls are those of `layout_traffic.py`.
The ranks of an axis are neighbours if the axis is inner: tp, then cp, fsdp, ep, dp, pp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from whorl.errors import ConfigError
from whorl.machine.device_probe import probe
from whorl.models import Transformer, make_model
from whorl.models.parallel_parts import check_layout
from whorl.nn.compiler import meta_device
from whorl.parallel.layout import AXES, Layout
from whorl.parallel.process_group import world_size
from whorl.parallel.traffic import Total
from whorl.plan.cluster import ClusterSpec
from whorl.plan.layout_traffic import StepShape
from whorl.train.job import Job
from whorl.train.lm.objective import param_optims
from whorl.train.lm.precision import activation_dtype
from whorl.train.optim.optimizer import get_optimizer

SHOWN = 5  # of the choice
ZERO_BUBBLE = {"zero_bubble": 3, "zbv": 3, "interleaved": 2}  # by how much the bubble is shorter


@dataclass(frozen=True)
class LayoutCost:
    """A layout's prediction. refused: why the job cannot run in it, empty if it can.

    seconds: of a step; parts: of it, by "compute", "bubble", "update" and axes. memory_bytes: of the fullest rank.
    sent_bytes: of the first rank in a step.
    """

    layout: Layout
    seconds: float = 0.0
    memory_bytes: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""
    sent_bytes: float = 0.0

    @property
    def name(self) -> str:
        """The layout as `--layout` takes it."""
        given = {axis: getattr(self.layout, axis) for axis in ("dp", "fsdp", "tp", "pp", "cp", "ep")}
        text = ",".join(f"{axis}={n}" for axis, n in given.items() if n > 1)
        return (text or "dp=1") + (f",zero={self.layout.zero}" if self.layout.fsdp > 1 else "")

    @property
    def why(self) -> str:
        """The parts of a step's time, the largest first; or the reason of a refused layout."""
        shares = sorted(self.parts.items(), key=lambda part: -part[1])
        spent = ", ".join(
            f"{name} {100 * s / self.seconds:.0f} %" for name, s in shares if s > 0.01 * self.seconds
        )
        return self.refused or spent


def choose_layout(job: Job, cluster: ClusterSpec, ranks: int, *, must_fit: bool = True) -> list[LayoutCost]:
    """Return all layouts of `ranks` ranks: those that fit by their predicted time, the fastest first; then the refused.

    Raises:
        ConfigError: no layout fits, and one must; with the reason of the one that comes nearest.
    """
    with meta_device():
        model = make_model(job.model, dtype=activation_dtype(job.dtype))
    n_experts = 0 if job.model.experts is None else job.model.experts.n_experts
    found = [layout_cost(job, model, cluster, layout) for layout in layouts(ranks, n_experts)]
    found.sort(key=lambda cost: (bool(cost.refused), cost.seconds or float("inf"), cost.memory_bytes))
    if found[0].refused and must_fit:
        least = min((c for c in found if c.memory_bytes), key=lambda c: c.memory_bytes, default=found[0])
        raise ConfigError(
            f"no layout of {ranks} ranks fits this job; nearest: {least.name}: {least.refused}",
            expected="degrees that divide heads, layers, rows and length, and enough memory",
            do="change the number of ranks, rows or layers, or use more devices",
        )
    return found


def with_layout(job: Job, text: str, log: Callable[[str], None]) -> Job:
    """Return the job under a layout, in which its replicas are the ranks that read different rows.

    text: of `Layout.parse`; or "auto", the fastest that is predicted for the launcher's ranks on this machine; or
        "auto:FILE", on the cluster of a TOML file.

    Raises:
        ConfigError: as `Layout.parse`, `choose_layout` and `ClusterSpec.read`.
    """
    auto, _, file = text.partition(":")
    if auto == "auto":
        ranks = world_size()
        cluster = ClusterSpec.read(Path(file)) if file else ClusterSpec.of_machine(probe(), ranks)
        found = choose_layout(job, cluster, ranks)
        fits = [cost for cost in found if not cost.refused]
        log(f"layouts of {ranks} ranks: {len(fits)} of {len(found)} fit; the fastest are")
        for cost in fits[:SHOWN]:
            log(f"  {cost.name}: {cost.seconds:.3g} s, {cost.memory_bytes / 1e9:.2f} GB per rank; {cost.why}")
        text = fits[0].name
    return job.model_copy(update={"layout": text, "replicas": Layout.parse(text).data_ranks})


def predicted_step(job: Job, mfu: float) -> dict[str, Any]:
    """Return the prediction of a job's step under its layout on this machine, for `report.training.parallel_blocks`.

    mfu: of a step on one rank.
    """
    layout = Layout.parse(job.layout or "")
    with meta_device():
        model = make_model(job.model, dtype=activation_dtype(job.dtype))
    cost = layout_cost(job, model, ClusterSpec.of_machine(probe(), layout.ranks, mfu), layout)
    shape = StepShape(
        model, layout, rows=job.batch_size, length=job.seq_len, micro_batches=micro_batches(job, layout)
    )
    holds = []
    for at in map(layout.at, range(layout.ranks)):
        own = sum(
            prod(s) // (1 if n.startswith("memory.") else layout.fsdp) for n, s in shape.held(at).items()
        )
        blocks = ", ".join(map(str, shape.blocks(at["pp"])))
        holds.append([blocks, f"{job.batch_size // layout.data_ranks:,}", f"{own:,}"])
    sent = [*shape.traffic(0).items(), *shape.update_traffic(0, _matrix_rules(job, model)).items()]
    totals = dict[str, tuple[int, float]]()
    for (axes, operation), total in sent:
        calls, bytes_sent = totals.get(f"{axes} {operation}", (0, 0.0))
        totals[f"{axes} {operation}"] = calls + total.calls, bytes_sent + total.sent
    return {"holds": holds, "seconds": cost.seconds, "totals": totals}


def layouts(ranks: int, n_experts: int) -> Iterator[Layout]:
    """Yield the layouts of a number of ranks. n_experts: of a mixture, 0 without one."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, tp, cp, fsdp in product(divisors, repeat=4):
        dp, rest = divmod(ranks, pp * tp * cp * fsdp)
        if not rest:
            for ep in [n for n in divisors if dp % n == 0 and n_experts % n == 0 < n_experts] or [1]:
                for zero in (1, 2, 3) if fsdp > 1 else (3,):
                    yield Layout(dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero)


def layout_cost(job: Job, model: Transformer, cluster: ClusterSpec, layout: Layout) -> LayoutCost:
    """Return the prediction of one layout. model: the job's, whole; meta is enough."""
    try:
        check_layout(model, layout, job.batch_size, job.seq_len)
        micro = micro_batches(job, layout)
        shape = StepShape(model, layout, rows=job.batch_size, length=job.seq_len, micro_batches=micro)
    except ConfigError as error:
        return LayoutCost(layout, refused=error.what)
    memory = max(_memory(job, shape, pp) for pp in {0, layout.pp - 1})
    if memory > cluster.memory_bytes:
        what = f"needs {memory / 1e9:.2f} GB of a device's {cluster.memory_bytes / 1e9:.2f} GB"
        return LayoutCost(layout, memory_bytes=memory, refused=what)
    parts = _seconds(job, shape, cluster)
    traffic = *shape.traffic(0).values(), *shape.update_traffic(0, _matrix_rules(job, model)).values()
    return LayoutCost(
        layout, sum(parts.values()), memory, parts, sent_bytes=sum(total.sent for total in traffic)
    )


def micro_batches(job: Job, layout: Layout) -> int:
    """Return the micro-batches of a rank.

    Raises:
        ConfigError: a pipeline would have fewer than its stages.
    """
    rows = job.batch_size // layout.data_ranks
    micro = -(-rows // (job.micro_batch_size or rows))
    if layout.pp > 1 and job.micro_batch_size is None:
        micro = rows
    if micro < layout.pp:
        raise ConfigError(f"{micro} micro-batches for {layout.pp} stages of a pipeline")
    return micro


def _memory(job: Job, shape: StepShape, pp: int) -> float:
    """Return the bytes of a rank of the pipeline axis: weights, gradients, moments and kept activations.

    Every rank has the whole weights, too, and its share of all moments, for evaluation and checkpoints.
    """
    layout, model = shape.layout, shape.model
    saved = sum(place.shape.numel() for place in shape.places.values()) * (1 + 2 / layout.ranks)
    held = {n: prod(s) for n, s in shape.held(dict.fromkeys(AXES, 0) | {"pp": pp}).items()}
    whole, tables = sum(held.values()), sum(n for name, n in held.items() if name.startswith("memory."))
    dense = whole - tables
    largest = max(
        (sum(n for m, n in held.items() if m.startswith(f"blocks.{b}.")) for b in shape.blocks(pp)), default=0
    )
    used = 2 * largest if layout.zero == 3 else dense  # gathered
    own = dense / layout.fsdp
    split = own + used if layout.fsdp > 1 else dense
    gradients = split if layout.zero > 1 else dense
    moments = 2 * own / layout.dp  # each rank of dp updates a part
    in_flight = min(shape.micro_batches, layout.pp - pp) if layout.pp > 1 else 1
    share = len(shape.blocks(pp)) / len(model.blocks) / (layout.cp * layout.tp)
    kept = model.activation_bytes(shape.rows, shape.length, device=job.device) * share
    return 4.0 * (saved + split + gradients + moments + tables) + in_flight * kept


def _matrix_rules(job: Job, model: Transformer) -> dict[str, str]:
    """Return the optimizers of matrices that are updated whole, by parameter."""
    rules = {name: rule.optimizer for name, rule in param_optims(model, job.optim).items()}
    return {name: rule for name, rule in rules.items() if rule not in ("adamw", "sparse_adagrad")}


def _seconds(job: Job, shape: StepShape, cluster: ClusterSpec) -> dict[str, float]:
    layout, model, m = shape.layout, shape.model, shape.micro_batches
    tokens = shape.rows * shape.length / (layout.cp * layout.tp)
    head = 6.0 * model.head_weight.numel()
    block = (model.flops_per_token(shape.length) - head) / len(model.blocks)
    rules = _matrix_rules(job, model)
    sizes = dict(zip(AXES, layout.shape, strict=True)) | {"world": layout.ranks, "ends": 2}
    strides = {axis: prod(layout.shape[AXES.index(axis) + 1 :]) for axis in AXES} | {"world": 1, "ends": 1}
    slowest, messages = 0.0, dict[str, float]()

    def seconds(axes: str, operation: str, total: Total) -> float:
        size = prod(sizes[axis] for axis in axes.split("+"))
        link = cluster.link(min(strides[axis] for axis in axes.split("+")), size)
        hops = 1 if operation == "send" else (size - 1) * (2 if operation == "all_reduce" else 1)
        return total.calls * hops * link.latency + total.sent / link.bandwidth

    for pp in sorted({0, layout.pp // 2, layout.pp - 1}):
        blocks, last = len(shape.blocks(pp)), shape.n_stages - 1 in shape.stages(pp)
        compute = tokens * (blocks * block + last * head) / cluster.flops + blocks * cluster.layer_seconds
        rank = pp * strides["pp"]
        sent = dict.fromkeys(AXES, 0.0)
        for (axis, operation), total in shape.traffic(rank).items():
            sent[axis] += seconds(axis, operation, total)
        if compute + sum(sent.values()) / m >= slowest:
            slowest, messages, longest = compute + sum(sent.values()) / m, sent, compute
    parts = {"compute": m * longest, **{axis: s for axis, s in messages.items() if s}}
    inside = longest + sum(messages[axis] for axis in ("tp", "cp", "ep")) / m
    parts["bubble"] = (layout.pp - 1) * inside / ZERO_BUBBLE.get(layout.schedule, 1)
    gradients = shape.update_traffic(0, rules).items()
    parts["gradients"] = sum(seconds(*key, total) for key, total in gradients)
    update = sum(get_optimizer(rule).cost(tuple(shape.places[n].shape)) for n, rule in rules.items())
    every = job.optim.muon_every if job.optim.optimizer == "muon" else 1
    parts["update"] = update / every / cluster.flops / layout.ranks
    return parts
