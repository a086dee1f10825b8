"""Mixture of experts: `router` assigns tokens, `experts` computes, `layer` combines both, `monitor` measures."""

from whorl.nn.experts.experts import Experts, apply_experts, apply_experts_reference
from whorl.nn.experts.layer import MixtureOfExperts, expert_lr_scales, router_parameter_names
from whorl.nn.experts.router import MoERouter, Routing

__all__ = [
    "Experts",
    "MixtureOfExperts",
    "MoERouter",
    "Routing",
    "apply_experts",
    "apply_experts_reference",
    "expert_lr_scales",
    "router_parameter_names",
]
