"""Mixture of experts: routing against loops, the fast path against its definition and `transformers`, edge cases."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, copy_values, gen, randn
from torch import Tensor
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.nn.experts.experts import EXPERT_ACTIVATIONS, Experts, apply_experts, apply_experts_reference
from whorl.nn.experts.layer import MixtureOfExperts, expert_lr_scales, router_parameter_names
from whorl.nn.experts.monitor import load_stats
from whorl.nn.experts.router import MoERouter, Routing, assign_with_capacity
from whorl.nn.mlp import MLP
from whorl.tracking.inequality import gini
from whorl.train.learner.update import ParamOptim, Update, check_updates

METHODS = ("token_choice", "dropless", "expert_choice")


def unrouted(routing: Routing) -> float:
    """Return the fraction of tokens without any expert."""
    return 1 - len(routing.tokens.unique()) / len(routing.scores)


@torch.no_grad()
def draw_all(parameters: Iterable[Tensor], seed: int = 0) -> None:
    for number, p in enumerate(parameters):
        p.normal_(std=0.3, generator=gen(seed + number))


def make_layer(n_experts: int = 8, top_k: int = 2, **options: Any) -> MixtureOfExperts:
    """A small layer with non-zero weights and an uneven router."""
    made = MixtureOfExperts(16, 12, n_experts, top_k, generator=gen(), **options)
    draw_all(made.parameters(), seed=1)
    return made


def route(module: MixtureOfExperts, x: Tensor) -> Routing:
    records: list[Routing] = []
    module(x, records)
    return records[0]


@pytest.mark.parametrize("library", [True, False])  # oneDNN for fp32 matrices
@pytest.mark.parametrize("kind", sorted(EXPERT_ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_experts_matches_reference_with_gradients(
    kind: str, dtype: torch.dtype, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr("whorl.nn.experts.experts._onednn_is_faster", lambda: library)
    experts = Experts(5, 16, 12, kind, generator=gen())
    draw_all(experts.down)
    counts = torch.tensor([7, 0, 30, 1, 12])  # an expert without tokens, and one with a single token
    tokens = torch.cat([torch.randperm(30, generator=gen(e))[:c] for e, c in enumerate(counts.tolist())])
    weights = torch.rand(50, generator=gen(3), requires_grad=True)
    x = randn(30, 16, seed=4).to(dtype).requires_grad_()
    upstream = randn(30, 16, seed=5).to(dtype)
    leaves = (x, weights, *experts.up, *experts.down)
    results = []
    for path in (apply_experts, apply_experts_reference):
        y = path(x, tokens, weights, counts, list(experts.up), list(experts.down), kind)
        results.append([y, *torch.autograd.grad(y, leaves, upstream, materialize_grads=True)])
    exact = dtype == torch.float32
    assert_close(*results, atol=1e-5 if exact else 0.15, rtol=1e-4 if exact else 0.05)


def test_dropless_layer_matches_transformers() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    ours = make_layer()
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = MixtralConfig(**sizes, router_jitter_noise=0.0)
    config._experts_implementation = "eager"
    theirs = MixtralSparseMoeBlock(config)
    up, down = ours.experts.stacked()
    copy_values({theirs.gate.weight: ours.router.weight, theirs.experts.gate_up_proj: up})
    copy_values({theirs.experts.down_proj: down})
    x = randn(2, 9, 16, seed=1, grad=True)
    y, want = ours(x), theirs(x)
    assert_same_with_gradients(y, want, [x])
    upstream = randn(*y.shape, seed=2)
    *d_ups, d_router = torch.autograd.grad(y, [*ours.experts.up, ours.router.weight], upstream)
    desired = torch.autograd.grad(want, (theirs.experts.gate_up_proj, theirs.gate.weight), upstream)
    assert_close([torch.stack(d_ups), d_router], desired, atol=1e-5, rtol=1e-4)


def test_router_groups_and_bias_match_deepseek() -> None:
    """The paper's method as a loop: the bias is for choosing only, the weights are from the scores."""
    options = {"scoring": "sigmoid", "groups": (4, 2), "bias_balance": True, "scale": 2.5}
    router = MoERouter(16, 8, 3, generator=gen(), **options)
    x = randn(40, 16, seed=1) * 3
    router.balance_bias.copy_(randn(8, seed=2) * 0.5)
    routing = router(x)
    gate = torch.zeros(40, 8)
    gate[routing.tokens, routing.experts] = routing.weights.detach()
    moved = 0
    for n in range(40):
        s = (x[n] @ router.weight.t()).sigmoid().detach()
        biased = s + router.balance_bias
        group_score = [sum(sorted(biased[2 * g : 2 * g + 2].tolist())) for g in range(4)]
        groups = sorted(range(4), key=lambda g: -group_score[g])[:2]
        allowed = [e for g in groups for e in (2 * g, 2 * g + 1)]
        chosen = sorted(allowed, key=lambda e: -float(biased[e]))[:3]
        want = torch.zeros(8)
        want[chosen] = 2.5 * s[chosen] / s[chosen].sum()
        assert_close(gate[n], want, atol=1e-5, rtol=1e-4)
        moved += set(chosen) != set(s.topk(3).indices.tolist())
    assert moved > 5  # bias and groups have an effect


