"""Agents that act: environments, and the presets that learn in them."""

from whorl.agents.classic_control import TENSOR_ENVIRONMENTS
from whorl.agents.environments import BatchedEnvironment, Environment, Transition
from whorl.agents.registration import make_env

__all__ = ["TENSOR_ENVIRONMENTS", "BatchedEnvironment", "Environment", "Transition", "make_env"]
