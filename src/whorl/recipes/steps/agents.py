"""The step `agents`: train an agent over several seeds; `whorl rl train` runs it.

The artifact holds the weights of every seed, the returns on separate evaluation episodes, the inter-quartile mean over the
seeds, and a page with the learning curves. A finished seed stays in the scratch folder until all are finished. An
interrupted seed continues from its newest checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.recipes.registry import StepContext, step
from whorl.report import Curve, Facts, Line, ReportData, render
from whorl.train.checkpoint.remote import CheckpointConfig

if TYPE_CHECKING:
    from whorl.agents.config import AgentConfig
    from whorl.agents.networks import ActorCritic
    from whorl.agents.train import TrainingProgress as Training
    from whorl.tracking.progress import ProgressTask
    from whorl.tracking.run import MetricsLog

CURVE_POINTS = 500


class AgentsConfig(BaseModel):
    """Algorithm, environment and number of runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: str = Field(default="ppo", description="a2c, ppo or impala")
    environment: str = Field(default="CartPole-v1", description="a gymnasium name, e.g. CartPole-v1")
    steps: int | None = Field(
        default=None, ge=1, description="environment steps per seed; default: the preset's"
    )
    seed: int = Field(default=0, ge=0, description="the first seed")
    seeds: int = Field(default=5, ge=1, description="independent runs")
    episodes: int = Field(default=20, ge=1, description="evaluation episodes per seed")
    checkpoint_seconds: float = Field(default=30.0, gt=0, description="time between checkpoints")
    checkpoints: CheckpointConfig = Field(
        default=CheckpointConfig(), description="how many are kept, and a remote copy"
    )
    settings: dict[str, Any] = Field(default={}, description="overrides of the algorithm's preset")

    def agent(self, seed: int) -> AgentConfig:
        """Return all settings of one seed.

        Raises:
            ConfigError: an unknown algorithm or setting, or a value out of range.
        """
        from whorl.agents.config import AgentConfig, parse_config
        from whorl.recipes.old_names import refuse_old_key

        for name in self.settings:
            refuse_old_key("agent settings", "agents", AgentConfig, (name,))
        changes = {**self.settings, "seed": seed, **({"steps": self.steps} if self.steps else {})}
        return parse_config(self.algorithm, self.environment, changes)


def _with_preset(config: AgentsConfig) -> AgentsConfig:
    """Write out every setting, so that the address changes with the presets."""
    preset = config.agent(config.seed).model_dump(mode="json")
    settings = {n: v for n, v in preset.items() if n not in ("algorithm", "environment", "steps", "seed")}
    return config.model_copy(update={"settings": settings, "steps": preset["steps"]})


