"""Search: games as tensors, trees of all games of a batch at once, self-play, and planning with a model."""

from whorl.agents.search.alphazero import AlphaZero
from whorl.agents.search.mpc import MPC

SEARCH_METHODS = (AlphaZero, MPC)
