"""Traffic, memory and time of layouts: predicted against counted, and the choice among them."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from whorl.errors import ConfigError
from whorl.models import make_model, whorl_decoder
from whorl.nn.compiler import meta_device
from whorl.parallel.distributed import drive
from whorl.parallel.layout import AXES, Layout, Mesh
from whorl.parallel.layout_store import LayoutStore
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.parallel.ranks import run_ranks
from whorl.parallel.traffic import Total, Traffic
from whorl.plan.cluster import ClusterSpec
from whorl.plan.layout_cost import choose_layout
from whorl.plan.layout_traffic import StepShape
from whorl.train.job import Job
from whorl.train.lm import laid_out
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.lm.objective import param_optims

LENGTH = 32
PRELOAD = (
    "whorl.parallel.layout",
    "whorl.parallel.distributed",
    "whorl.plan.layout_traffic",
    "whorl.train.lm.build",
)


def config(kind):
    experts = {"experts": {"n_experts": 4, "top_k": 2, "hidden": 16}} if kind == "experts" else {}
    return whorl_decoder(50, 16, 2, 4, 4, head_dim=4, mlp_hidden=32, ngram_orders=(), **experts)


class OneRank(Mesh):
    """The mesh of one rank: groups of the others are not made, of which 4,096 ranks have thousands."""

    def __init__(self, layout, device="cpu"):
        self.layout, self.rank = layout, dist.get_rank()
        self.at, self.ends, self.groups = layout.at(self.rank), None, {}
        if layout.fsdp > 1:
            self.torch = {"fsdp": DeviceMesh.from_group(self.group("fsdp"), "cpu")}

    def group(self, *axes):
        sizes = dict(zip(AXES, self.layout.shape, strict=True))
        axes = tuple(axis for axis in AXES if axis in axes and sizes[axis] > 1)
        if axes and axes not in self.groups:
            here, places = dict.fromkeys(axes, 0), range(self.layout.ranks)
            self.groups[axes] = dist.new_group(
                [r for r in places if self.layout.at(r) | here == self.at | here]
            )
        return self.groups.get(axes)


def counted(group, kind, text, micro_batches):
    """(axis, operation) -> calls, payload and sent bytes of a step of this rank: counted, and predicted."""
    layout = Layout.parse(text)
    job = Job(
        tokens="", model=config(kind), seq_len=LENGTH, batch_size=2 * micro_batches * layout.data_ranks, steps=1,
        replicas=layout.data_ranks, micro_batch_size=2, layout=text, compile=False, deterministic=True,
    )  # fmt: skip
    model = build_model(job)
    small = job.model_copy(update={"replicas": 1, "batch_size": 2 * micro_batches})
    learner = build_learner(model, job, allocate_shared(model, small), group)
    (update,), mesh, rows = learner.updates, learner.laid.mesh, []
    for _ in range(micro_batches):
        ids = torch.randint(50, (2, LENGTH + 1))
        mask = torch.ones(2, LENGTH, dtype=torch.bool)
        row = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "loss_mask": mask}
        if kind == "packed":
            row["segment_ids"] = (torch.arange(LENGTH) // 12).repeat(2, 1)
            row["positions"] = (torch.arange(LENGTH) % 12).repeat(2, 1)
        rows.append(row)

    def step():
        update.accumulate(update.objective(rows))
        update.store.reduce()  # on the fake backend a loss has no meaning, and a step would refuse it
        update.store.gather()

    sizes = dict(zip(AXES, layout.shape, strict=True))
    names = {}
    for axes in [place.sums for place in learner.laid.places.places.values()] + [(axis,) for axis in AXES]:
        if (of_axes := mesh.group(*axes)) is not None:
            names[of_axes.group_name] = "+".join(a for a in AXES if a in axes and sizes[a] > 1)
    if layout.pp > 1:  # its first step sends a message besides, to connect
        step()
    with Traffic(names) as traffic:
        step()
    with meta_device():
        whole = make_model(config(kind))
    shape = StepShape(
        whole,
        layout,
        rows=job.batch_size,
        length=LENGTH,
        micro_batches=micro_batches,
        packed=kind == "packed",
    )
    wholes = [n for n, rule in param_optims(whole, job.optim).items() if rule.optimizer == "muon"]
    predicted = shape.traffic(mesh.rank)
    for key, total in shape.update_traffic(mesh.rank, wholes).items():
        predicted[key] = Total(*(a + b for a, b in zip(total, predicted.get(key, (0, 0, 0)), strict=True)))
    return [{key: tuple(total) for key, total in side.items()} for side in (traffic.totals(), predicted)]


def of_four(cases):
    """The driver: each case on all ranks."""
    found = []
    for case in cases:
        group = spawn_replicas(4, _answer, *case)
        mine = counted(group, *case)
        found.append(group.all_gather_objects(mine))
        group.close()
    return found


def _answer(group, *case):
    group.all_gather_objects(counted(group, *case))


def of_large(rank, size, cases):
    """The same for one of many ranks, which send nothing."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    group = ProcessGroup(rank, size, [None] * size)
    # The fake backend refuses to receive for a rank that owns nothing.
    without = mock.patch.object(LayoutStore, "_transfer", lambda *_: None)
    with mock.patch.object(laid_out, "Mesh", OneRank), without:
        return [counted(group, *case) for case in cases]


