"""Optimizers against references, and the partition of their work."""

from __future__ import annotations

import pytest
import torch
from tests.support.train import reference_optim as reference
from tests.support.train.reference_optim import BETAS, EPS

from whorl.models import Transformer
from whorl.plan.accounting.model_cost import decoder_config
from whorl.train.config import OptimConfig
from whorl.train.learner.update import Update
from whorl.train.learner.zero1 import partition_parameters
from whorl.train.lm.objective import param_optims
from whorl.train.optim.clipping import clip_grad_norm_
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


@pytest.mark.parametrize("size", [1.0, 1e-6])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_matches_reference_and_torch(decay: float, fused: bool, size: float) -> None:
    """Two parameters at two learning rates; one decays. Gradients of 1e-6 to 1e-9 are of the size of eps."""
    g = torch.Generator().manual_seed(0)
    starts = {"matrix": torch.randn(5, 3, generator=g), "gain": torch.randn(4, generator=g)}
    rates, decays = {"matrix": 0.01, "gain": 0.03}, {"matrix": decay, "gain": 0.0}
    ours, plain = ({n: p.clone() for n, p in starts.items()} for _ in range(2))
    expected = {n: torch.nn.Parameter(p.clone()) for n, p in starts.items()}
    mine = AdamW(list(ours.items()), rates, betas=BETAS, eps=EPS, weight_decay=decay, fused=fused,
                 decay_scale={"matrix": 1.0, "gain": 0.0})  # fmt: skip
    groups = [{"params": [p], "lr": rates[n], "weight_decay": decays[n]} for n, p in expected.items()]
    peer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, foreach=False)
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in starts.items()}
    for step in range(1, 21):
        gradients = {
            n: torch.randn(p.shape, generator=g) * size * 10.0 ** -(step % 4) for n, p in starts.items()
        }
        mine.step(gradients, 1.0)
        for name, gradient in gradients.items():
            expected[name].grad = gradient.clone()
            reference.adamw(plain[name], *moments[name], gradient, step, rates[name], decays[name])
        peer.step()
    for name in starts:
        torch.testing.assert_close(ours[name], plain[name], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(ours[name], expected[name].detach(), atol=2e-6, rtol=2e-6)


def test_clip_grad_norm_matches_torch() -> None:
    params = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (1, 4, 2)]
    for limit in (0.5, 1e9):
        for n, p in enumerate(params[:2]):  # the third has no gradient
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(n))
        expected = [torch.nn.Parameter(p.detach()) for p in params[:2]]
        for p, q in zip(params, expected, strict=False):
            q.grad = None if p.grad is None else p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(expected, limit)
        assert clip_grad_norm_(params, limit) == pytest.approx(float(norm), rel=1e-6)
        for p, q in zip(params, expected, strict=False):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-5)
    assert clip_grad_norm_([], 1.0) == 0.0


def test_muon_follows_svd_reference() -> None:
    """A wide and a tall matrix, which are updated as one batch."""
    g = torch.Generator().manual_seed(0)
    starts = {"wide": torch.randn(8, 24, generator=g), "tall": torch.randn(24, 8, generator=g)}
    ours, plain = ({n: p.clone() for n, p in starts.items()} for _ in range(2))
    means = {n: torch.zeros_like(p) for n, p in starts.items()}
    muon = Muon([list(ours.items())], 0.05, weight_decay=0.2)
    for _ in range(5):
        gradients = {n: torch.randn(p.shape, generator=g) for n, p in starts.items()}
        muon.step(gradients, 1.0)
        for name, gradient in gradients.items():
            reference.muon(plain[name], means[name], gradient, lr=0.05, momentum=0.95, decay=0.2)
    for name, start in starts.items():
        way, exact = (ours[name] - start).flatten(), (plain[name] - start).flatten()
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
    model = Transformer(decoder_config(64, 3, 256), torch.Generator().manual_seed(0))
    shapes = {n: p.shape for n, p in model.named_parameters()}
    update = Update(lambda part: None, param_optims(model, OptimConfig()), muon_every=2)  # type: ignore[arg-type, return-value]
    muon = update.names_for("muon")
    parts = Muon.step_groups(update, {n: shapes[n] for n in muon})
    assert sorted(parts[0] + parts[1]) == sorted(muon)
    weights = [sum(shapes[n].numel() for n in part) for part in parts]
    assert max(weights) < 1.4 * min(weights)
    for size in (1, 2, 3):
        owned = partition_parameters(update, shapes, size)
        every = update.names_for("muon") + update.names_for("adamw")
        assert sorted(n for mine in owned for n in mine) == sorted(every)
