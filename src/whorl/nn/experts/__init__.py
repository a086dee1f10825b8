"""Mixture of experts: who sees which token (`router`), the work (`experts`), both (`layer`), and how it goes (`monitor`)."""

from whorl.nn.experts.experts import Experts, apply_experts, apply_experts_reference
from whorl.nn.experts.layer import MixtureOfExperts, expert_rates, freeze_routers, router_names
from whorl.nn.experts.monitor import gini, metrics, usage
from whorl.nn.experts.router import Router, Routing

__all__ = [
    "Experts",
    "MixtureOfExperts",
    "Router",
    "Routing",
    "apply_experts",
    "apply_experts_reference",
    "expert_rates",
    "freeze_routers",
    "gini",
    "metrics",
    "router_names",
    "usage",
]
