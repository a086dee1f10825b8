"""Every layout trains as one rank does, and eleven planted faults are each caught.

    python bench/parallel/equal.py                # 20 steps; each axis at 2 and 4 ranks, pairs, dp2 x tp2 x pp2
    python bench/parallel/equal.py --layouts tp=2 # some of them

Distance: the largest relative difference, over all parameters, of what training changed: |(a - b)| / |b - start|, where b is
one rank. The control is one rank with other micro-batches, the farthest of three; a layout may be 3 x as far. Losses and
norms count, too. A pipeline must have the bits of one rank with the same micro-batches. A fault is caught where the distance
exceeds the bar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse

from whorl.models.transformer_config import AttentionConfig, MoEConfig, TransformerConfig, whorl_decoder
from whorl.parallel import layout as layouts
from whorl.parallel import layout_store, parameter_layout, pipeline, ring_attention, tensor_parallel
from whorl.parallel.distributed import drive
from whorl.parallel.layout import Layout
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.parallel.ranks import run_ranks
from whorl.train.config import OptimConfig, RoutingConfig
from whorl.train.job import Job
from whorl.train.learner.learner import Learner
from whorl.train.lm import laid_out
from whorl.train.lm.build import allocate_shared, build_learner, build_model

VOCABULARY, LENGTH, ROWS = 259, 32, 16  # no degree divides 259
BAR = 3.0
CONTROLS = (2, 8, 16)  # rows of a micro-batch on one rank; layouts have 4, pipelines 1
PRELOAD = ("whorl.parallel.layout", "whorl.train.lm.build", "whorl.parallel.distributed")
MODELS = {
    "llama": {"mlp": "swiglu"},
    "tied": {"mlp": "swiglu", "tie_embeddings": True},
    "sharing": {"mlp": "swiglu", "kv_sharing_factor": 2},
    "experts": {"experts": MoEConfig(n_experts=4, top_k=2, hidden=32, shared_hidden=32)},
}
LAYOUTS = {
    "llama": [
        "dp=2", "dp=4", "fsdp=2", "fsdp=4", "tp=2", "tp=4", "pp=2", "pp=4", "cp=2", "cp=4",
        "fsdp=2,zero=1", "fsdp=2,zero=2", "dp=2,fsdp=2", "dp=2,tp=2", "dp=2,pp=2", "fsdp=2,tp=2", "fsdp=2,pp=2",
        "tp=2,pp=2", "cp=2,tp=2", "cp=2,pp=2", "fsdp=2,cp=2", "pp=2,schedule=interleaved", "pp=2,schedule=zbv",
        "dp=2,tp=2,pp=2", "fsdp=2,tp=2,pp=2",
    ],
    "ours": [
        "dp=2", "fsdp=2", "tp=2", "tp=4", "pp=2", "cp=2", "dp=2,tp=2", "tp=2,pp=2", "fsdp=2,tp=2", "cp=2,tp=2",
        "dp=2,tp=2,pp=2",
    ],
    "tied": ["tp=2", "pp=2", "fsdp=2,pp=2"],
    "sharing": ["dp=2", "pp=2"],
    "experts": [
        "dp=2,ep=2", "dp=4,ep=4", "tp=2", "pp=2", "fsdp=2", "fsdp=2,pp=2", "dp=2,ep=2,tp=2", "dp=2,ep=2,pp=2", "dp=4,ep=2",
    ],
}  # fmt: skip


def config(name: str) -> TransformerConfig:
    """The shape of a model: two matrices that no degree divides evenly, and heads that 2 and 4 divide."""
    if name == "ours":
        return whorl_decoder(VOCABULARY, 64, 4, 4, 4, head_dim=16, ngram_buckets=256, mlp_hidden=128)
    attention = AttentionConfig(n_heads=8, n_kv_heads=4, head_dim=8, backend="blocked")
    return TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        n_layers=4,
        mixers={"attention": attention},
        mlp_hidden=128,
        **MODELS[name],
    )


def batch(step: int) -> dict[str, Tensor]:
    """Rows that repeat a random walk over the ids, so that there is something to learn; some positions are masked."""
    generator = torch.Generator().manual_seed(step)
    ids = (torch.randint(0, 7, (ROWS, LENGTH + 1), generator=generator).cumsum(1) * 5) % VOCABULARY
    mask = torch.rand(ROWS, LENGTH, generator=generator) > 0.1 * torch.rand(ROWS, 1, generator=generator)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "loss_mask": mask}


def job_of(name: str, layout: str | None, micro_batch: int, steps: int, optimizer: str = "muon") -> Job:
    """A job; replicas share the rows."""
    replicas = 1 if layout is None else Layout.parse(layout).data_ranks
    return Job(
        tokens="", model=config(name), seq_len=LENGTH, batch_size=ROWS, micro_batch_size=micro_batch, steps=steps,
        replicas=replicas, layout=layout, compile=False, deterministic=True,
        optim=OptimConfig(optimizer=optimizer, muon_every=2), routing=RoutingConfig(),
    )  # fmt: skip


def train(
    group: ProcessGroup,
    name: str,
    layout: str | None,
    micro_batch: int,
    steps: int,
    fault: str = "",
    optimizer: str = "muon",
) -> Any:
    """Loss and norm of each step, and the change of each weight, on every rank of a layout or on one."""
    with ExitStack() as stack:
        for patch in FAULTS[fault][2]() if fault else ():
            stack.enter_context(patch)
        job = job_of(name, layout, micro_batch, steps, optimizer)
        model = build_model(job)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        learner = build_learner(model, job, allocate_shared(model, job), group)
        (update,), metrics = learner.updates, []
        for step in range(steps):
            own = {n: t.chunk(job.replicas)[_data_rank(layout)] for n, t in batch(step).items()}
            parts = [
                {n: t[i : i + micro_batch] for n, t in own.items()}
                for i in range(0, ROWS // job.replicas, micro_batch)
            ]
            for part in [parts] if layout else parts:
                update.accumulate(update.objective(part))
            done = update.step(1.0)
            metrics.append((done["loss"], done["grad_norm"]))
        return metrics, _changes(learner, start)


def _data_rank(layout: str | None) -> int:
    return 0 if layout is None else Layout.parse(layout).data_rank(dist.get_rank())


def _changes(learner: Learner, start: dict[str, Tensor]) -> dict[str, Any]:
    store = learner.updates[0].store
    if isinstance(store, layout_store.LayoutStore):
        store.export(learner.shared)
    return {n: (learner.shared.weights[n] - start[n]).numpy().copy() for n in start}


def on_ranks(ranks: int, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The driver: each case on all ranks."""
    found = []
    for case in cases:
        group = spawn_replicas(ranks, _case, *case)
        try:
            found.append(train(group, *case))
        finally:
            group.close()
    return found