@step("agents", config=AgentsConfig, complete_config=_with_preset, not_hashed=("checkpoints",), version=2)
def agents(ctx: StepContext, config: AgentsConfig) -> None:
    """Train an agent over several seeds and evaluate it on separate episodes."""
    import numpy as np

    from whorl.agents.registration import make_env
    from whorl.agents.seed_statistics import summarize_seeds

    make_env(config.environment, 1).close()  # raises for an unusable environment before any work
    results = [_train_seed(ctx, config, seed) for seed in range(config.seed, config.seed + config.seeds)]
    scores = [result["score"] for result in results]
    returns = summarize_seeds([scores], np.random.default_rng(0))
    for file in sorted(ctx.scratch.glob("seed-*.safetensors")):
        (ctx.out / file.name).write_bytes(file.read_bytes())
    summary = {"returns": scores, "inter_quartile_mean": [returns.mean, returns.low, returns.high]}
    record = {**config.model_dump(mode="json"), **summary, "lag": [r["lag"] for r in results]}
    (ctx.out / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    facts = [
        ("algorithm", config.algorithm),
        ("environment", config.environment),
        ("steps", f"{config.steps or 0:,}"),
        ("return, inter-quartile mean over the seeds", str(returns)),
        *((f"seed {result['seed']}", f"{result['score']:.1f}") for result in results),
    ]
    title = f"{config.algorithm.upper()} on {config.environment}"
    ctx.report.blocks.append(Facts(section=title, rows=facts))
    lines = [
        Line(name=f"seed {r['seed']}", x=[float(x) for x, _ in r["curve"]], y=[y for _, y in r["curve"]])
        for r in results
        if r["curve"]
    ]
    if lines:  # no return exists before the first episode ends
        ctx.report.blocks.append(
            Curve(
                section=title,
                title="Return of the last 100 episodes",
                lines=lines,
                x_label="environment steps",
            )
        )
    render(ReportData(title=title, reports=[(ctx.name, ctx.report)]), ctx.out / "curve.html")
    headline = f"return {returns}, inter-quartile mean of {config.seeds} seeds with its 95 % interval"
    ctx.summary.update(**summary, headline=headline)


def _train_seed(ctx: StepContext, config: AgentsConfig, seed: int) -> dict[str, Any]:
    """Train and evaluate one seed, or return its stored result: seed, score, lag, curve [(steps, return)]."""
    import numpy as np
    from safetensors.torch import save_file

    from whorl.agents.train import evaluate, train
    from whorl.tracking.run import write_json
    from whorl.tracking.seeds import derive

    done = ctx.scratch / f"seed-{seed}.json"
    if done.exists():
        stored: dict[str, Any] = json.loads(done.read_text())
        ctx.progress.log(f"    seed {seed}: return {stored['score']:.1f}, finished earlier")
        return stored
    agent = config.agent(seed)
    title = f"{config.algorithm} on {config.environment}, seed {seed}"
    with ctx.progress.task(title, total=agent.steps, unit="steps") as task:
        observer = _AgentObserver(
            ctx, f"{ctx.name}-seed-{seed}", task, max(1, agent.n_rollouts // CURVE_POINTS)
        )
        networks = train(
            agent,
            observer,
            scratch=Path(ctx.scratch) / f"seed-{seed}",
            checkpoint_seconds=config.checkpoint_seconds,
            log=ctx.progress.log,
            heartbeat_dir=ctx.heartbeat_dir,
            checkpoint_config=config.checkpoints,
        )
    curve = observer.close()
    returns = evaluate(networks, config.environment, config.episodes, derive(seed, "evaluation") % (1 << 31))
    score, lag = float(np.mean(returns)), observer.mean_policy_lag
    lag_note = f", mean policy lag {lag:.1f}" if agent.actors else ""
    ctx.progress.log(f"    seed {seed}: return {score:.1f} (mean of {config.episodes} episodes{lag_note})")
    save_file(
        {n: p.detach() for n, p in networks.named_parameters()}, ctx.scratch / f"seed-{seed}.safetensors"
    )
    result = {"seed": seed, "score": score, "lag": lag, "curve": curve}
    write_json(done, result)
    return result


class _AgentObserver:
    """Writes metrics and updates the progress bar after each record."""

    def __init__(self, ctx: StepContext, name: str, task: ProgressTask, every: int) -> None:
        self.ctx, self.name, self.task, self.log_interval = ctx, name, task, every
        self.log: MetricsLog | None = None
        self.n_calls, self.total_lag = 0, 0.0

    def __call__(self, training: Training, _networks: ActorCritic) -> None:
        if self.log is None:
            self.log = self.ctx.run.metrics(self.name, resume_at=training.steps)
        self.n_calls += 1
        self.total_lag += training.metrics["policy_lag/mean"]
        if not training.returns:
            self.task.update(done=training.steps)
            return
        self.task.update(done=training.steps, note=f"return {training.mean_return:.1f}")
        if self.n_calls % self.log_interval == 0:
            self.log.write(training.steps, {"return": training.mean_return, **training.metrics})

    @property
    def mean_policy_lag(self) -> float:
        """Mean number of versions by which the acting weights were behind."""
        return self.total_lag / max(1, self.n_calls)

    def close(self) -> list[tuple[int, float]]:
        """Return the learning curve [(steps, return)], including the part before an interruption."""
        if self.log is not None:
            self.log.close()
        return [(record["step"], record["return"]) for record in self.ctx.run.read_metrics(self.name)]
