"""Environments, and presets of reinforcement-learning algorithms that train in them."""

from whorl.agents.classic_control import TENSOR_ENVIRONMENTS
from whorl.agents.environments import BatchedEnvironment, Environment, Transition
from whorl.agents.registration import make_env

__all__ = ["TENSOR_ENVIRONMENTS", "BatchedEnvironment", "Environment", "Transition", "make_env"]