def test_assign_with_capacity_matches_queues() -> None:
    """Compare with one queue per expert, for both ways of overflow."""
    for seed in range(20):
        preference = torch.rand(13, 5, generator=gen(seed)) + torch.tensor([2.0, 1.0, 0, 0, 0])
        for overflow in ("next", "drop"):
            want = torch.zeros(13, 5, dtype=torch.bool)
            ranked = preference.argsort(dim=1, descending=True)
            for rank in range(5 if overflow == "next" else 2):
                for n in range(13):
                    e = int(ranked[n, rank])
                    if want[n].sum() < 2 and want[:, e].sum() < 6:
                        want[n, e] = True
            assert torch.equal(assign_with_capacity(preference, 2, 6, overflow), want)  # type: ignore[arg-type]
            assert int(want.sum()) == (26 if overflow == "next" else 12), "the two overflow modes must differ"
    # Capacity for fewer than all requests: no duplicates, no overflow.
    tight = assign_with_capacity(torch.rand(13, 5, generator=gen()), 2, 3)
    assert int(tight.sum()) == 15 and int(tight.sum(0).max()) == 3 and int(tight.sum(1).max()) <= 2


def test_capacity_limits_counts_but_not_requested() -> None:
    module = make_layer(capacity_factor=1.0, routing="token_choice")
    x = randn(32, 16, seed=2) + 2 * randn(16, seed=3)
    routing = route(module, x)
    assert int(routing.counts.max()) <= math.ceil(32 * 2 / 8) < int(routing.requested.max())
    assert int(routing.requested.sum()) == 64
    # The weights of placed tokens sum to 1.
    total = torch.zeros(32).index_add(0, routing.tokens, routing.weights)
    assert_close(total[total > 0], torch.ones(int((total > 0).sum())))
    generous = make_layer(capacity_factor=8.0, routing="token_choice")
    assert_close(generous(x), make_layer(routing="dropless")(x))


def test_expert_choice_takes_the_best_tokens() -> None:
    routing = route(make_layer(routing="expert_choice"), randn(24, 16, seed=1))
    assert routing.counts.tolist() == [6] * 8  # 24 * 2 / 8
    for e in range(8):
        best = set(routing.scores[:, e].topk(6).indices.tolist())
        assert set(routing.chosen[:, e].nonzero().flatten().tolist()) == best
    assert_close(routing.weights, routing.scores[routing.tokens, routing.experts])


@pytest.mark.parametrize("method", METHODS)
def test_routing_is_equal_in_train_and_eval(method: str) -> None:
    module = make_layer(routing=method)
    x = randn(2, 20, 16, seed=1)
    a, b = route(module.train(), x), route(module.eval(), x)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.counts, b.counts)
    assert torch.equal(a.weights, b.weights) and torch.equal(module.train()(x), module.eval()(x))


def test_dropless_routing_is_independent_of_the_batch() -> None:
    module = make_layer(scoring="sigmoid", bias_balance=True, groups=(4, 2))
    x = randn(30, 16, seed=1)
    whole, y = route(module, x).chosen, module(x)
    for n in range(30):
        assert torch.equal(route(module, x[n : n + 1]).chosen[0], whole[n])
        assert_close(module(x[n : n + 1])[0], y[n], atol=1e-5, rtol=1e-4)
    # With a capacity, routing depends on the batch.
    crowded = make_layer(routing="token_choice", capacity_factor=0.5)
    alone = torch.cat([route(crowded, x[n : n + 1]).chosen for n in range(30)])
    assert not torch.equal(route(crowded, x).chosen, alone)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_moe_trains_every_parameter(method: str, scoring: str) -> None:
    module = make_layer(routing=method, scoring=scoring, shared_hidden=10, shared_gate=True)
    x = randn(4, 32, 16, seed=1, grad=True)
    module(x).square().sum().backward()
    for name, p in [*module.named_parameters(), ("x", x)]:
        assert p.grad is not None and float(p.grad.abs().max()) > 0, name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (1, 16), (1, 1, 16), (16,)])
def test_moe_accepts_empty_and_single_batches(method: str, shape: tuple[int, ...]) -> None:
    module = make_layer(routing=method, shared_hidden=10)
    records: list[Routing] = []
    y = module(randn(*shape, seed=1), records)
    assert y.shape == shape and torch.isfinite(y).all()
    y.sum().backward()
    for name, p in module.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name


def test_expert_without_tokens_has_zero_gradient() -> None:
    module = make_layer(scoring="sigmoid", bias_balance=True)
    module.router.balance_bias[5] = -10.0
    records: list[Routing] = []
    module(randn(20, 16, seed=1), records).sum().backward()
    assert int(records[0].counts[5]) == 0
    for p in (module.experts.up[5], module.experts.down[5]):
        assert p.grad is not None and int(p.grad.count_nonzero()) == 0


