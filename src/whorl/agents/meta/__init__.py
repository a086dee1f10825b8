"""Learning to learn: agents with a memory of the steps of a trial."""

from whorl.agents.meta.one_shot import OneShot
from whorl.agents.meta.rl2 import RL2

META_METHODS = (RL2, OneShot)
