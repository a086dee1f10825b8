"""How an agent adapts within a trial: the return of its first episode with a task, of its second, and so on."""

from __future__ import annotations

from typing import Any

import torch

from whorl.agents.environments.registration import make_env
from whorl.agents.environments.trials import TrialEnvironment
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.registration import make_method
from whorl.tracking.seeds import derive

EPISODES, TRIALS = 10, 2_000  # at most; by default
LEAST_SHARE = 0.9  # of the trials have an episode whose mean return is shown


@torch.no_grad()
def returns_by_episode(
    config: MethodConfig, networks: Any, envs: Any = None
) -> dict[str, list[float]] | None:
    """Return the mean return of the first, second, ... greedy episode in each phase of a trial; None without trials.

    envs: where the agent acts; by default in its own environment.

    Episodes that the trial's end may cut do not count, nor numbers that fewer than 90 % of the copies' trials reach.
    """
    envs = envs or make_env(config.environment, TRIALS)
    if not isinstance(envs, TrialEnvironment):
        return None
    method, copies = make_method(config, envs.spaces), torch.arange(envs.num_envs)
    observation = envs.reset(derive(config.seed, "adaptation") % (1 << 31))
    total = torch.zeros(2, envs.num_envs, len(envs.phases), EPISODES)  # returns, and whether there is one
    for _ in range(envs.spaces.trial_steps):
        assert envs.state is not None
        phase, number = envs.episodes(envs.state)
        at = copies, phase, number.clamp(0, EPISODES - 1)
        counts = (number >= 0) & (number < EPISODES)
        observation, reward, *_ = envs.step(method.greedy_action(networks, observation))
        total[0][at] += reward * counts
        total[1][at] = total[1][at].maximum(counts.float())
    returns, seen = total.mean(1)
    found = zip(envs.phases, returns / seen, seen >= LEAST_SHARE, strict=True)
    return {name: each[enough].tolist() for name, each, enough in found if enough.any()}