def test_nan_token_affects_no_other_token() -> None:
    module = make_layer(routing="dropless")
    x = randn(6, 16, seed=1)
    clean = module(x)
    x[2] = float("nan")
    y, others = module(x), [0, 1, 3, 4, 5]
    assert y[2].isnan().all()
    assert_close(y[others], clean[others], atol=1e-5, rtol=1e-4)


def test_balance_bias_evens_loads_and_is_a_buffer() -> None:
    module = make_layer(scoring="sigmoid", bias_balance=True)
    x = randn(256, 16, seed=1) + randn(16, seed=2)
    before = route(module, x)
    for _ in range(300):
        module.router.update_balance_bias(route(module, x).requested, rate=0.01)
    after = route(module, x)
    assert float(gini(before.requested)) > 0.2 and float(gini(after.requested)) < 0.05
    assert "router.balance_bias" in module.state_dict()
    assert "router.balance_bias" not in dict(module.named_parameters())


def test_router_dropouts_apply_in_training_only() -> None:
    x = randn(200, 16, seed=1)
    torch.manual_seed(0)
    module = make_layer(token_dropout=0.5)
    assert 0.3 < unrouted(route(module, x)) < 0.7
    assert unrouted(route(module.eval(), x)) == 0
    module = make_layer(expert_dropout=0.9)  # nearly all are dropped, but top_k stay
    used = [int((route(module, x).counts > 0).sum()) for _ in range(10)]
    assert min(used) >= 2 and sum(used) < 50
    grouped = make_layer(expert_dropout=0.9, groups=(4, 2), routing="token_choice", capacity_factor=8.0)
    assert int(route(grouped, x).chosen.sum(1).min()) == 2
    assert int((route(module.eval(), x).counts > 0).sum()) == 8


def test_freeze_routers_and_expert_lr_scales_by_name() -> None:
    network = torch.nn.ModuleDict({"a": make_layer(4), "b": make_layer(4, bias_balance=True)})
    assert router_parameter_names(network) == ["a.router.weight", "b.router.weight"]
    rates = expert_lr_scales(network, {1: 0.1})
    assert len(rates) == 2 * 2 * 4 and set(rates) <= set(dict(network.named_parameters()))
    assert rates["a.experts.up.1"] == rates["b.experts.down.1"] == 0.1 and rates["a.experts.up.2"] == 1.0
    update = Update(lambda part: None, {n: ParamOptim("adamw", 1e-3 * r) for n, r in rates.items()})  # type: ignore[arg-type, return-value]
    check_updates(network, [update], [])
    for name in router_parameter_names(network):
        network.get_parameter(name).requires_grad_(False)
    network["a"](randn(9, 16, seed=1)).sum().backward()
    assert network["a"].router.weight.grad is None and network["a"].experts.up[0].grad is not None
    for bad in ({4: 1.0}, {0: -1.0}):
        with pytest.raises(ConfigError):
            expert_lr_scales(network, bad)
    with pytest.raises(ConfigError, match="no experts"):
        expert_lr_scales(torch.nn.Linear(2, 2), {})


def test_frozen_experts_leave_other_gradients_unchanged() -> None:
    x = randn(20, 16, seed=1)
    free, frozen = make_layer(), make_layer()
    for p in (frozen.experts.up[0], frozen.experts.down[1]):
        p.requires_grad_(False)
    for module in (free, frozen):
        module(x).square().sum().backward()
    for (name, a), b in zip(free.named_parameters(), frozen.parameters(), strict=True):
        if b.requires_grad:
            assert_close(a.grad, b.grad, msg=name)
        else:
            assert b.grad is None


def test_load_stats_match_manual_example() -> None:
    assert float(gini(torch.tensor([5, 5, 5, 5]))) == 0
    assert float(gini(torch.tensor([0, 0, 0, 8]))) == pytest.approx(0.75)
    assert float(gini(torch.tensor([1, 3]))) == pytest.approx(0.25)
    assert float(gini(torch.zeros(4))) == 0
    numbers = load_stats(torch.tensor([2, 2, 0, 0]), torch.tensor([2, 2, 1, 0]))
    assert numbers["load_fraction"].tolist() == [0.5, 0.5, 0, 0]
    assert float(numbers["max_over_mean_load"]) == pytest.approx(2)
    assert float(numbers["dropped_fraction"]) == pytest.approx(0.2)
    assert float(numbers["load_entropy"]) == pytest.approx(math.log(2) / math.log(4))


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "relu2", "gelu", "gelu_tanh"])
def test_single_expert_matches_mlp(kind: Any) -> None:
    layer = MixtureOfExperts(8, 12, 1, 1, kind=kind, norm_topk_prob=False, generator=gen())
    mlp = MLP(8, 12, kind)
    draw_all(mlp.parameters())
    copy_values({layer.experts.up[0]: mlp.up.weight, layer.experts.down[0]: mlp.down.weight})
    x = randn(5, 8, seed=1)
    assert torch.allclose(layer(x), mlp(x), atol=1e-5)  # one expert, whose softmax is 1
