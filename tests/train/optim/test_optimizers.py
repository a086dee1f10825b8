"""Optimizers against references, and the partition of their work."""

from __future__ import annotations

import pytest
import torch
from tests.support.train.reference_optim import adamw as adamw_reference
from tests.support.train.reference_optim import muon as muon_reference

from whorl.models import Decoder
from whorl.plan.cost import decoder_config
from whorl.train.config import OptimConfig
from whorl.train.learner.update import Update
from whorl.train.learner.zero1 import partition_parameters, update_groups
from whorl.train.lm.objective import param_optims
from whorl.train.optim.optimizers import AdamW, Muon, SparseAdagrad, orthogonalize


@pytest.mark.parametrize("shape", [(8, 32), (16, 17), (24, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonalize_keeps_directions_and_levels_sizes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    out = orthogonalize(x.to(dtype, copy=True)).float()
    u, sizes, vt = torch.linalg.svd(x, full_matrices=False)
    after = u.mT @ out @ vt.mT  # [3, n, n]: diagonal if directions are kept
    levels = after.diagonal(dim1=-2, dim2=-1)
    strong = sizes > 0.01 * x.norm(dim=(-2, -1))[:, None]
    assert levels[strong].min() > 0.68 and levels[strong].max() < 1.3
    if shape != (16, 17):  # nearly square: the weakest directions stay weak
        exact = u @ vt
        cosine = (out * exact).sum((1, 2)) / (out.norm(dim=(1, 2)) * exact.norm(dim=(1, 2)))
        assert cosine.min() > 0.97
    assert (levels[~strong] < 0.75).all() and (levels > 0).all()
    assert (after - torch.diag_embed(levels)).abs().max() < (1e-3 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_matches_reference_and_torch(decay: float, fused: bool) -> None:
    """Two parameters at two learning rates; one decays."""
    g = torch.Generator().manual_seed(0)
    starts = {"matrix": torch.randn(5, 3, generator=g), "gain": torch.randn(4, generator=g)}
    rates, decays = {"matrix": 0.01, "gain": 0.03}, {"matrix": decay, "gain": 0.0}
    betas, eps = (0.8, 0.95), 1e-8
    ours, plain, hatless = ({n: p.clone() for n, p in starts.items()} for _ in range(3))
    theirs = {n: torch.nn.Parameter(p.clone()) for n, p in starts.items()}
    mine = AdamW(list(ours.items()), rates, betas=betas, eps=eps, weight_decay=decay, fused=fused,
                 decay_scale={"matrix": 1.0, "gain": 0.0})  # fmt: skip
    groups = [{"params": [p], "lr": rates[n], "weight_decay": decays[n]} for n, p in theirs.items()]
    peer = torch.optim.AdamW(groups, betas=betas, eps=eps, foreach=False)
    moments = [{n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in starts.items()} for _ in range(2)]
    for step in range(1, 21):
        gradients = {n: torch.randn(p.shape, generator=g) * 10.0 ** -(step % 4) for n, p in starts.items()}
        mine.step(gradients, 1.0)
        for name, gradient in gradients.items():
            theirs[name].grad = gradient.clone()
            more = {"lr": rates[name], "betas": betas, "eps": eps, "weight_decay": decays[name]}
            adamw_reference(plain[name], *moments[0][name], gradient, step, **more)  # type: ignore[arg-type]
            adamw_reference(hatless[name], *moments[1][name], gradient, step, **more, eps_hat=False)  # type: ignore[arg-type]
        peer.step()
    for name in starts:
        torch.testing.assert_close(ours[name], plain[name], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(theirs[name].detach(), hatless[name], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(
            ours[name], theirs[name].detach(), atol=1e-5, rtol=1e-5
        )  # eps is added in another place


def test_muon_follows_svd_reference() -> None:
    g = torch.Generator().manual_seed(0)
    for size in ((8, 24), (24, 8)):
        ours = torch.randn(size, generator=g)
        plain, mean, start = ours.clone(), torch.zeros(size), ours.clone()
        muon = Muon([[("p", ours)]], 0.05, weight_decay=0.2)
        for _ in range(5):
            gradient = torch.randn(size, generator=g)
            muon.step({"p": gradient}, 1.0)
            muon_reference(plain, mean, gradient, lr=0.05, momentum=0.95, weight_decay=0.2)
        way, exact = (ours - start).flatten(), (plain - start).flatten()
        assert float(torch.cosine_similarity(way, exact, dim=0)) > 0.97
        assert 0.85 < float(way.norm() / exact.norm()) < 1.1


def test_sparse_adagrad_matches_loop_over_rows() -> None:
    g = torch.Generator().manual_seed(0)
    table, loop = torch.zeros(10, 4), torch.zeros(10, 4)
    squares = torch.zeros(10)
    optimiser = SparseAdagrad([("t", table)], 0.1)
    for _ in range(5):
        rows = torch.randint(0, 10, (7,), generator=g)
        gradients = torch.randn(7, 4, generator=g)
        optimiser.step("t", table, rows, gradients, 0.5)
        for row in set(rows.tolist()):
            total = gradients[rows == row].sum(0)
            squares[row] += total.square().mean()
            loop[row] -= 0.1 * 0.5 * total / (squares[row].sqrt() + 1e-8)
    torch.testing.assert_close(table, loop)


def test_muon_update_has_equal_singular_values() -> None:
    g = torch.Generator().manual_seed(0)
    params = [("wide", torch.zeros(8, 16)), ("tall", torch.zeros(16, 8))]  # updated as one batch
    gradients = {name: torch.randn(p.shape, generator=g) for name, p in params}
    Muon([params], 0.1).step(gradients, 1.0)
    for name, p in params:
        values = torch.linalg.svdvals(p) / max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        assert values.max() < 0.13 and values.min() > 0.06
        u, _, vt = torch.linalg.svd(gradients[name], full_matrices=False)
        assert float((p * -(u @ vt)).sum() / (p.norm() * 8**0.5)) > 0.97


def test_muon_groups_take_turns_with_larger_steps() -> None:
    g = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(8, 16, generator=g) for name in "ab"}
    once = {name: torch.zeros(8, 16) for name in "ab"}
    Muon([list(once.items())], 0.1).step(gradients, 1.0)
    turned = {name: torch.zeros(8, 16) for name in "ab"}
    muon = Muon([[("a", turned["a"])], [("b", turned["b"])]], 0.1)
    muon.step(gradients, 1.0)
    assert torch.allclose(turned["a"], 2 * once["a"], atol=1e-6) and not turned["b"].any()
    before = turned["a"].clone()
    muon.step(gradients, 1.0)  # same gradient, same direction
    assert torch.equal(turned["a"], before) and torch.allclose(turned["b"], 2 * once["b"], atol=1e-3)


def test_partition_is_balanced_for_any_replica_count() -> None:
    model = Decoder(decoder_config(64, 3, 256), torch.Generator().manual_seed(0))
    shapes = {n: p.shape for n, p in model.named_parameters()}
    update = Update(lambda part: None, param_optims(model, OptimConfig()), muon_every=2)  # type: ignore[arg-type, return-value]
    parts = update_groups(update, shapes)
    assert parts[0] | parts[1] == set(update.names_for("muon")) and not parts[0] & parts[1]
    weights = [sum(shapes[n].numel() for n in part) for part in parts]
    assert max(weights) < 1.4 * min(weights)
    for size in (1, 2, 3):
        owned = partition_parameters(update, shapes, size)
        assert sorted(n for mine in owned for n in mine) == sorted(
            update.names_for("muon") + update.names_for("adamw")
        )
