"""Ring attention and experts over ranks equal one rank."""

import pytest
import torch
import torch.distributed as dist
from bench.parallel.experts import load_imbalance

from whorl.errors import ConfigError
from whorl.models import TransformerConfig, make_model, whorl_decoder
from whorl.nn.attention import Mask, attend
from whorl.nn.experts import MixtureOfExperts
from whorl.parallel.expert_dispatch import place_experts, shard_experts
from whorl.parallel.ranks import run_ranks
from whorl.parallel.ring_attention import context_order, ring_attention, shard_context, take_context

LENGTH = 32
SEGMENTS = torch.tensor([[0] * 5 + [1] * 16 + [2] * 11, [4] * 27 + [7] * 5])


def attention_case(group, kv_heads, segments):
    q, k, v = (
        torch.randn(2, heads, LENGTH, 4, generator=torch.Generator().manual_seed(heads + n)).requires_grad_()
        for n, heads in enumerate((4, kv_heads, kv_heads))
    )
    mask = Mask(query_segments=segments, key_segments=segments)
    attend(q, k, v, mask, backend="reference").square().sum().backward()
    want = [attend(q, k, v, mask, backend="reference").detach(), q.grad, k.grad, v.grad]
    local = [take_context(t.detach(), group, 2).requires_grad_() for t in (q, k, v)]
    mine = None if segments is None else take_context(segments, group)
    out = ring_attention(*local, mine, 4**-0.5, group)
    out.square().sum().backward()
    got = [out.detach(), *(t.grad for t in local)]
    return max((a - take_context(b, group, 2)).abs().max().item() for a, b in zip(got, want, strict=True))


def decoder(**fields):
    config = whorl_decoder(50, 16, 2, 4, 2, head_dim=4, mlp_hidden=32, ngram_buckets=64, **fields)
    model = make_model(config, torch.Generator().manual_seed(0))
    randomize(model)
    return model


def randomize(module):
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():  # outputs start at zero
        p.data += 0.1 * torch.randn(p.shape, generator=generator)


def gradients(model):
    return {n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}


def decoder_case(group, segments):
    """The largest difference of hidden states and gradients of a decoder with smeared keys and n-grams."""
    ids = torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    one, many = decoder(), decoder()
    want = one(ids, segments=segments)
    want.sin().sum().backward()
    shard_context(many, group)
    assert [n for n, _ in many.named_parameters()] == [n for n, _ in one.named_parameters()]
    got = many(ids, segments=segments)
    got.sin().sum().backward()
    worst = (got - take_context(want, group)).abs().max().item()
    expected = gradients(one)
    for name, mine in gradients(many).items():
        dist.all_reduce(mine, group=group)
        worst = max(worst, (mine - expected[name]).abs().max().item())
    return worst


def experts_case(group, top_k):
    """The largest difference of outputs and gradients of a mixture, one rank having no token for most experts."""
    size = group.size()
    owners = place_experts([5.0, 1, 4, 1, 3, 1, 1, 2], size)
    layers = []
    for _ in range(2):
        layers.append(
            MixtureOfExperts(8, 6, 8, top_k, norm_topk_prob=False, generator=torch.Generator().manual_seed(0))
        )
        randomize(layers[-1])
    one, many = layers
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
    x[: 24 // size] = x[0]  # rank 0 sends all of its tokens to the same experts
    x.requires_grad_()
    want = one(x)
    want.sin().sum().backward()
    shard_experts(many.experts, owners, group)
    mine = x.detach().chunk(size)[group.rank()].requires_grad_()
    got = many(mine)
    got.sin().sum().backward()
    worst = (got - want.chunk(size)[group.rank()]).abs().max().item()
    worst = max(worst, (mine.grad - x.grad.chunk(size)[group.rank()]).abs().max().item())
    expected, found = gradients(one), gradients(many)
    assert len([n for n in found if "experts" in n]) == 2 * owners.count(group.rank())
    for name, gradient in found.items():
        if "experts" not in name:
            dist.all_reduce(gradient, group=group)
        worst = max(worst, (gradient - expected[name]).abs().max().item())
    return worst


def all_cases():
    """Differences from one rank, over all four ranks and over pairs of them."""
    found = {}
    for group in (dist.group.WORLD, dist.new_subgroups(2)[0]):
        cases = {
            "ring": (attention_case, [(kv, s) for kv in (4, 2, 1) for s in (None, SEGMENTS)]),
            "decoder": (decoder_case, [(None,), (SEGMENTS,)]),
            "experts": (experts_case, [(1,), (3,)]),
        }
        for name, (case, arguments) in cases.items():
            for number, given in enumerate(arguments):
                found[f"{name} {number} of {group.size()}"] = case(group, *given)
    return found


def test_context_and_experts_over_ranks_equal_one_rank():
    for found in run_ranks(4, all_cases, preload=("whorl.models", "whorl.nn.experts")):
        assert len(found) == 20
        assert {name: worst for name, worst in found.items() if not worst < 1e-4} == {}


def test_zigzag_gives_every_rank_equal_pairs():
    order = context_order(16, 2)
    assert order.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert len({int((rank + 1).sum()) for rank in context_order(64, 4)}) == 1
    with pytest.raises(ConfigError, match="12 and 16"):
        context_order(14, 2)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ({"kind": "mamba"}, "Mamba"),
        ({"kind": "linear", "options": {"n_heads": 2}}, "LinearAttention"),
        ({"n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "window": 4}, "window"),
        ({"n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "softcap": 4.0}, "softcap"),
    ],
)
def test_other_mixers_are_refused_by_name(mixer, message):
    config = {"vocab_size": 50, "d_model": 16, "n_layers": 1, "mlp_hidden": 32, "mixers": {"a": mixer}}
    model = make_model(TransformerConfig.model_validate(config), torch.Generator())
    with pytest.raises(ConfigError, match=rf"blocks.0.mixer \({message}\)"):
        shard_context(model, None)


def test_placement_by_load_is_more_even_than_by_number():
    loads = [8.0, 7, 1, 1, 6, 1, 1, 1]
    by_number, by_load = place_experts([1.0] * 8, 2), place_experts(loads, 2)
    assert by_number == [0] * 4 + [1] * 4
    assert by_load.count(0) == by_load.count(1) == 4
    assert load_imbalance(loads, by_number) == pytest.approx(17 / 13)
    assert load_imbalance(loads, by_load) == pytest.approx(15 / 13)  # 8 and 7 cannot be more even
    with pytest.raises(ConfigError, match="nearest are 2 and 4"):
        place_experts(loads, 3)
