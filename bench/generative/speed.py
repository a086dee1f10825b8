"""Seconds of a training step of the DiT and the U-Net against diffusers, compiled, in the faster of fp32 and bf16.

    python -m pip install diffusers
    python bench/generative/speed.py

Both sides: DDPM that predicts v, pictures of 3 x 32 x 32 with 10 classes, fused AdamW, gradients clipped, no average of the
weights, 2 threads. The DiT has 6 blocks of width 256 on patches of 4, batch 32; the U-Net 3 levels of 64, 128 and 128
channels, batch 16. The blocks of the DiT are equal. A level of diffusers' U-Net has one residual block more, so its
figure is FLOP/s. Rounds alternate, and the figure of a side is its median step.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, skip

from whorl.generative.data import Data, DataInfo
from whorl.generative.methods.registration import parse_config
from whorl.generative.task import GenerativeTask
from whorl.nn.compiler import compiled
from whorl.train.rows import train_rows

SIDE, CLASSES, BAR = 32, 10, 1.2
DIT = {"width": 256, "depth": sized(6, 1), "n_heads": 4, "patch": 4, "batch_size": sized(32, 2)}
UNET = {"width": 64, "depth": 3, "n_heads": 4, "network": "unet", "batch_size": sized(16, 2)}
ROUNDS, STEPS = sized((4, 12), (1, 2))


def make_task(settings: dict[str, Any], is_compiled: bool) -> GenerativeTask:
    """Return our task on random pictures."""
    rng = torch.Generator().manual_seed(0)
    rows, labels = torch.rand(256, 3, SIDE, SIDE, generator=rng) * 2 - 1, torch.arange(256) % CLASSES
    info = DataInfo(
        name="noise", shape=(3, SIDE, SIDE), classes=tuple(map(str, range(CLASSES))), fingerprint="noise"
    )
    config = parse_config("ddpm", {"steps": STEPS, "threads": 2, "train": {"ema": 0.0}, **settings})
    task = GenerativeTask(Data(info, rows, rows[:16], labels, labels[:16]), config)
    if is_compiled:
        task.networks.forward = compiled(task.networks.forward)
    return task


def our_steps(task: GenerativeTask) -> list[float]:
    """Return the seconds of each step but the first of a run."""
    ends = list[float]()
    train_rows(task, callback=lambda step, metrics: ends.append(time.perf_counter()))
    return [b - a for a, b in pairwise(ends)]


def peer_network(settings: dict[str, Any]) -> nn.Module:
    import diffusers

    width = settings["width"]
    if "patch" in settings:
        transformer: nn.Module = diffusers.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=width // 4, in_channels=3, num_layers=settings["depth"],
            sample_size=SIDE, patch_size=settings["patch"], num_embeds_ada_norm=CLASSES,
        )  # fmt: skip
        return transformer
    unet: nn.Module = diffusers.UNet2DModel(
        sample_size=SIDE, layers_per_block=1, block_out_channels=(width, 2 * width, 2 * width), norm_num_groups=8,
        down_block_types=("DownBlock2D",) * 3, up_block_types=("UpBlock2D",) * 3, attention_head_dim=2 * width // 4,
        num_class_embeds=CLASSES + 1,
    )  # fmt: skip
    return unet


def peer_steps(network: nn.Module, batch_size: int, is_bf16: bool) -> Callable[[int], list[float]]:
    """Return a function that runs n steps of diffusers' network and returns the seconds of each."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(prediction_type="v_prediction", beta_schedule="squaredcos_cap_v2")
    rows, labels = torch.rand(256, 3, SIDE, SIDE) * 2 - 1, torch.arange(256) % CLASSES
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    forward = torch.compile(network)
    names = ("timestep", "class_labels")

    def step() -> None:
        chosen = torch.randint(256, (batch_size,))
        x, steps = rows[chosen], torch.randint(0, 1000, (batch_size,))
        noise = torch.randn_like(x)
        noisy, target = scheduler.add_noise(x, noise, steps), scheduler.get_velocity(x, noise, steps)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            found = forward(noisy, **dict(zip(names, (steps, labels[chosen]), strict=True))).sample
        F.mse_loss(found.float(), target).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def run(n: int) -> list[float]:
        seconds = list[float]()
        for _ in range(n):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        return seconds

    return run


def flops(network: nn.Module, *inputs: Tensor) -> int:
    """Return the operations of a forward pass."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(*inputs)
    return counter.get_total_flops()


def main() -> None:
    parse(__doc__, smoke={})
    if importlib.util.find_spec("diffusers") is None:
        skip("no diffusers: python -m pip install diffusers")
    torch.set_num_threads(2)
    for name, settings in (("DiT", DIT), ("U-Net", UNET)):
        batch = settings["batch_size"]
        sides: dict[str, Callable[[], list[float]]] = {}
        for kind in ("eager", "compiled"):
            task = make_task(settings, kind == "compiled")
            sides[f"ours, {kind}"] = lambda task=task: our_steps(task)
        for kind in ("fp32", "bf16"):
            run = peer_steps(peer_network(settings), batch, kind == "bf16")
            run(2)  # compiles
            sides[f"diffusers, {kind}"] = lambda run=run: run(STEPS)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(ROUNDS):
            for side, measured in sides.items():
                seconds[side] += measured()
        medians = {side: statistics.median(values) for side, values in seconds.items()}
        print(name, {side: f"{value * 1000:.1f} ms" for side, value in medians.items()}, flush=True)
        x, steps = torch.randn(batch, 3, SIDE, SIDE), torch.full((batch,), 500)
        labels = torch.zeros(batch, dtype=torch.long)
        ours = min(value for side, value in medians.items() if side.startswith("ours"))
        peer = min(value for side, value in medians.items() if side.startswith("diffusers"))
        work = 1.0
        if name == "U-Net":
            mine, others = make_task(settings, False).networks, peer_network(settings)
            work = flops(mine, x, steps / 1000, labels) / flops(others, x, steps, labels)
        print(f"{name}: FLOP against diffusers {work:.3f}", flush=True)
        ratio = peer / ours * work
        same = medians["diffusers, fp32"] / ours * work
        claim(
            f"training step of the {name}, {'FLOP/s' if work != 1 else 'steps/s'}, against diffusers compiled, best type"
            f" ({same:.2f} x in fp32)", ours=1 / ours, peer=1 / peer, unit="steps/s", ratio=ratio, bar=BAR,
            ok=ratio >= BAR, peer_name="diffusers", variant=name, samples=[seconds],
        )  # fmt: skip


if __name__ == "__main__":
    main()
