"""The step `agents`: train an agent over several seeds; `whorl rl train` runs it.

The artifact holds the weights of every seed, the returns on separate evaluation episodes, the interquartile mean over the
seeds, and a page with the learning curves. A finished seed stays in the scratch folder until all are finished. An
interrupted seed continues from its newest checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import train_stage
from whorl.recipes.stage_recorder import StageRecorder
from whorl.report import ReportData, StepReport, render
from whorl.report.stages import metric_points
from whorl.train.config import RunConfig

if TYPE_CHECKING:
    from whorl.agents.methods.method import MethodConfig
    from whorl.agents.task import TrainingProgress

CURVE_POINTS, PAGE_FRAMES = 500, 120
TRAINING_METRICS = {
    "return": "return",
    "loss": "loss",
    "lag": "policy_lag/mean",
}  # curve -> metric of the run


class AgentsConfig(BaseModel):
    """Method, environment and number of runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = Field(default="ppo", description="a name of `whorl rl methods`")
    environment: str = Field(default="CartPole-v1", description="a gymnasium name, e.g. CartPole-v1")
    steps: int | None = Field(
        default=None, ge=1, description="environment steps per seed; default: the method's"
    )
    seed: int = Field(default=0, ge=0, description="the first seed")
    seeds: int = Field(default=5, ge=1, description="independent runs")
    episodes: int = Field(default=20, ge=1, description="evaluation episodes per seed")
    episode_steps: int = Field(
        default=10_000,
        ge=1,
        description="steps after which an evaluation episode that has not ended is cut off",
    )
    run: RunConfig = Field(default=RunConfig(), description="checkpoints")
    settings: dict[str, Any] = Field(default={}, description="changes of the method's settings")

    @model_validator(mode="after")
    def _validate(self) -> AgentsConfig:
        self.run.refuse(
            replicas="networks this small gain nothing from replicas; set settings.actors",
            activation_budget="networks this small recompute nothing",
        )
        for name in {"steps", "seed"} & self.settings.keys():
            raise ValueError(f"settings.{name} has no effect; set {name} of the step")
        return self

    def agent(self, seed: int) -> MethodConfig:
        """Return all settings of one seed.

        Raises:
            ConfigError: an unknown method or setting, or a value out of range.
        """
        from whorl.agents.methods.registration import parse_config

        changes = {**self.settings, "seed": seed, **({"steps": self.steps} if self.steps else {})}
        return parse_config(self.method, self.environment, changes)


def _with_preset(config: AgentsConfig, store: object) -> AgentsConfig:
    """Write out every setting, so that the address changes with the defaults."""
    preset = config.agent(config.seed).model_dump(mode="json")
    settings = {n: v for n, v in preset.items() if n not in ("method", "environment", "steps", "seed")}
    return config.model_copy(update={"settings": settings, "steps": preset["steps"]})


AGENT_PARENTS = {"demonstrations?": "demonstrations", "reward?": "agents"}


@step(
    "agents", config=AgentsConfig, parents=AGENT_PARENTS, complete_config=_with_preset, not_hashed=("run",), version=5
)  # fmt: skip
def agents(ctx: StepContext, config: AgentsConfig) -> None:
    """Train an agent over several seeds and evaluate it on separate episodes."""
    import numpy as np
    from safetensors.torch import load_file

    from whorl.agents.saved_agent import (
        load_demonstrations,
        load_reward,
        recovered,
        restore_networks,
        returns_by_episode,
        value_map,
    )
    from whorl.agents.seed_statistics import summarize_seeds
    from whorl.agents.task import AgentTask
    from whorl.report.agents import game_blocks, return_card, training_blocks, try_recording

    source: dict[str, Any] = {}
    if (given := ctx.parents.get("demonstrations")) is not None:
        source["demonstrations"] = load_demonstrations(given, ctx.store)
    if (given := ctx.parents.get("reward")) is not None:
        source["reward"] = load_reward(given, config.environment)
    AgentTask(config.agent(config.seed), **source)  # raises for what cannot run, before any work
    results = [
        _train_seed(ctx, config, seed, source) for seed in range(config.seed, config.seed + config.seeds)
    ]
    scores = [result["score"] for result in results]
    returns = summarize_seeds([scores], np.random.default_rng(0))
    best = config.agent(config.seed + int(np.argmax(scores)))
    networks = restore_networks(best, load_file(ctx.scratch / f"seed-{best.seed}.safetensors"))
    for file in sorted(ctx.scratch.glob("seed-*.safetensors")):
        (ctx.out / file.name).write_bytes(file.read_bytes())
    summary = {"returns": scores, "interquartile_mean": returns.to_json()}
    each = {name: [r[name] for r in results] for name in ("lag", "truncated", "curves")}
    record = {**config.model_dump(mode="json"), **summary, **each, "value_map": value_map(best, networks)}
    record["adaptation"] = returns_by_episode(best, networks)
    record["recovered"] = recovered(best, networks, source.get("demonstrations"))
    fields = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in record.items())
    (ctx.out / "result.json").write_text(f"{{\n{fields}\n}}\n")
    facts = [
        ("method", config.method),
        ("environment", config.environment),
        ("steps", f"{config.steps or 0:,}"),
        ("return, interquartile mean over the seeds", str(returns)),
        *((f"{name} of the expert", f"{ctx.parents[name].name}") for name in source),
        *((f"seed {r['seed']}", f"{r['score']:.1f}{_cut_off(r['truncated'], config)}") for r in results),
    ]
    title = f"{config.method.upper()} on {config.environment}"
    ctx.report.cards.append(return_card("Return, interquartile mean", returns))
    episode = try_recording(
        best, networks, max_steps=config.episode_steps, max_frames=PAGE_FRAMES, log=ctx.progress.log
    )
    ctx.report.blocks += [
        *training_blocks(title, facts, record, episode),
        *game_blocks(title, best, networks),
    ]
    render(ReportData(title=title, reports=[(ctx.name, ctx.report)]), ctx.out / "curve.html")
    plural = "1 seed" if config.seeds == 1 else f"{config.seeds} seeds with its 95 % interval"
    ctx.summary.update(**summary, headline=f"return {returns}, interquartile mean of {plural}")


