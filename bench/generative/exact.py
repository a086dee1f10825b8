"""Steps of the samplers against diffusers, and transport against POT: the largest difference.

    python -m pip install diffusers POT
    python bench/generative/exact.py

The same noise and the same predictions go to both sides, in fp64.
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
    for name, found in {**steps_of_diffusers(), **transport_of_pot()}.items():
        peer = "POT" if name in ("W_2", "Sinkhorn") else "diffusers"
        print(f"{name}: {found:.1e} from {peer}", flush=True)
        claim(
            f"{name}: largest difference to {peer}", ours=found, peer=0.0, unit="", ratio=found / 1e-5, bar=1e-5,
            ok=found <= 1e-5, peer_name=peer, variant=name,
        )  # fmt: skip


if __name__ == "__main__":
    main()
