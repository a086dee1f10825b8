"""Agents that act: environments, and the presets that learn in them."""

from whorl.agents.classic import BATCHED
from whorl.agents.environments import BatchedEnvironment, Environment, Transition, make

__all__ = ["BATCHED", "BatchedEnvironment", "Environment", "Transition", "make"]
