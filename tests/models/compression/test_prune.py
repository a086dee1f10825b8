"""Pruning: requested sizes, least-squares refits against a reference, and lower error than other criteria."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models.initialization import add_noise, generator
from torch import Tensor

from whorl.errors import ConfigError
from whorl.models import LanguageModel, load_model, make_model, save_model, whorl_decoder
from whorl.models.compression.prune import OptimalBrainSurgeon, prune, teacher_log_probs
from whorl.models.transformer_config import AttentionConfig, MoEConfig, TransformerConfig

SIZE = {"vocab_size": 48, "d_model": 32, "n_layers": 2, "mlp_hidden": 40}
HEADS = {"n_heads": 4, "n_kv_heads": 4, "head_dim": 8}
FLAGS = {"bias": True, "qk_norm": True, "sink": True, "smear": True}


def network(kind: str, mixer: dict[str, Any] | None = None, **changes: Any) -> LanguageModel:
    g = generator(0)
    if kind == "decoder":
        config = whorl_decoder(**(SIZE | HEADS | {"ngram_buckets": 64} | changes))
    else:
        heads = AttentionConfig.model_validate(HEADS | FLAGS | (mixer or {}))
        config = TransformerConfig.model_validate(SIZE | {"mixers": {"a": heads}, "mlp_bias": True} | changes)
    return add_noise(make_model(config, g), 0.3, g).eval()


def ids(rows: int = 6, length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(48, (rows, length), generator=generator(seed))


def logits(model: LanguageModel) -> Tensor:
    with torch.no_grad():
        return model.logits(model(ids(seed=5)))


def mixer_of(model: LanguageModel, n: int) -> Any:
    block: Any = model.blocks[n]
    return block.mixer


KINDS = [
    ("decoder", {}),
    ("decoder", {"n_kv_heads": 2, "mlp": "swiglu", "tie_embeddings": True, "smear_keys": False}),
    ("transformer", {}),
    ("transformer", {"mixer": {"n_kv_heads": 2, "out_bias": True}, "mlp": "swiglu", "parallel": True}),
]


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_prune_of_nothing_is_identity(kind: str, changes: dict[str, Any]) -> None:
    model = network(kind, **changes)
    same = prune(model, [ids()], heads=4, mlp_hidden=40)
    assert same.config == model.config
    assert torch.equal(logits(same), logits(model))


@pytest.mark.parametrize("criterion", ["obs", "activation", "magnitude"])
@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_prune_keeps_outputs_without_silent_units(kind: str, changes: dict[str, Any], criterion: Any) -> None:
    model = network(kind, **changes)
    grouped = mixer_of(model, 0).n_kv_heads == 2
    for n in range(2):
        zeroed = [(0, 2), (1, 3)][n] if grouped else [(1,), (3,)][n]  # one per group, others in each layer
        block: Any = model.blocks[n]
        with torch.no_grad():
            for head in zeroed:
                mixer_of(model, n).out.weight[:, 8 * head : 8 * head + 8] = 0
            block.mlp.down.weight[:, [3, 17, 20 + n]] = 0
    before = logits(model)
    small = prune(model, [ids()], heads=4 - len(zeroed), mlp_hidden=37, criterion=criterion)
    assert torch.allclose(logits(small), before, atol=2e-4)
    assert torch.equal(logits(model), before)  # unchanged


SIZES: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("decoder", {}, {"heads": 2, "mlp_hidden": 24}),
    ("decoder", {"n_kv_heads": 2}, {"kv_heads": 1}),
    ("decoder", {"n_kv_heads": 2}, {"heads": 2}),
    ("transformer", {}, {"heads": 3}),
    ("transformer", {"mixer": {"n_kv_heads": 2}}, {"heads": 1, "kv_heads": 1, "mlp_hidden": 16}),
]


@pytest.mark.parametrize(("kind", "changes", "wanted"), SIZES)
def test_prune_gives_requested_size(kind: str, changes: Any, wanted: dict[str, int], tmp_path: Path) -> None:
    model = network(kind, **changes)
    small = prune(model, [ids()], **wanted)
    assert type(small) is type(model)
    assert small.params() == make_model(small.config).params()
    assert small.params()["total"] < model.params()["total"]
    mixer = mixer_of(small, 1)
    each = mixer_of(model, 1).n_heads // mixer_of(model, 1).n_kv_heads
    assert mixer.n_heads == wanted.get("heads", wanted.get("kv_heads", 0) * each or 4)
    save_model(small, tmp_path / "model")
    assert torch.allclose(logits(load_model(tmp_path / "model")), logits(small), atol=1e-5)
    loss = small.logits(small(ids())).square().mean()
    loss.backward()
    assert all(p.grad is not None for name, p in small.named_parameters() if "memory" not in name)


def correlated(d: int, n: int, seed: int) -> Tensor:
    g = generator(seed)
    low_rank = torch.randn(n, d // 2, generator=g) @ torch.randn(d // 2, d, generator=g)
    return low_rank + 0.3 * torch.randn(n, d, generator=g)


def test_optimal_brain_surgeon_matches_least_squares() -> None:
    x, w = correlated(12, 200, 0).double(), torch.randn(5, 12, generator=generator(1)).double()
    groups = torch.arange(12).view(4, 3)
    surgeon = OptimalBrainSurgeon(w, x.t() @ x, damping=0.0)

    def refit(gone: list[int]) -> tuple[Tensor, float]:
        left = [c for g in range(4) if g not in gone for c in groups[g].tolist()]
        fitted = torch.linalg.lstsq(x[:, left], x @ w.t()).solution.t()
        whole = torch.zeros_like(w)
        whole[:, left] = fitted
        return whole, float((x @ (w - whole).t()).square().sum())

    costs = torch.tensor([refit([g])[1] for g in range(4)]).double()
    assert torch.allclose(surgeon.costs(groups), costs, rtol=1e-6)
    surgeon.remove(groups[2])
    whole, cost = refit([2])
    assert torch.allclose(surgeon.weight, whole, atol=1e-8)
    more = torch.tensor([refit([2, g])[1] - cost for g in (0, 1, 3)]).double()
    assert torch.allclose(surgeon.costs(groups[[0, 1, 3]]), more, rtol=1e-6)
    surgeon.remove(groups[0])
    assert torch.allclose(surgeon.weight, refit([2, 0])[0], atol=1e-8)
    single = OptimalBrainSurgeon(w, x.t() @ x)
    want = single.weight.square().sum(0) / single.inverse.diag()
    assert torch.allclose(single.costs(torch.arange(12)[:, None]), want)


def errors_of(model: LanguageModel, rows: int, criteria: tuple[Any, ...], **sizes: int) -> list[float]:
    """Return the change of the logits by each criterion."""
    g, before = generator(0), logits(model)
    pruned = [prune(model, [ids(rows)], criterion=c, generator=g, **sizes) for c in criteria]
    return [float((logits(small) - before).norm()) for small in pruned]


def test_prune_obs_removes_one_of_two_equal_heads() -> None:
    model = network("decoder", smear_keys=False)
    with torch.no_grad():
        for n in range(2):
            attention = mixer_of(model, n)
            qkv = attention.qkv.weight.view(3, 4, 8, 32)
            qkv[:, 2] = qkv[:, 1]  # head 2 repeats head 1, and both matter
            attention.temperature[2] = attention.temperature[1]
            attention.out.weight[:, 8:24] *= 3
    obs, activation, magnitude = errors_of(model, 16, ("obs", "activation", "magnitude"), heads=3)
    assert obs < 0.35 * min(activation, magnitude)


def test_prune_obs_beats_other_criteria() -> None:
    model = network("transformer")
    obs, activation, random = errors_of(model, 32, ("obs", "activation", "random"), mlp_hidden=24)
    assert obs < 0.9 * activation and activation < random


def test_teacher_log_probs_match_logits() -> None:
    model = network("decoder")
    want = logits(model).log_softmax(-1)
    values, found = teacher_log_probs(model, ids(seed=5))
    assert torch.allclose(values, want, atol=1e-6) and torch.equal(found[0, 0], torch.arange(48))
    values, found = teacher_log_probs(model, ids(seed=5), top_k=5)
    assert torch.allclose(values, want.topk(5).values, atol=1e-6) and torch.equal(found, want.topk(5).indices)


EXPERTS = MoEConfig(n_experts=4, top_k=2, hidden=16)
REJECTED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("decoder", {}, {"heads": 5}, "heads is 5"),
    ("decoder", {}, {"heads": 0}, "kv_heads is 0"),
    ("decoder", {"n_kv_heads": 2}, {"heads": 3}, "heads is 3"),
    ("decoder", {}, {"mlp_hidden": 41}, "mlp_hidden is 41"),
    ("decoder", {}, {"mlp_hidden": 8, "criterion": "taste"}, "criterion is 'taste'"),
    ("transformer", {"mixer": {"alibi": True, "rope": None}}, {"heads": 2}, "alibi"),
    ("transformer", {"mixer": {"qk_norm": "all_heads"}}, {"heads": 2}, "all_heads"),
    ("transformer", {"mixer": {"smear": False}, "kv_sharing_factor": 2}, {"heads": 2}, "layers share them"),
    ("transformer", {"experts": EXPERTS}, {"mlp_hidden": 8}, "mixture"),
]


@pytest.mark.parametrize(("kind", "changes", "wanted", "message"), REJECTED)
def test_prune_rejects_impossible_requests(kind: str, changes: Any, wanted: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prune(network(kind, **changes), [ids()], **wanted)
