"""Agents that act: environments, and the presets that learn in them."""

from whorl.agents.catalogue import make
from whorl.agents.classic import BATCHED
from whorl.agents.environments import BatchedEnvironment, Environment, Transition

__all__ = ["BATCHED", "BatchedEnvironment", "Environment", "Transition", "make"]
