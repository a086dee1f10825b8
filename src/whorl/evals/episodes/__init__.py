"""Episodes: a model and an environment take turns. RL, held-out tasks and agents run them.

The names below are imported at their first use, so that `episodes.config` can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whorl._lazy_exports import lazy_exports

if TYPE_CHECKING:
    from whorl.evals.episodes.env_loop import make_env_loop
    from whorl.evals.episodes.environment import Reply, TextEnv, Turn
    from whorl.evals.episodes.runner import Episode, EpisodeRunner
    from whorl.evals.episodes.samplers import BackendSampler, EngineSampler

_MODULES = {
    "env_loop": ("make_env_loop",),
    "environment": ("Reply", "TextEnv", "Turn"),
    "runner": ("Episode", "EpisodeRunner"),
    "samplers": ("BackendSampler", "EngineSampler"),
}
__all__ = [
    "BackendSampler",
    "EngineSampler",
    "Episode",
    "EpisodeRunner",
    "Reply",
    "TextEnv",
    "Turn",
    "make_env_loop",
]
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