def test_traffic_of_four_ranks_is_predicted_exactly():
    cases = [
        ("plain", "tp=2,pp=2", 2), ("packed", "fsdp=2,cp=2", 2), ("plain", "fsdp=2,dp=2,zero=1", 2),
        ("experts", "dp=2,ep=2,tp=2", 1),
    ]  # fmt: skip
    found = run_ranks(4, drive, of_four, cases, preload=PRELOAD)[0]
    axes = {axis for ranks in found for axis, _ in ranks[0][0]}
    assert axes >= {"tp", "pp", "fsdp", "cp", "ep", "dp", "world"}
    for case, ranks in zip(cases, found, strict=True):
        for key in {key for side in ranks[0] for key in side}:
            # Owners of matrices differ in their bytes, and routing decides what experts send: sums over ranks are exact.
            summed = key[1] == "all_to_all" and key[0] not in ("tp", "fsdp")
            for of_ranks in [ranks] if summed else [[rank] for rank in ranks]:
                sums = [
                    [sum(r[side].get(key, (0, 0, 0))[n] for r in of_ranks) for n in range(3)]
                    for side in (0, 1)
                ]
                assert sums[0] == pytest.approx(sums[1], abs=4 if summed else 0), (case, key)


def test_traffic_of_one_rank_of_4096_is_predicted_exactly():
    cases = [("packed", "dp=16,fsdp=16,cp=4,tp=4", 1)]
    (found,) = run_ranks(1, of_large, 1029, 4096, cases, backend="fake", preload=PRELOAD)
    for case, (have, want) in zip(cases, found, strict=True):
        moved = {key: want.pop(key) for key in want.keys() - have.keys()}
        assert {operation for _, operation in moved} == {"all_to_all"}  # of matrices, left out by `of_large`
        assert have == want, case
        assert {axis for axis, _ in have} >= {"fsdp", "cp", "tp", "dp+cp", "dp+cp+tp"}


def test_zero_sends_as_published():
    """Rajbhandari et al. 2020, section 7: stages 1 and 2 send what data parallelism sends, stage 3 half as much again."""
    with meta_device():
        model = make_model(config("plain"))
    sent = {}
    for zero in (1, 2, 3):
        layout = Layout.parse(f"fsdp=4,zero={zero}")
        shape = StepShape(model, layout, rows=8, length=LENGTH)
        sent[zero] = sum(total.sent for total in shape.traffic(0).values())
        held = shape.held(dict.fromkeys(AXES, 0))
    bytes_of = {n: 4 * torch.Size(s).numel() for n, s in held.items() if not n.startswith("memory.")}
    padding = 1.001  # parameters are padded to a multiple of the ranks
    assert sent[1] == sent[2] == pytest.approx(2 * 3 / 4 * sum(bytes_of.values()), rel=padding - 1, abs=4096)
    blocks = sum(n for name, n in bytes_of.items() if name.startswith("blocks."))
    assert sent[3] - sent[1] == pytest.approx(3 / 4 * blocks, rel=0.05)  # head and embedding are kept


def job(**fields):
    model = whorl_decoder(512, 256, 8, 8, 8, head_dim=32, mlp_hidden=1024, ngram_orders=())
    given = {"seq_len": 256, "batch_size": 32, "micro_batch_size": 2, "steps": 1, **fields}
    return Job(tokens="", model=model, **given)


CLUSTER = """
devices_per_node = 4
flops = 1e12
memory_bytes = 4e9
[node]
latency = 1e-5
bandwidth = 1e11
[network]
latency = 1e-4
bandwidth = {network}
"""


def cluster(tmp_path, network="1e9", memory="4e9"):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(network=network).replace("4e9", memory))
    return ClusterSpec.read(path)


def test_auto_prefers_little_traffic_between_nodes_and_fits_memory(tmp_path):
    found = choose_layout(job(), cluster(tmp_path), 8)
    fits = [cost for cost in found if not cost.refused]
    assert found[: len(fits)] == sorted(fits, key=lambda cost: cost.seconds)
    assert all(cost.layout.ranks == 8 and cost.memory_bytes <= 4e9 for cost in fits)
    by_name = {cost.name: cost for cost in found}
    across, inside = by_name["tp=8"], by_name["dp=2,tp=4"]
    assert across.parts["tp"] > 10 * inside.parts["tp"]  # eight neighbours are on two nodes
    assert "tp" in across.why and "%" in across.why
    bound = sorted(cost.memory_bytes for cost in fits)[3] / 1e9
    tight = choose_layout(job(), cluster(tmp_path, memory=f"{bound}e9"), 8)
    assert len([cost for cost in tight if not cost.refused]) == 4
    assert any("GB" in cost.refused for cost in tight)


def test_auto_names_why_nothing_fits(tmp_path):
    with pytest.raises(ConfigError, match=r"no layout of 8 ranks fits this job; nearest: .*needs .* GB"):
        choose_layout(job(), cluster(tmp_path, memory="1e6"), 8)
    with pytest.raises(ConfigError, match=r"no layout of 7 ranks"):
        choose_layout(job(), cluster(tmp_path), 7)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("flops = 0", "flops"),
        ("flops = 1\nflop = 1", "flop: Extra"),
        ("flops = ", "Invalid"),
        ("", "flops: Field required"),
    ],
)
def test_bad_clusters_name_the_field(tmp_path, line, message):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(network="1e9").replace("flops = 1e12", line))
    with pytest.raises(ConfigError, match=message):
        ClusterSpec.read(path)