def _train_seed(ctx: StepContext, config: AgentsConfig, seed: int, source: Any) -> dict[str, Any]:
    """Train and evaluate one seed, or return its stored result: seed, score, lag, truncated
    (evaluation episodes that were cut off), curves {"seed", and each of `TRAINING_METRICS`: [(steps, value)]}."""
    import numpy as np
    from safetensors.torch import save_file

    from whorl.agents.task import evaluate, train
    from whorl.tracking.run import write_json
    from whorl.tracking.seeds import derive

    done = ctx.scratch / f"seed-{seed}.json"
    if done.exists():
        stored: dict[str, Any] = json.loads(done.read_text())
        ctx.progress.log(f"    seed {seed}: return {stored['score']:.1f}, finished earlier")
        return stored
    agent = config.agent(seed)
    lags = list[float]()

    def fit(*, callback: Any, checkpoint_dir: Path, heartbeat_dir: Path, log: Any) -> Any:
        def observe(training: TrainingProgress, _networks: Any) -> None:
            lags.append(training.metrics["policy_lag/mean"])
            found = {"return": training.mean_return} if training.returns else {}
            callback(training.steps, {**found, **training.metrics})

        return train(
            agent, observe, scratch=checkpoint_dir, checkpoint_seconds=config.run.checkpoint_seconds, log=log,
            heartbeat_dir=heartbeat_dir, checkpoint_config=config.run.checkpoints, **source,
        )  # fmt: skip

    every = max(1, agent.n_rollouts // CURVE_POINTS)
    result = train_stage(
        replace(ctx, name=f"{ctx.name}-seed-{seed}", scratch=ctx.scratch / f"seed-{seed}", report=StepReport()),
        f"{config.method} on {config.environment}, seed {seed}", fit, total=agent.n_rollouts * agent.rollout_steps,
        note=lambda metrics: f"return {metrics['return']:.1f}" if "return" in metrics else "",
        recorder=partial(StageRecorder, log_if=lambda steps, found: steps // agent.rollout_steps % every == 0),
    )  # fmt: skip
    with ctx.progress.task(f"evaluating seed {seed}", config.episodes, "episodes") as task:
        returns = evaluate(
            agent, result.trained, config.episodes, derive(seed, "evaluation") % (1 << 31),
            max_steps=config.episode_steps,
            observe=lambda step, running: task.update(done=config.episodes - running, note=f"step {step:,}"),
        )  # fmt: skip
        truncated = config.episodes - int(task.done)
    score, lag = float(np.mean(returns)), sum(lags) / max(1, len(lags))
    notes = _cut_off(truncated, config) + (f", mean policy lag {lag:.1f}" if agent.actors else "")
    ctx.progress.log(f"    seed {seed}: return {score:.1f} (mean of {config.episodes} episodes{notes})")
    save_file(
        {n: p.detach() for n, p in result.trained.named_parameters()},
        ctx.scratch / f"seed-{seed}.safetensors",
    )
    curves = {"seed": seed, **{n: metric_points(result.curve, m) for n, m in TRAINING_METRICS.items()}}
    stored = {"seed": seed, "score": score, "lag": lag, "truncated": truncated, "curves": curves}
    write_json(done, stored)
    return stored


def _cut_off(episodes: int, config: AgentsConfig) -> str:
    return f", {episodes} cut off after {config.episode_steps:,} steps" if episodes else ""
