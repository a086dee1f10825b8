"""Steps of the samplers and the DiT against diffusers, and transport against POT: the largest difference.

    python -m pip install diffusers POT
    python bench/generative/exact.py

The same noise and the same predictions go to both sides of a step, in fp64. The DiT has random weights, in fp32. One term of
it has no weights and differs: frequency i of its 256 time waves is 10000^(-i / 128) here, as in the paper's own code, and
10000^(-i / 127) in diffusers. Both sides get the waves of diffusers; the difference with our own is printed too.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, skip

from whorl.generative import distances
from whorl.generative.samplers import ancestral_step, ddim_step
from whorl.models.vector_denoiser import TIME_SCALE
from whorl.models.vision.dit import DiT
from whorl.objectives.generative.diffusion import SCHEDULES

PATHS = {"linear": "linear", "cosine": "squaredcos_cap_v2"}  # ours -> name in diffusers
PREDICTIONS: dict[Any, str] = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
TIMES = (50, 250, 500, 750, 900)  # of 1,000


def schedulers(kind: str, path: str, prediction: str) -> Any:
    import diffusers

    settings = {"clip_sample": False, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": path}
    found: Any = getattr(diffusers, kind)(num_train_timesteps=1000, prediction_type=prediction, **settings)
    return found


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def steps_of_diffusers() -> dict[str, float]:
    x, value = torch.randn(2, 16, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    worst = dict.fromkeys(("schedule", "DDIM", "ancestral"), 0.0)
    for ours, theirs in PATHS.items():
        path = SCHEDULES[ours]()
        for kind, name in PREDICTIONS.items():
            ddim, ddpm = (schedulers(k, theirs, name) for k in ("DDIMScheduler", "DDPMScheduler"))
            ddim.set_timesteps(20)
            ddpm.set_timesteps(1000)
            for n in TIMES:  # their index n - 1 is our time n / 1000
                point = path.at(n / 1000, x)
                difference = abs(float(point.a.flatten()[0] ** 2) - float(ddim.alphas_cumprod[n - 1]))
                worst["schedule"] = max(worst["schedule"], difference)
                data, noise = point.split(kind, value, x)
                other = ddim.step(value, n - 1, x).prev_sample
                one = ddim_step(path, x, max(0, n - 50) / 1000, data, noise)
                worst["DDIM"] = max(worst["DDIM"], largest_difference(one, other))
                z = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(n))
                other = ddpm.step(value, n - 1, x, generator=torch.Generator().manual_seed(n)).prev_sample
                one = ancestral_step(path, x, n / 1000, (n - 1) / 1000, data, z)
                worst["ancestral"] = max(worst["ancestral"], largest_difference(one, other))
    return worst


def weights_of_diffusers(ours: DiT, n_blocks: int) -> dict[str, Tensor]:
    """Return the weights of a DiT under the names and in the order of diffusers' `DiTTransformer2DModel`."""
    w, patch = ours.state_dict(), ours.patch
    rows = torch.arange(len(w["last.bias"])).view(-1, patch, patch).permute(1, 2, 0).flatten()
    found = {"pos_embed.proj.bias": w["embedding.linear.bias"]}
    found["pos_embed.proj.weight"] = w["embedding.linear.weight"].unflatten(1, (-1, patch, patch))
    pairs = {"modulation": "proj_out_1"}
    for i in range(n_blocks):
        block, theirs = f"blocks.{i}", f"transformer_blocks.{i}"
        embedding = f"{theirs}.norm1.emb"  # each block has its own there; here all have one
        pairs[f"{block}.modulation"] = f"{theirs}.norm1.linear"
        pairs |= {f"{block}.attention.{n}": f"{theirs}.attn1.to_{n}" for n in "qkv"}
        pairs[f"{block}.attention.out"] = f"{theirs}.attn1.to_out.0"
        pairs |= {f"{block}.mlp.up": f"{theirs}.ff.net.0.proj", f"{block}.mlp.down": f"{theirs}.ff.net.2"}
        found[f"{embedding}.class_embedder.embedding_table.weight"] = w["condition.classes"]
        for name, layer in (("up", "linear_1"), ("out", "linear_2")):
            for kind in ("weight", "bias"):
                found[f"{embedding}.timestep_embedder.{layer}.{kind}"] = w[f"condition.{name}.{kind}"]
    for name, other in pairs.items():
        found |= {f"{other}.{kind}": w[f"{name}.{kind}"] for kind in ("weight", "bias")}
    return found | {f"proj_out_2.{kind}": w[f"last.{kind}"][rows] for kind in ("weight", "bias")}


