"""A mixture of experts, forward and backward, against the dense MLP of equal FLOPs and against `transformers`' block.

    python bench/nn/moe_layer.py
    python bench/nn/moe_layer.py --quick     # few rounds; no bf16 on a CPU that emulates it

16 experts, top 2, width 256, hidden 512, 2,048 tokens. Contenders alternate in every round; figures are medians. There
are two bars in fp32, the dtype of all weights. One is 1.3 x the time of a gated MLP of hidden width 2 x 512, at most.
The other is 1.25 x the speed of the peer's best setting; bf16 is in the samples only. Whorl keeps fp32 weights
and casts 6 million of them, while the peer's weights and gradients are bf16. "ours, MKL" is Whorl's layer with the
library that the others use (see `product` in nn/experts/experts.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, emulates_bf16, parse_quick, sized, smoke
from torch import nn

from whorl.machine.device_probe import probe
from whorl.nn.experts import MixtureOfExperts, experts
from whorl.nn.mlp import MLP

EXPERTS, TOP_K, WIDTH, HIDDEN, TOKENS = 16, 2, sized(256, 64), sized(512, 64), sized(2048, 128)
SETTINGS = ("eager", "grouped_mm", "batched_mm")  # of transformers


def peers(quick: bool) -> dict[str, nn.Module]:
    try:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError:
        print("transformers is not here: no peer")
        return {}
    blocks = {}
    for setting in SETTINGS[: 2 if quick else 3]:
        config = MixtralConfig(
            hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
            router_jitter_noise=0.0,
        )  # fmt: skip
        config._experts_implementation = setting
        blocks[f"transformers {setting}"] = MixtralSparseMoeBlock(config)
    return blocks


@contextmanager
def library(contender: str) -> Iterator[None]:
    usual = experts._onednn_is_faster
    if contender == "ours, MKL":
        experts._onednn_is_faster = lambda: False
    yield
    experts._onednn_is_faster = usual


def step(module: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> float:
    """Milliseconds of one forward and backward, gradients of input and all weights, which find none before."""
    module.zero_grad(set_to_none=True)
    x.grad = None
    began = time.perf_counter()
    module(x).backward(upstream)
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    quick = parse_quick(__doc__)
    machine = probe()
    machine.apply()
    torch.manual_seed(0)
    ours = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, TOP_K)
    contenders: dict[str, nn.Module] = {
        "ours": ours,
        "ours, MKL": ours,
        "dense": MLP(WIDTH, TOP_K * HIDDEN, "swiglu"),
        **peers(quick),
    }
    with torch.no_grad():
        for module in contenders.values():
            for p in module.parameters():
                p.normal_(std=0.05)
        for (
            name,
            module,
        ) in contenders.items():  # the same function: a figure of something else would be worth nothing
            if name.startswith("transformers"):
                module.gate.weight.copy_(ours.router.weight)
                module.experts.gate_up_proj.copy_(ours.experts.stacked()[0])
                module.experts.down_proj.copy_(ours.experts.stacked()[1])
                probe_x = torch.randn(1, 64, WIDTH)
                torch.testing.assert_close(module(probe_x), ours(probe_x), atol=1e-4, rtol=1e-3)
    rows, figures = [], {}
    slow_bf16 = quick and not smoke() and emulates_bf16()
    for dtype in (torch.float32, torch.bfloat16)[: 1 if slow_bf16 else 2]:
        # ours and the dense layer keep fp32 weights and cast; the peer's way to run in bf16 is to hold bf16 weights
        for name, module in contenders.items():
            if name.startswith("transformers"):
                module.to(dtype)
        x = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
        upstream = torch.randn(1, TOKENS, WIDTH, dtype=dtype)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        left_out: set[str] = set()
        for turn in range(5 if quick else 33):
            for name, module in contenders.items():
                if name in left_out:
                    continue
                with library(name):
                    took = step(module, x, upstream)
                if turn:
                    times[name].append(took)
                elif name.endswith("batched_mm") and took > 2000:
                    left_out.add(name)  # it copies a matrix for every assignment; one look is enough
                    times[name].append(took)
        result = {name: median(t) for name, t in times.items()}
        figures[dtype] = result
        rows.append({"dtype": str(dtype), **{name: round(t, 2) for name, t in result.items()}})
        print(rows[-1], flush=True)
    chosen = figures[torch.float32]
    best = {name: t for name, t in chosen.items() if name.startswith("transformers")}
    ratio = chosen["ours"] / chosen["dense"]
    claim(
        "16 experts, top 2, forward and backward: time relative to dense", ours=chosen["ours"],
        peer=chosen["dense"], unit="ms", ratio=ratio, bar=1.3, ok=ratio <= 1.3, samples=rows, quick=quick,
        peer_name="dense MLP of equal FLOPs", variant="dense",
    )  # fmt: skip
    if best:
        name, peer = min(best.items(), key=lambda item: item[1])
        ratio = peer / chosen["ours"]
        claim(
            f"16 experts, top 2, forward and backward ({name})", ours=chosen["ours"], peer=peer,
            unit="ms", ratio=ratio, bar=1.25, ok=ratio >= 1.25, samples=rows, quick=quick,
            peer_name="transformers, best settings",
        )  # fmt: skip


if __name__ == "__main__":
    main()
