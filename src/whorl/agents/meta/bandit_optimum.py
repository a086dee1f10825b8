"""Exact returns in Bernoulli bandits whose probabilities are uniform in each trial.

After s successes and f failures of an arm, its probability has the distribution Beta(s + 1, f + 1). The counts of all arms
are the state of a finite decision process, which dynamic programming solves (Gittins 1979; Duff 2002). The order of arms has
no effect, so states are sorted.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from whorl.agents.environments.tables import Array

Counts = tuple[tuple[int, int], ...]  # of each arm: successes and failures
FIVE_ARMS: Counts = ((0, 0),) * 5  # of the environment `bandits`, with ten pulls
PULLS = 10
RULES = ("optimum", "highest mean")


@cache
def rewards_by_pull(arms: Counts, pulls: int, rule: str = "optimum") -> Array:
    """Return the expected reward of each of the next pulls [pulls]: of the optimum, or of the arm with the highest mean."""
    if not pulls:
        return np.zeros(0)
    found = []
    for arm in sorted(set(arms)):
        (won, lost), rest = arm, [*arms]
        rest.remove(arm)
        mean = (won + 1) / (won + lost + 2)
        later = [
            rewards_by_pull(tuple(sorted([*rest, counts])), pulls - 1, rule)
            for counts in ((won + 1, lost), (won, lost + 1))
        ]
        found.append(np.concatenate(([mean], mean * later[0] + (1 - mean) * later[1])))
    return max(found, key=lambda rewards: float(rewards.sum() if rule == "optimum" else rewards[0]))
