"""`whorl rl`: agents that learn by acting."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whorl.agents.train import Progress as Training
    from whorl.runs import Task


def train(
    algorithm: Annotated[str, typer.Argument(help="a2c, ppo or impala.")],
    environment: Annotated[str, typer.Argument(help="A gymnasium name, as CartPole-v1.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of the environment for each seed.")] = 100_000,
    seeds: Annotated[int, typer.Option(min=1, help="Independent runs.")] = 5,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes that each result is measured over.")] = 20,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a setting; may be repeated."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Else rl/ALGORITHM-ENVIRONMENT here.")
    ] = None,
) -> None:
    """Train an agent over several seeds, and measure it on episodes of their own.

    Examples:

        whorl rl train ppo CartPole-v1

        whorl rl train impala CartPole-v1 --set actors=2 --seeds 3

        whorl rl train ppo Pendulum-v1 --steps 300000 --set discount=0.9
    """
    import json
    from pathlib import Path

    import numpy as np
    from safetensors.torch import save_file

    from whorl.agents.config import PRESETS, checked
    from whorl.agents.summary import summarise
    from whorl.agents.train import evaluate
    from whorl.agents.train import train as train_agent
    from whorl.errors import ConfigError
    from whorl.report.charts import Series
    from whorl.report.curve import write_curve_page
    from whorl.runs import Progress
    from whorl.runs.seeds import derive

    if algorithm not in PRESETS:
        raise ConfigError(f"there is no algorithm {algorithm!r}", expected=f"one of {', '.join(PRESETS)}")
    config = checked(algorithm, environment, [*(changes or []), f"steps={steps}"])
    folder = Path(out or f"rl/{algorithm}-{environment}")
    folder.mkdir(parents=True, exist_ok=True)
    progress, scores, curves = Progress(), [], []
    for seed in range(config.seed, config.seed + seeds):
        points: list[
            tuple[int, float, float]
        ] = []  # steps, return, how many versions behind the acting weights were
        with progress.task(f"{algorithm} on {environment}, seed {seed}", total=steps, unit="steps") as task:
            watch = partial(_watch, task, points)
            networks = train_agent(config.model_copy(update={"seed": seed}), watch)
        returns = evaluate(networks, environment, episodes, derive(seed, "evaluation") % (1 << 31))
        scores.append(float(np.mean(returns)))
        lag = f", weights {np.mean([p[2] for p in points]):.1f} versions old" if config.actors else ""
        progress.say(f"seed {seed}: return {scores[-1]:.1f} (mean of {episodes} episodes{lag})")
        ended = [p for p in points if p[1] == p[1]]  # before an episode ended there is no return
        curves.append(Series(f"seed {seed}", [float(p[0]) for p in ended], [p[1] for p in ended]))
        save_file(
            {n: p.detach() for n, p in networks.named_parameters()}, folder / f"seed-{seed}.safetensors"
        )
    found = summarise([scores], np.random.default_rng(0))
    facts = [("algorithm", algorithm), ("environment", environment), ("steps", f"{steps:,}")]
    facts += [("return, inter-quartile mean of the seeds", str(found))]
    facts += [(f"seed {config.seed + i}", f"{score:.1f}") for i, score in enumerate(scores)]
    page = write_curve_page(
        folder / "curve.html", f"{algorithm.upper()} on {environment}", facts, [c for c in curves if c.x],
        y="Return of the last 100 episodes", x="steps of the environment",
    ) if any(c.x for c in curves) else None  # fmt: skip
    record = {"config": config.model_dump(mode="json"), "episodes": episodes, "returns": scores}
    record["inter_quartile_mean"] = [found.mean, found.low, found.high]
    (folder / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"return: {found}, inter-quartile mean of {seeds} seeds with its 95 % interval")
    print(f"curve:  {page}" if page else "no episode ended: there is no curve to draw")


def _watch(task: Task, points: list[tuple[int, float, float]], training: Training, _networks: object) -> None:
    """Called after each record: shows and keeps how far training is."""
    points.append((training.steps, training.mean_return, training.metrics["lag_mean"]))
    task.update(done=training.steps, note=f"return {training.mean_return:.1f}" if training.returns else "")


def environments() -> None:
    """List the environments with dynamics of our own; any other gymnasium name works too.

    Example:

        whorl rl environments
    """
    from whorl.agents import BATCHED

    for name, kind in BATCHED.items():
        print(f"{name:<16} {(kind.__doc__ or '').strip().splitlines()[0]}")
