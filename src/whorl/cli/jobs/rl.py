"""`whorl rl`: reinforcement learning agents in gymnasium environments."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from whorl.cli.options import StoreOption


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
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a setting; may be repeated."),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Train an agent over several seeds and evaluate it on separate episodes.

    The run can be interrupted at any moment; the same command continues it.

    Examples:

        whorl rl train ppo CartPole-v1

        whorl rl train impala CartPole-v1 --seeds 3 --set actors=1

        whorl rl train ppo Pendulum-v1 --steps 300000
    """
    from whorl.agents.task import open_method
    from whorl.recipes import Recipe, RecipeStep, run_recipe, step_kinds
    from whorl.recipes.steps.agents import AgentsConfig
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    config = AgentsConfig(
        method=method, environment=environment, steps=steps, seeds=seeds, episodes=episodes,
        episode_steps=episode_steps, settings=dict(map(_parse_setting, changes or ())),
    )  # fmt: skip
    open_method(config.agent(0))  # raises for impossible settings before a store is made
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{method}-{environment}")
    recipe = Recipe("rl", "agents", {name: RecipeStep(name, step_kinds()["agents"], {}, config)})
    progress = Progress()
    artifact = run_recipe(recipe, Store(store), progress).artifacts[name]
    if "curve.html" in artifact.files:
        progress.log(f"curve: {artifact.file('curve.html')}")
    else:
        progress.log("no curve: no episode has ended")


def _parse_setting(text: str) -> tuple[str, Any]:
    """Parse "field=value"; values are TOML, otherwise text."""
    import tomllib

    from whorl.errors import ConfigError

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: not a setting", expected="--set FIELD=VALUE")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def environments() -> None:
    """List the environments with built-in tensor dynamics; any other gymnasium name works too.

    Example:

        whorl rl environments
    """
    from whorl.agents import TENSOR_ENVIRONMENTS

    for name, kind in TENSOR_ENVIRONMENTS.items():
        print(f"{name:<16} {(kind.__doc__ or '').strip().splitlines()[0]}")


def methods() -> None:
    """List the methods, with the actions that each suits.

    Example:

        whorl rl methods
    """
    import sys

    from whorl.agents.methods.registration import METHODS

    for name, method in METHODS.items():
        text = (sys.modules[method.__module__].__doc__ or "").split("(")[0].strip().rstrip(".")
        print(f"{name:<12} {method.actions:<9} {text.partition(': ')[2]}")
