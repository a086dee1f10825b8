"""The step `demonstrations`: episodes of a trained agent, from which others learn; `whorl rl record --demos` runs it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from whorl.recipes.registry import StepContext, step


class DemonstrationsConfig(BaseModel):
    """Which episodes of an agent are recorded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    episodes: int = Field(default=10, ge=1, description="episodes")
    drawn: bool = Field(default=False, description="draw actions from the policy; else they are greedy")
    seed: int | None = Field(
        default=None, ge=0, description="of the agent; default: that with the highest return"
    )
    episode_steps: int = Field(default=10_000, ge=1, description="steps after which an episode is cut off")


@step("demonstrations", config=DemonstrationsConfig, parents={"expert": "agents"})
def demonstrations(ctx: StepContext, config: DemonstrationsConfig) -> None:
    """Record episodes of a trained agent, from which others learn."""
    import torch

    from whorl.agents.imitation.demonstrations import record_demonstrations
    from whorl.agents.saved_agent import expert_policy, load_agent
    from whorl.tracking.seeds import derive

    agent, networks = load_agent(ctx.parents["expert"], config.seed)
    seed = derive(agent.seed, "demonstrations") % (1 << 31)
    generator = torch.Generator().manual_seed(seed) if config.drawn else None
    expert = expert_policy(agent, networks, config.episodes, generator)
    found = record_demonstrations(
        agent.environment, expert, config.episodes, seed, max_steps=config.episode_steps
    )
    found.save(ctx.out)
    ctx.summary.update(headline=f"{found} in {found.environment}; random actions: {found.random_return:.1f}")