@torch.no_grad()
def dit_of_diffusers() -> dict[str, float]:
    from diffusers import DiTTransformer2DModel

    width, depth, heads, classes, rng = 256, 3, 4, 10, torch.Generator().manual_seed(0)
    ours = DiT(8, 3, width=width, depth=depth, n_heads=heads, n_classes=classes, generator=rng)
    for p in ours.parameters():  # the last layers and the gates start at 0
        p.add_(torch.randn(p.shape, generator=rng) * 0.05)
    theirs = DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=width // heads, in_channels=3, num_layers=depth, sample_size=8,
        patch_size=2, num_embeds_ada_norm=classes, norm_eps=1e-6,
    ).eval()  # fmt: skip
    theirs.load_state_dict(weights_of_diffusers(ours, depth))
    theirs.pos_embed.pos_embed.copy_(ours.positions[None])  # fixed waves there, a buffer that is not stored
    x, steps = torch.randn(6, 3, 8, 8, generator=rng), torch.tensor([1, 10, 250, 500, 999, 1000])
    labels = torch.tensor([0, 3, 5, 9, classes, classes])  # the last number is no class on both sides
    wanted = theirs(x, timestep=steps, class_labels=labels).sample
    own = largest_difference(ours(x, steps / TIME_SCALE, labels), wanted)
    print(
        f"DiT with our own time waves: {own:.1e} of values up to {float(wanted.abs().max()):.1f}", flush=True
    )
    ours.condition.waves = theirs.transformer_blocks[0].norm1.emb.time_proj
    return {"DiT": largest_difference(ours(x, steps / TIME_SCALE, labels), wanted)}


def transport_of_pot() -> dict[str, float]:
    import ot

    rng = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=rng, dtype=torch.float64)
    y = torch.randn(200, 2, generator=rng, dtype=torch.float64) * 1.3 + 0.5
    costs = distances.squared_distances(x, y)
    weights = torch.full((200,), 1 / 200, dtype=torch.float64).numpy()
    exact = float(ot.emd2(weights, weights, costs.numpy())) ** 0.5
    penalty = 0.1 * float(costs.median())
    distances.SINKHORN_STEPS = 2000
    plan = ot.sinkhorn(
        weights, weights, costs.numpy(), penalty, method="sinkhorn_log", numItermax=20_000, stopThr=1e-13
    )
    dual = float((plan * costs.numpy()).sum()) + penalty * kl(plan)
    return {
        "W_2": abs(distances.wasserstein(x, y) - exact),
        "Sinkhorn": abs(distances.entropic_cost(x, y, penalty) - dual),
    }


def kl(plan: Any) -> float:
    """KL of a plan to the independent one."""
    table = torch.from_numpy(plan)
    return float((table * (table * len(table) ** 2).clamp_min(1e-300).log()).sum())


def main() -> None:
    parse(__doc__, smoke={})
    for module in ("diffusers", "ot"):
        if importlib.util.find_spec(module) is None:
            skip(f"no {module}: python -m pip install diffusers POT")
    for name, found in {**steps_of_diffusers(), **dit_of_diffusers(), **transport_of_pot()}.items():
        peer, bar = "POT" if name in ("W_2", "Sinkhorn") else "diffusers", 1e-4 if name == "DiT" else 1e-5
        print(f"{name}: {found:.1e} from {peer}", flush=True)
        claim(
            f"{name}: largest difference to {peer}", ours=found, peer=0.0, unit="", ratio=found / bar, bar=bar,
            ok=found <= bar, peer_name=peer, variant=name,
        )  # fmt: skip


if __name__ == "__main__":
    main()
