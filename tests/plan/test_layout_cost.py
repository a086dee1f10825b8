"""Traffic, memory and time of layouts: predicted against counted, and the choice among them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from whorl.errors import ConfigError
from whorl.models import make_model, whorl_decoder
from whorl.models.parallel_parts import tensor_shards
from whorl.nn.compiler import meta_device
from whorl.parallel.layout import AXES, Layout, Mesh, apply_layout
from whorl.parallel.process_group import ProcessGroup
from whorl.parallel.ranks import run_ranks
from whorl.parallel.traffic import Traffic
from whorl.plan.cluster import ClusterSpec
from whorl.plan.layout_cost import choose_layout
from whorl.plan.layout_traffic import StepShape
from whorl.train.config import RoutingConfig
from whorl.train.job import Job
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.moe_balance import MoEBalancer

LENGTH, PRELOAD = 32, ("whorl.parallel.layout", "whorl.plan.layout_traffic", "whorl.train.lm.objective")


def config(kind):
    experts = {"experts": {"n_experts": 4, "top_k": 2, "hidden": 16}} if kind == "experts" else {}
    return whorl_decoder(50, 16, 4, 4, 4, head_dim=4, mlp_hidden=32, ngram_buckets=64, **experts)


def objective(model):
    balancer = MoEBalancer(model, RoutingConfig(), ProcessGroup())
    return LMObjective(model, balancer, z_loss=1e-4, compile=False)


class OneRank(Mesh):
    """The mesh of one rank: groups of the others are not made, of which 4,096 ranks have thousands."""

    def __init__(self, layout):
        self.layout, self.rank = layout, dist.get_rank()
        self.at = layout.at(self.rank)
        self.groups = {}
        for axis, size in zip(AXES, layout.shape, strict=True):
            if size > 1:
                ranks = [r for r in range(layout.ranks) if layout.at(r) | {axis: 0} == self.at | {axis: 0}]
                self.groups[axis] = dist.new_group(ranks)
        self.torch = {"fsdp": DeviceMesh.from_group(self.groups["fsdp"], "cpu")} if layout.fsdp > 1 else {}

    def group(self, *axes):
        return self.groups.get(axes[0])


def counted(kind, text, micro_batches, mesh_type=Mesh):
    """(axis, operation) -> calls, payload and sent bytes of this rank: counted, and predicted."""
    layout = Layout.parse(text)
    model, mesh = make_model(config(kind)), mesh_type(layout)
    laid = apply_layout(model, mesh, tensor_shards(model), objective)
    groups = {axis: mesh.group(axis) for axis in AXES}
    rows = []
    for _ in range(micro_batches):
        ids = torch.randint(50, (2, LENGTH + 1))
        row = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:], "loss_mask": torch.ones(2, LENGTH)}
        if kind == "packed":
            row["segment_ids"] = (torch.arange(LENGTH) // 12).repeat(2, 1)
            row["positions"] = (torch.arange(LENGTH) % 12).repeat(2, 1)
        rows.append(row)
    if layout.pp > 1:  # its first step sends a message besides, to connect
        laid.run(rows)
    with Traffic({g.group_name: axis for axis, g in groups.items() if g is not None}) as traffic:
        laid.run(rows)
    with meta_device():
        whole = make_model(config(kind))
    total_rows = 2 * micro_batches * layout.data_ranks
    shape = StepShape(
        whole, layout, rows=total_rows, length=LENGTH, micro_batches=micro_batches, packed=kind == "packed"
    )
    both = traffic.totals(), shape.traffic(mesh.rank)
    return [{key: tuple(total) for key, total in side.items()} for side in both]


def every_case(cases):
    return [counted(*case) for case in cases]


def of_large(rank, size, cases):
    """The same for one of many ranks, which send nothing."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    return [counted(*case, OneRank) for case in cases]


def test_traffic_of_four_ranks_is_predicted_exactly():
    cases = [
        ("plain", "tp=2,pp=2", 2), ("packed", "fsdp=2,cp=2", 2), ("plain", "fsdp=2,pp=2,zero=1", 2),
        ("experts", "dp=2,ep=2,tp=2", 1),
    ]  # fmt: skip
    ranks = run_ranks(4, every_case, cases, preload=PRELOAD)
    for number, case in enumerate(cases[:-1]):
        for found in ranks:
            assert found[number][0] == found[number][1], case
    assert {axis for found in ranks for case in found for axis, _ in case[0]} == {
        "tp",
        "pp",
        "fsdp",
        "cp",
        "ep",
    }
    # What experts send back depends on the routing; its sum over ranks does not.
    for key in {key for found in ranks for key in found[-1][0]}:
        sums = [[sum(found[-1][side][key][n] for found in ranks) for n in range(3)] for side in (0, 1)]
        assert sums[0] == pytest.approx(sums[1])


def test_traffic_of_one_rank_of_4096_is_predicted_exactly():
    cases = [
        ("plain", "dp=64,fsdp=16,tp=4", 2), ("packed", "dp=128,cp=4,fsdp=8,zero=2", 2),
        ("plain", "dp=512,fsdp=8,zero=1", 3),
    ]  # fmt: skip
    (found,) = run_ranks(1, of_large, 1029, 4096, cases, backend="fake", preload=PRELOAD)
    for case, (have, want) in zip(cases, found, strict=True):
        assert have == want, case
        assert have


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
