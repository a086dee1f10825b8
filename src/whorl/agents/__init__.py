"""Agents that act: environments, and the presets that learn in them."""

from whorl.agents.classic_control import BATCHED
from whorl.agents.environments import BatchedEnvironment, Environment, Transition
from whorl.agents.registration import make

__all__ = ["BATCHED", "BatchedEnvironment", "Environment", "Transition", "make"]
