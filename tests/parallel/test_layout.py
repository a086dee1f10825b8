"""Layouts: one step under each equals that of one rank."""

import pytest
import torch
import torch.distributed as dist

from whorl.errors import ConfigError
from whorl.models import make_model
from whorl.models.parallel_parts import check_layout, tensor_shards
from whorl.models.transformer_config import AttentionConfig, MoEConfig, TransformerConfig, whorl_decoder
from whorl.parallel.layout import Layout, Mesh, apply_layout
from whorl.parallel.process_group import ProcessGroup
from whorl.parallel.ranks import run_ranks
from whorl.train.config import RoutingConfig
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.moe_balance import MoEBalancer

ROWS, LENGTH, VOCABULARY = 8, 16, 97  # a vocabulary that no degree divides


def config(name, **fields):
    if name == "ours":
        return whorl_decoder(VOCABULARY, 32, 4, 4, 4, head_dim=8, ngram_buckets=64, mlp_hidden=64)
    fields |= (
        {"experts": MoEConfig(n_experts=4, top_k=2, hidden=16, shared_hidden=16)} if name == "moe" else {}
    )
    attention = AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=8)
    return TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        n_layers=4,
        mixers={"attention": attention},
        mlp_hidden=64,
        **fields,
    )


def model_of(name):
    generator = torch.Generator().manual_seed(0)
    model = make_model(config(name), generator)
    with torch.no_grad():
        for p in model.parameters():  # a zero matrix lets no gradient pass
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return model


def objective(model):
    balancer = MoEBalancer(model, RoutingConfig(), ProcessGroup())
    return LMObjective(model, balancer, z_loss=1e-4, compile=False)


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    mask = torch.rand(ROWS, LENGTH, generator=generator) > 0.2
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": mask}


def split(fields, parts):
    pieces = zip(*(t.chunk(parts) for t in fields.values()), strict=True)
    return [{name: t.contiguous() for name, t in zip(fields, piece, strict=True)} for piece in pieces]


def dense(p):
    return torch.zeros_like(p) if p.grad is None else p.grad.to_dense()


def one_rank(name, parts):
    model = model_of(name)
    loss_of, total = objective(model), 0.0
    for micro_batch in split(batch(), parts):
        loss = loss_of(micro_batch)
        loss.total.backward()
        total += loss.total.item()
    return total, {name: dense(p) for name, p in model.named_parameters()}


def assembled(places, parts, like):
    """Whole tensors from the counted parts of all ranks."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, parts)
    whole = {name: torch.full_like(t, torch.nan) for name, t in like.items()}
    for at, found in zip(places.at, ranks, strict=True):
        for name, place in places.places.items():
            for local, target in place.pieces(at, places.sizes) if place.counts(at) else ():
                whole[name][target] = found[name][local]
    return whole


def differences(cases):
    """The largest relative difference of a gradient, and that of the loss, for each (model, layout, micro-batches)."""
    found = {}
    for name, text, parts in cases:
        layout, model = Layout.parse(text), model_of(name)
        check_layout(model, layout, ROWS, LENGTH)
        mesh, shards = Mesh(layout), tensor_shards(model)
        laid = apply_layout(model, mesh, shards, objective)
        own = split(batch(), layout.data_ranks)[layout.data_rank(mesh.rank)]
        total = torch.tensor(sum((loss.total.item() for loss in laid.run(split(own, parts))), 0.0))
        total *= mesh.at["tp"] == 0
        dist.all_reduce(total)
        sums = {}
        for path, p in laid.parameters.items():
            sums[path] = dense(p).clone()
            if (group := mesh.group(*laid.places.places[path].sums)) is not None:
                dist.all_reduce(sums[path], group=group)
        loss, gradients = one_rank(name, parts * layout.data_ranks)
        whole = assembled(laid.places, sums, gradients)
        far = max(float((whole[n] - g).norm() / g.norm()) for n, g in gradients.items())
        found[text] = far, abs(float(total) / loss - 1)
    return found


def of_ranks(size, cases):
    return run_ranks(size, differences, cases, preload=("whorl.parallel.layout", "whorl.train.lm.objective"))[
        0
    ]


def test_gradients_on_two_ranks_equal_one_rank():
    cases = [
        ("ours", "tp=2", 2),
        ("ours", "pp=2", 4),
        ("ours", "fsdp=2", 2),
        ("ours", "cp=2", 1),
        ("moe", "dp=2,ep=2", 1),
    ]
    found = of_ranks(2, cases)
    assert found["pp=2"][0] == 0  # every bit
    assert max(far for far, _ in found.values()) < 1e-5
    assert max(loss for _, loss in found.values()) < 1e-6


def test_gradients_on_pairs_of_axes_equal_one_rank():
    cases = [
        ("ours", "tp=2,pp=2", 2),
        ("ours", "fsdp=2,tp=2,zero=1", 2),
        ("ours", "fsdp=2,pp=2,zero=2,schedule=zbv", 4),
    ]
    found = of_ranks(4, cases)
    assert max(far for far, _ in found.values()) < 1e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=3", "nearest are 2 and 4"), ("pp=3", "nearest are 2 and 4"), ("dp=3", "nearest are 2 and 4"),
        ("cp=3", "nearest are 2 and 4"), ("dq=2", "dq"), ("tp=0", "at least 1"), ("zero=4", "1, 2 or 3"),
        ("dp=4,ep=3", "nearest are 2 and 4"), ("pp=2,schedule=1b1f", "1f1b"), ("pp=2,fsdp=2,schedule=zbv", "zero=1"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_divide_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        check_layout(model_of("ours"), Layout.parse(text), ROWS, LENGTH)


def test_other_ranks_and_mixers_are_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"multiply to 4\n  expected: 8, the number of ranks, for example dp = 4"
    ):
        Layout.parse("dp=2,tp=2").check_ranks(8)
    with pytest.raises(ConfigError, match="for example 6 ranks or 9 ranks"):
        Layout.parse("dp=2,tp=3").check_ranks(8)
    shape = config("llama").model_copy(update={"mixers": {"a": {"kind": "mamba"}}})
    model = make_model(TransformerConfig.model_validate(shape.model_dump()))
    with pytest.raises(ConfigError, match=r"blocks.0.mixer .Mamba. cannot be split"):
        check_layout(model, Layout.parse("tp=2"), ROWS, LENGTH)


def test_layers_that_share_keys_are_refused_under_fsdp():
    shape = config("llama").model_copy(update={"kv_sharing_factor": 2})
    model = make_model(TransformerConfig.model_validate(shape.model_dump()))
    with pytest.raises(ConfigError, match="layers that share keys under fsdp"):
        check_layout(model, Layout.parse("fsdp=2"), ROWS, LENGTH)
