"""`whorl rl`: reinforcement learning agents in gymnasium environments.

    whorl rl methods                   which methods there are; with a name, its settings
    whorl rl train ppo CartPole-v1     five seeds, a return with its interval, a page
    whorl rl compare AGENT AGENT       which one is better, and how certain that is
    whorl rl record AGENT              an animated episode

`docs/agents.md` explains each method by its difference from another.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.jobs.rl_environments import environments as environments
from whorl.cli.jobs.rl_environments import solve as solve
from whorl.cli.options import RefArgument, SetOption, StoreOption


def train(
    method: Annotated[str, typer.Argument(help="A name of `whorl rl methods`.")],
    environment: Annotated[str, typer.Argument(help="A gymnasium name, e.g. CartPole-v1.")],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Environment steps per seed; default: the method's.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Independent runs.")] = 5,
    episodes: Annotated[int, typer.Option(min=1, help="Evaluation episodes per seed.")] = 20,
    episode_steps: Annotated[
        int, typer.Option(min=1, help="Steps after which an evaluation episode is cut off.")
    ] = 10_000,
    changes: SetOption = None,
    store: StoreOption = None,
) -> None:
    """Train an agent over several seeds and evaluate it on separate episodes.

    Start with ppo: it suits every environment whose steps are cheap. Where a step is expensive, dqn (discrete actions) and
    sac (any) learn from each step many times. The result is the artifact rl/METHOD-ENVIRONMENT, with a page of curves.

    The run can be interrupted at any moment; the same command continues it.

    Examples:

        whorl rl train ppo CartPole-v1

        whorl rl train impala CartPole-v1 --seeds 3 --set actors=1

        whorl rl train sac Pendulum-v1

        whorl rl train dqn CartPole-v1 --set exploration.end=0.1 --set duelling=true
    """
    from whorl.agents.task import AgentTask
    from whorl.errors import ConfigError
    from whorl.recipes import parse_recipe, run_recipe
    from whorl.recipes.steps.agents import AgentsConfig
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    values = {"method": method, "environment": environment, "steps": steps, "seeds": seeds}
    values |= {"episodes": episodes, "episode_steps": episode_steps}
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{method}-{environment}")
    sets = [f"{name}.{field}={json.dumps(value)}" for field, value in values.items() if value is not None]
    for change in changes or ():
        if "=" not in change:
            raise ConfigError(f"--set {change}: not a setting", expected="--set FIELD=VALUE")
        sets.append(f"{name}.settings.{change}")
    recipe = parse_recipe(f'name = "rl"\n[steps.{name}]\nuses = "agents"\n', "whorl rl train", sets=sets)
    config = recipe.steps[name].config
    assert isinstance(config, AgentsConfig)
    AgentTask(config.agent(0))  # raises for impossible settings before a store is made
    progress = Progress()
    artifact = run_recipe(recipe, Store(store), progress).artifacts[name]
    progress.log(f"page:   {artifact.file('curve.html')}")
    progress.log(f"next:   whorl rl record {name}")


def compare(
    artifacts: Annotated[
        list[str], typer.Argument(metavar="AGENT...", help="Names or addresses of agents, from `whorl ls`.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the page.")] = Path("compare.html"),
    store: StoreOption = None,
) -> None:
    """Compare trained agents over their seeds: returns, learning curves, performance profiles, probability of improvement.

    Agents on one environment are compared by their returns. On several environments, returns are scaled between the lowest
    and the highest run of each. The statistics are those of Agarwal et al. 2021 (arXiv:2108.13264).

    Examples:

        whorl rl compare ppo-CartPole-v1 dqn-CartPole-v1

        whorl rl compare 3f2a 81c0 --out page.html
    """
    import numpy as np

    from whorl.agents.comparison import compare, read_agents
    from whorl.cli.text_table import print_table
    from whorl.report import render
    from whorl.report.agents import comparison_page, comparison_tables
    from whorl.store import Store

    opened = Store(store)
    found = compare(read_agents([opened.open(ref) for ref in artifacts]), np.random.default_rng(0))
    for table in comparison_tables(found):
        print(f"{table.title}. {table.note}")
        left = [column.name for column in table.columns if not column.number]
        print_table([column.name for column in table.columns], [[*map(str, row)] for row in table.rows], left)
        print()
    print(f"page: {render(comparison_page(found), out)}")


def record(
    artifact: RefArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the GIF.")] = Path("episode.gif"),
    seed: Annotated[
        int | None, typer.Option(min=0, help="A seed of the agent; default: that with the highest return.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps after which the episode is cut off.")] = 1000,
    store: StoreOption = None,
) -> None:
    """Animate an episode of a trained agent with greedy actions.

    Built-in environments need Pillow; others also need the packages of gymnasium's renderer.

    Examples:

        whorl rl record ppo-CartPole-v1

        whorl rl record dqn-FrozenLake-v1 --seed 2 --out walk.gif
    """
    from whorl.agents.saved_agent import load_agent
    from whorl.report.animation import record_episode
    from whorl.store import Store

    config, networks = load_agent(Store(store).open(artifact), seed)
    episode = record_episode(config, networks, max_steps=steps)
    episode.save(out)
    print(f"wrote {out}: seed {config.seed}, {episode}")


def methods(
    method: Annotated[str | None, typer.Argument(help="List the settings of this one.")] = None,
) -> None:
    """List the methods, with the actions that each suits; or the settings of one, with their defaults.

    Examples:

        whorl rl methods

        whorl rl methods ppo
    """
    from whorl.agents.methods.registration import METHODS, TUNED_OVERRIDES, parse_config
    from whorl.cli.text_table import print_methods, print_settings

    if method is None:
        print_methods(METHODS, {name: kind.actions for name, kind in METHODS.items()})
        return
    parse_config(method, "CartPole-v1", {})  # raises for an unknown name
    hidden = ("method", "environment", "steps", "seed", *METHODS[method].without_effect)
    print_settings(METHODS[method].Config, hidden)
    for (tuned, environment), settings in TUNED_OVERRIDES.items():
        if tuned == method:
            print(f"{environment} has other defaults: {', '.join(f'{n}={v}' for n, v in settings.items())}")
