"""Mixture of experts (MoE) in place of an MLP: a router, E experts, and an optional shared expert.

    z = W_r x                                        [N, E] logits of N tokens, in fp32                    (`router.py`)
    s = softmax(z)  or  sigmoid(z)                   scores
    chosen = the top_k of s + b                      b: optional bias per expert, for load balance only
    w_e = s_e / sum of the chosen s                  weights; not divided where `norm_topk_prob` is False
    y = shared(x) + scale * sum over chosen e of  w_e expert_e(x)                                         (`experts.py`)

    balance loss = E sum_e f_e mean_n p_e(n)         f: fractions of all choices; 1 when even    (`objectives/routing.py`)
    z loss = mean_n (log sum_e exp z_e(n))^2
    b += rate * sign(mean load - load)               once per step, instead of a loss  (`MoERouter.update_balance_bias`)

An expert is an MLP, down_e(act(up_e x)). Tokens are sorted by expert, and each expert's tokens are one product
("dropless"). With a capacity, some tokens get their next choice ("token_choice"), or experts choose tokens
("expert_choice", for models that process whole rows). At equal FLOPs per token, the layer has E / top_k times the
parameters.

Sources: Shazeer et al. 2017, arXiv:1701.06538, eq. 1; shared expert: DeepSeekMoE, Dai et al. 2024, arXiv:2401.06066, eq. 9;
its gate: Qwen2, arXiv:2407.10671; balance loss: Switch, arXiv:2101.03961, eq. 4; bias: DeepSeek-V3, arXiv:2412.19437.

The layer appends its decisions to `routings`; the balancing losses are functions of those (`objectives/routing.py`).
Parameters are selected by name: `router_parameter_names` for freezing, `expert_lr_scales` for learning rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.nn.experts.experts import Experts
from whorl.nn.experts.router import MoERouter, Routing
from whorl.nn.linear import Linear
from whorl.nn.mlp import MLP, Activation


class MixtureOfExperts(nn.Module):
    """MoE layer: x [..., d] -> [..., d].

    Args:
        hidden: width of one expert; shared_hidden: of the shared expert, 0 for none; shared_gate: weight the shared expert
            by a learned sigmoid of the token.
        n_experts, top_k, router: see `MoERouter`.
    """

    def __init__(
        self,
        d: int,
        hidden: int,
        n_experts: int,
        top_k: int,
        *,
        kind: Activation = "swiglu",
        shared_hidden: int = 0,
        shared_gate: bool = False,
        generator: torch.Generator | None = None,
        **router: Any,
    ) -> None:
        super().__init__()
        if shared_gate and not shared_hidden:
            raise ConfigError("shared_gate without a shared expert", expected="shared_hidden above 0")
        self.d = d
        self.router = MoERouter(d, n_experts, top_k, generator=generator, **router)
        self.experts = Experts(n_experts, d, hidden, kind, generator=generator)
        self.shared = MLP(d, shared_hidden, kind, generator=generator) if shared_hidden else None
        self.shared_gate = Linear(d, 1, std=d**-0.5, generator=generator) if shared_gate else None

    def forward(self, x: Tensor, routings: list[Routing] | None = None) -> Tensor:
        """Return the layer's output. The `Routing` of this call is appended to `routings`."""
        if x.shape[-1] != self.d:
            raise ConfigError(f"x has {x.shape[-1]} features", expected=f"d = {self.d}")
        flat = x.reshape(-1, self.d)  # [N, d]
        routing: Routing = self.router(flat)
        if routings is not None:
            routings.append(routing)
        y: Tensor = self.experts(flat, routing.tokens, routing.weights, routing.counts)
        if self.shared is not None:
            shared = self.shared(flat)
            y = y + (shared if self.shared_gate is None else self.shared_gate(flat).sigmoid() * shared)
        return y.view(x.shape)


def router_parameter_names(network: nn.Module) -> list[str]:
    """Return the names of all routers' parameters in a network. Leave them out of an update to freeze routing."""
    return [
        f"{path}.{name}" if path else name
        for path, module in network.named_modules()
        if isinstance(module, MoERouter)
        for name, _ in module.named_parameters()
    ]


def expert_lr_scales(network: nn.Module, scales: Mapping[int, float]) -> dict[str, float]:
    """Return learning-rate multipliers of experts, by parameter name: 1 for experts that are not listed.

    network: one layer, or a whole network, where `scales` (expert number -> multiplier) applies to every MoE layer.
    The result is for `ParamOptim(optimizer, rate * multiplier)`; a parameter with 0 keeps its value.

    Raises:
        ConfigError: an expert that no layer has, a negative multiplier, or a network without experts.
    """
    result: dict[str, float] = {}
    n_experts = 0
    for path, module in network.named_modules():
        if not isinstance(module, Experts):
            continue
        n_experts = max(n_experts, len(module))
        for name, _ in module.named_parameters():
            number = int(name.rsplit(".", 1)[1])  # "up.3"
            result[f"{path}.{name}" if path else name] = float(scales.get(number, 1.0))
    if not result:
        raise ConfigError(
            "the network has no experts", expected="at least one MixtureOfExperts in the network"
        )
    for number, rate in scales.items():
        if not 0 <= number < n_experts:
            raise ConfigError(f"scales names expert {number}", expected=f"from 0 to {n_experts - 1}")
        if not rate >= 0:
            raise ConfigError(f"the scale of expert {number} is {rate}", expected="at least 0")
    return result
