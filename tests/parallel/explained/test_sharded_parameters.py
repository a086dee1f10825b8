"""Sharded optimizer state and fully sharded parameters: equal to one process."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from whorl.parallel.explained.ddp import DDP
from whorl.parallel.explained.fsdp import FSDP
from whorl.parallel.explained.sharded_optimizer import ShardedOptimizer
from whorl.parallel.ranks import run_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Toy(nn.Module):
    """A language model with a tied head, a block that is used twice, a frozen matrix and one that is not used."""

    def __init__(self, tied: bool, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.blocks[1].up.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
            self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def fsdp_case(tied: bool, recompute: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    one = Toy(tied)
    torch.manual_seed(rank)
    model = FSDP(Toy(tied, recompute))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (one, model)]
    held = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert held < sum(p.numel() for p in one.parameters()) / world + 100
    for step in range(3):
        ids = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(one, ids).backward()
        mine = ids.chunk(world)[rank]
        for part in mine.chunk(2 if step == 1 else 1):  # two backwards in one step
            (loss_of(model, part) / (2 if step == 1 else 1)).backward()
            if step != 1:
                model.finish_gradient_synchronization()
        if step == 1:
            model.finish_gradient_synchronization()
        for optimizer in optimizers:
            optimizer.step()
        full = model.gather_full_params()
        for name, param in one.named_parameters():
            torch.testing.assert_close(
                full[name], param, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert all(full.untyped_storage().nbytes() == 0 for unit in model._units.values() for full in unit.full)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), one(ids), rtol=1e-4, atol=1e-5)
    assert all(full.untyped_storage().nbytes() == 0 for unit in model._units.values() for full in unit.full)
    assert model.module.unused.weight.grad is None and model.module.blocks[1].up.weight.grad is None


def half_case() -> None:
    """Weights and inputs of modules with matrices in half precision, as a reference that casts them itself."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    one, model = deepcopy(base), FSDP(base, torch.float16)

    def reference(x: Tensor) -> Tensor:
        for layer in one:
            if isinstance(layer, nn.Linear):
                x = functional.linear(x.half(), layer.weight.half(), layer.bias.half())
            else:
                x = layer(x.float() if isinstance(layer, nn.LayerNorm) else x)
        return x

    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        outputs = reference(x), model(x.chunk(world)[rank])
        assert outputs[1].dtype == torch.float16
        for output in outputs:
            output.float().square().mean().backward()
        model.finish_gradient_synchronization()
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
        for m in (one, model):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
        full = model.gather_full_params()
        for name, param in one.named_parameters():
            torch.testing.assert_close(full[name], param.detach(), rtol=1e-3, atol=1e-4)


def optimizer_case(tied: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    one = Toy(tied)
    model = deepcopy(one)

    def groups(m: nn.Module) -> list[dict[str, object]]:
        params = list(m.parameters())
        return [{"params": params[:3], "lr": 0.02}, {"params": params[3:]}]

    plain = torch.optim.AdamW(groups(one), lr=0.01, weight_decay=0.1)
    sharded = ShardedOptimizer(groups(model), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (plain, sharded)]
    for step in range(6):
        if step == 4:  # from a checkpoint
            state = deepcopy(sharded.state_dict())
            sharded = ShardedOptimizer(groups(model), torch.optim.AdamW)
            sharded.load_state_dict(state)
            schedulers[1].optimizer = sharded
        ids = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
        for m, optimizer, scheduler in zip((one, model), (plain, sharded), schedulers, strict=True):
            optimizer.zero_grad()
            loss_of(m, ids).backward()
            if rank != 0 and m is model:
                for p in (q for r, owned in enumerate(sharded.owned) if r != rank for q in owned):
                    p.grad = None  # only the owner's gradient is used
            optimizer.step()
            scheduler.step()
        for found, expected in zip(model.parameters(), one.parameters(), strict=True):
            assert torch.equal(found, expected)
    assert sum(len(s) for s in plain.state.values()) > sum(len(s) for s in sharded.state.values()) > 0
    sizes = [sum(p.numel() for p in owned) for owned in sharded.owned]
    assert max(sizes) < 1.5 * sum(sizes) / world
    with pytest.raises(ValueError, match="some parameters appear"):
        sharded.add_param_group({"params": [next(model.parameters())]})


def sparse_case() -> None:
    ids = torch.tensor([1, 2, 2, 4])
    one = nn.Embedding(5, 3, _weight=torch.ones(5, 3))
    one(ids).square().mean().backward()
    for wrap in (DDP, FSDP):
        model = wrap(nn.Embedding(5, 3, _weight=torch.ones(5, 3), sparse=True))
        model(ids.chunk(2)[dist.get_rank()]).square().mean().backward()
        model.finish_gradient_synchronization()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        whole = model.gather_full_params()["weight"] if isinstance(model, FSDP) else model.module.weight
        torch.testing.assert_close(whole, one.weight - one.weight.grad)


def all_cases() -> None:
    sparse_case()
    for tied in (False, True):
        fsdp_case(tied, recompute=tied)
        optimizer_case(tied)
    half_case()


def test_fsdp_and_sharded_optimizer_equal_one_process():
    run_ranks(2, all_cases)
