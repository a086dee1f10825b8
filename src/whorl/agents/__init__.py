"""Environments, and methods of reinforcement learning that train in them."""

from whorl.agents.environments.environment import BatchedEnvironment, Environment, Transition
from whorl.agents.environments.registration import TENSOR_ENVIRONMENTS, make_env

__all__ = ["TENSOR_ENVIRONMENTS", "BatchedEnvironment", "Environment", "Transition", "make_env"]