def _case(group: ProcessGroup, *case: Any) -> None:
    train(group, *case)


def run(ranks: int, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Results of cases (arguments of `train` after the group) on so many ranks."""
    return run_ranks(ranks, drive, on_ranks, ranks, cases, timeout=60.0 * len(cases) + 120, preload=PRELOAD)[
        0
    ]


def distance(found: Any, one: Any) -> float:
    """The largest relative difference of losses, norms and changes of weights."""
    (metrics, weights), (of_one, expected) = found, one
    numbers = [
        abs(a / b - 1) for m, n in zip(metrics, of_one, strict=True) for a, b in zip(m, n, strict=True)
    ]
    far = [
        float(((weights[n] - w) ** 2).sum() / max((w**2).sum(), 1e-30)) ** 0.5 for n, w in expected.items()
    ]
    return max(*numbers, *far)


def compare(cases: Sequence[tuple[str, str, str]], steps: int) -> list[tuple[float, float]]:
    """The distance of each (model, layout, fault) from one rank, and the control's."""
    found: dict[int, Any] = {}
    ones: dict[tuple[str, int], Any] = {}
    for ranks in sorted({Layout.parse(text).ranks for _, text, _ in cases}):
        chosen = [n for n, (_, text, _) in enumerate(cases) if Layout.parse(text).ranks == ranks]
        arguments = [
            (cases[n][0], cases[n][1], _micro_batch(cases[n][1]), steps, cases[n][2]) for n in chosen
        ]
        found |= dict(zip(chosen, run(ranks, arguments), strict=True))
    results = []
    for n, (name, text, _) in enumerate(cases):
        for size in (_micro_batch(text), *CONTROLS):
            if (name, size) not in ones:
                ones[name, size] = train(ProcessGroup(), name, None, size, steps)
        one = ones[name, _micro_batch(text)]
        results.append((distance(found[n], one), max(distance(ones[name, size], one) for size in CONTROLS)))
    return results


def pipeline_is_equal(text: str, steps: int) -> bool:
    """Whether a pipeline has every bit of one rank. Muon's products depend on the number of matrices of a rank."""
    ((_, found),) = run(Layout.parse(text).ranks, [("llama", text, 1, steps, "", "adamw")])
    _, one = train(ProcessGroup(), "llama", None, 1, steps, "", "adamw")
    return all(bool((found[n] == one[n]).all()) for n in one)


def _micro_batch(layout: str) -> int:
    return 1 if Layout.parse(layout).pp > 1 else 4


# The faults: model, layout, and the patches that plant each.
def _patched(where: Any, name: str, new: Any) -> Callable[[], list[Any]]:
    return lambda: [mock.patch.object(where, name, new)]


def _sums_without(axis: str) -> Any:
    usual = parameter_layout.Place.sums.fget  # type: ignore[attr-defined]
    return property(lambda place: tuple(each for each in usual(place) if each != axis))


def _dividing_schedule(name: str) -> Any:
    usual = _schedule_class(name)
    return lambda *rest, scale_grads, **named: usual(*rest, scale_grads=True, **named)


def _plain_positions(row: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    return row.chunk(group.size(), dim)[group.rank()] if dim < 0 else _take_context(row, group, dim)


def _padding_in_loss(vocabulary: int, group: dist.ProcessGroup) -> Any:
    return _logits_step(vocabulary + vocabulary % group.size(), group)


def _parts_alone(store: Any, laid: Any, group: Any, state: Any, wholes: Any, *rest: Any) -> None:
    _open_store(store, laid, group, state, [], *rest)


def _one_section(shard: Any, length: int, rank: int, size: int) -> Any:
    return _ranges(replace(shard, sections=()), length, rank, size)


def _without_ends(store: Any) -> Any:
    usual, ends = dist.all_reduce, store.laid.mesh.ends

    def all_reduce(tensor: Tensor, group: Any = None, **named: Any) -> Any:
        return None if group is ends else usual(tensor, group=group, **named)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        return _reduce(store)


def _counting_balancer(balancer: Any, whole: Any, first: int, counts: bool) -> None:
    _balancer(balancer, whole, first, counts=True)


def _skipping_view(model: Any, own: range, first: bool, last: bool) -> Any:
    view = _stage_view(model, own, first, last)
    if first:
        view.blocks[own.stop - 1].forward = lambda x, *_: x
    return view


_balancer = laid_out.StageBalancer.__init__
_schedule_class, _take_context, _logits_step = (
    schedules.get_schedule_class, ring_attention.take_context, tensor_parallel.vocabulary_logits_step,
)  # fmt: skip
_open_store, _reduce, _ranges, _stage_view = (
    layout_store.LayoutStore.__init__, layout_store.LayoutStore.reduce, tensor_parallel.Shard.ranges,
    pipeline.stage_view,
)  # fmt: skip
FAULTS: dict[str, tuple[str, str, Callable[[], list[Any]]]] = {
    "gradients are not summed over dp": ("llama", "dp=2", _patched(parameter_layout.Place, "sums", _sums_without("dp"))),
    "the norm counts copies": ("llama", "dp=2", _patched(parameter_layout.ParameterLayout, "counted", lambda *_: True)),
    "gradients are divided by the micro-batches": (
        "llama", "pp=2", _patched(schedules, "get_schedule_class", _dividing_schedule)
    ),
    "positions of a context rank in plain order": (
        "llama", "cp=2", _patched(ring_attention, "take_context", _plain_positions)
    ),
    "padded columns take part in the loss": (
        "llama", "tp=2", _patched(layouts, "vocabulary_logits_step", _padding_in_loss)
    ),
    "Muon on parts": ("llama", "fsdp=2", _patched(layout_store.LayoutStore, "__init__", _parts_alone)),
    "gate and up in one piece": ("llama", "tp=2", _patched(tensor_parallel.Shard, "ranges", _one_section)),
    "a tied table is not summed over stages": (
        "tied", "pp=2", _patched(layout_store.LayoutStore, "reduce", _without_ends)
    ),
    "a block at a stage boundary is skipped": ("llama", "pp=2", _patched(layouts, "stage_view", _skipping_view)),
    "norms are not summed over tp": ("llama", "tp=2", _patched(parameter_layout.Place, "sums", _sums_without("tp"))),
    "auxiliary losses on every tensor rank": (
        "experts", "tp=2", _patched(laid_out.StageBalancer, "__init__", _counting_balancer)
    ),
}  # fmt: skip


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument("--steps", type=int, default=20),
            parser.add_argument("--layouts", nargs="*", help="some layouts, of all models that have them"),
        ),
        smoke={"steps": 2, "layouts": ["tp=2", "pp=2"]},
    )
    torch.set_num_threads(1)
    chosen = [(name, text, "") for name, texts in LAYOUTS.items() for text in texts]
    chosen = [case for case in chosen if args.layouts is None or case[1] in args.layouts]
    rows = compare(chosen, args.steps)
    for (name, text, _), (far, control) in zip(chosen, rows, strict=True):
        print(f"{name:8} {text:28} {far:9.2e} of {control:9.2e}  {far / control:5.2f} x", flush=True)
    ratio, far, control = max((far / control, far, control) for far, control in rows)
    claim(
        f"{len(rows)} layouts after {args.steps} steps: the largest distance from one rank",
        ours=far, peer=control, unit="relative difference", ratio=ratio, bar=BAR, ok=ratio <= BAR,
        peer_name="one rank, other micro-batches",
        samples=[[*case[:2], *row] for case, row in zip(chosen, rows, strict=True)],
    )  # fmt: skip
    texts = [text for text in LAYOUTS["llama"] if "pp" in text and Layout.parse(text).data_ranks == 1]
    texts = [text for text in texts if Layout.parse(text).tp * Layout.parse(text).cp == 1]
    equal = [text for text in texts if pipeline_is_equal(text, args.steps)]
    claim(
        "pipelines with the bits of one rank, same micro-batches",
        ours=len(equal), peer=len(texts), unit="pipelines", ratio=len(equal) / len(texts), bar=1.0,
        ok=equal == texts, samples=texts, variant="pipelines",
    )  # fmt: skip
    faults = list(FAULTS)[:: 4 if args.smoke else 1]
    found = compare([(*FAULTS[name][:2], name) for name in faults], min(args.steps, 5))
    caught = [far > BAR * control for far, control in found]
    for name, (far, control) in zip(faults, found, strict=True):
        print(f"{name:45} {far:9.2e} of {control:9.2e}", flush=True)
    claim(
        "planted faults that are caught",
        ours=sum(caught), peer=len(faults), unit="faults", ratio=sum(caught) / len(faults), bar=1.0, ok=all(caught),
        samples=[[name, *row] for name, row in zip(faults, found, strict=True)], variant="faults",
    )  # fmt: skip


if __name__ == "__main__":
    main()
