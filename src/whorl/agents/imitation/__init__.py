"""Methods that learn from the demonstrations of an expert."""

from whorl.agents.imitation.clone import Clone, DAgger
from whorl.agents.imitation.gail import GAIL
from whorl.agents.imitation.inverse import MaxEntropyIRL

IMITATION = (Clone, DAgger, GAIL, MaxEntropyIRL)
