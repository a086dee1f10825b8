"""`whorl rl`: reinforcement learning agents in gymnasium environments.

    whorl rl methods                   which methods there are; with a name, its settings
    whorl rl train ppo CartPole-v1     five seeds, a return with its interval, a page
    whorl rl compare AGENT AGENT       which one is better, and how certain that is
    whorl rl record AGENT              an animated episode; with --demos, demonstrations
    whorl rl train clone ENV --from AGENT   learn from another's behaviour
    whorl rl match AGENT uct:1000      games between two agents; `whorl rl play AGENT` against a person

`docs/agents.md` explains each method by its difference from another.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.jobs.rl_environments import environments as environments
from whorl.cli.jobs.rl_environments import methods as methods
from whorl.cli.jobs.rl_environments import solve as solve
from whorl.cli.jobs.rl_games import match as match
from whorl.cli.jobs.rl_games import play as play
from whorl.cli.options import RefArgument, SetOption, StoreOption, open_artifact

if TYPE_CHECKING:
    from whorl.store import Artifact


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
    expert: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="EXPERT", help="Demonstrations to learn from; of an agent, ten episodes."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="REWARD", help="Learn from a reward that max-entropy-irl has found."),
    ] = None,
    changes: SetOption = None,
    store: StoreOption = None,
) -> None:
    """Train an agent over several seeds and evaluate it on separate episodes.

    Start with ppo: it suits every environment whose steps are cheap. Where a step is expensive, dqn (discrete actions) and
    sac (any) learn from each step many times. clone, dagger and gail learn from an expert, and max-entropy-irl learns the
    expert's reward. The result is the artifact rl/METHOD-ENVIRONMENT, with a page of curves.

    The run can be interrupted at any moment; the same command continues it.

    Examples:

        whorl rl train ppo CartPole-v1

        whorl rl train impala CartPole-v1 --seeds 3 --set actors=1

        whorl rl train sac Pendulum-v1

        whorl rl train dqn CartPole-v1 --set exploration.end=0.1 --set duelling=true

        whorl rl train gail Pendulum-v1 --from sac-Pendulum-v1

        whorl rl train ppo FrozenLake-v1 --reward max-entropy-irl-DryLake-v0
    """
    from whorl.agents.task import AgentTask, check_source, open_method
    from whorl.errors import ConfigError
    from whorl.recipes import parse_recipe, run_recipe
    from whorl.recipes.steps.agents import AgentsConfig
    from whorl.report.animation import draws_pictures
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
    text = f'name = "rl"\n[steps.{name}]\nuses = "agents"\n'
    if expert is not None and reward is not None:
        raise ConfigError("--from and --reward are given", expected="one of them")
    if expert is not None:
        text += _from_expert(expert, store)
    if reward is not None:
        given = open_artifact(reward, store, ("agents",), "a reward")
        text += f'from = {{ reward = "{given.address}" }}\n'
    recipe = parse_recipe(text, "whorl rl train", sets=sets)
    config = recipe.steps[name].config
    assert isinstance(config, AgentsConfig)
    agent = config.agent(0)
    if expert is None:
        AgentTask(agent)  # raises for impossible settings before a store is made
    else:
        check_source(agent, open_method(agent)[0], True)  # before demonstrations are recorded
    progress = Progress()
    artifact = run_recipe(recipe, Store(store), progress).artifacts[name]
    progress.log(f"page:   {artifact.file('curve.html')}")
    following = {"alphazero": f"play {name}", "max-entropy-irl": f"solve {environment} --reward {name}"}
    if (other := following.get(method)) or draws_pictures(environment):
        progress.log(f"next:   whorl rl {other or f'record {name}'}")


def _from_expert(ref: str, store: str | None) -> str:
    """Return the text that gives demonstrations to the step above: an artifact, or ten episodes of an agent."""
    artifact = open_artifact(ref, store, ("agents", "demonstrations"), "an agent, or its demonstrations")
    if artifact.kind == "demonstrations":
        return f'from = "{artifact.address}"\n'
    name, text = _demonstrations_of(artifact, 10)
    return f'parents = ["{name}"]\n{text}'


def _demonstrations_of(agent: Artifact, episodes: int, name: str | None = None) -> tuple[str, str]:
    """Return the name and the text of the step that records demonstrations."""
    name = name or f"demos-{agent.name.rpartition('/')[2]}"
    uses = f'uses = "demonstrations"\nfrom = "{agent.address}"\nepisodes = {episodes}\n'
    return name, f"[steps.{name}]\n{uses}"


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
    steps: Annotated[int, typer.Option(min=1, help="Steps after which an episode is cut off.")] = 1000,
    demos: Annotated[
        int | None, typer.Option(min=1, help="Record this number of episodes as demonstrations instead.")
    ] = None,
    drawn: Annotated[
        bool, typer.Option("--drawn", help="Draw the actions of demonstrations from the policy; else greedy.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Of the demonstrations; default: demos-AGENT.")] = None,
    store: StoreOption = None,
) -> None:
    """Animate an episode of a trained agent with greedy actions, or record demonstrations.

    Built-in environments need Pillow; others also need the packages of gymnasium's renderer. Demonstrations are an artifact
    from which `whorl rl train clone`, `dagger` and `gail` learn.

    Examples:

        whorl rl record ppo-CartPole-v1

        whorl rl record dqn-FrozenLake-v1 --seed 2 --out walk.gif

        whorl rl record sac-Pendulum-v1 --demos 10

        whorl rl record ppo-DryLake-v0 --demos 1000 --drawn     # for max-entropy-irl
    """
    from whorl.agents.saved_agent import load_agent
    from whorl.errors import ConfigError
    from whorl.report.animation import record_episode
    from whorl.store import Store

    if drawn and demos is None:
        raise ConfigError("--drawn is of demonstrations", do="add --demos 1000, or leave --drawn out")
    if demos is not None:
        from whorl.recipes import parse_recipe, run_recipe
        from whorl.tracking.progress import Progress

        step, text = _demonstrations_of(open_artifact(artifact, store, ("agents",), "an agent"), demos, name)
        sets = [f"{step}.episode_steps={steps}", *([f"{step}.seed={seed}"] if seed is not None else [])]
        sets += [f"{step}.drawn=true"] * drawn
        recipe = parse_recipe(f'name = "rl"\n{text}', "whorl rl record", sets=sets)
        run_recipe(recipe, Store(store), progress := Progress())
        progress.log(f"next:   whorl rl train clone ENVIRONMENT --from {step}")
        return
    config, networks = load_agent(Store(store).open(artifact), seed)
    episode = record_episode(config, networks, max_steps=steps)
    episode.save(out)
    print(f"wrote {out}: seed {config.seed}, {episode}")
