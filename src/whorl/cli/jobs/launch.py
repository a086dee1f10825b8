"""`whorl launch`: run a recipe on several ranks, on this machine or through a scheduler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
PLACES = ("local", "torchrun", "slurm", "kubernetes", "ray")


def launch(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A packaged recipe (see `whorl recipes`) or a .toml file.")],
    on: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PLACES),
            help="local: processes that share memory, the default; torchrun: torch's elastic launcher, on each node, the "
            "default with --layout; slurm, kubernetes: a job that starts it there; ray: workers of Ray Train.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes that train, over all nodes; default: one per core of this machine.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines with the same number of ranks each.")] = 1,
    rendezvous: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where the nodes of torchrun meet: a free port of the first node, the same on each."
        ),
    ] = "",
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="dp=2,tp=2|auto|auto:FILE",
            help="How the ranks of torch.distributed share a pretraining step: degrees of dp, fsdp, tp, pp, cp, ep; or the "
            "fastest of all, predicted for this machine or for a cluster in a TOML file.",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often all ranks start again after one was killed or did not answer.")
    ] = 5,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only write the script of slurm or the manifest of kubernetes; submit nothing."),
    ] = None,
) -> None:  # fmt: skip
    """Run a recipe on several ranks. All further options are those of `whorl run`.

    Each step runs once, on rank 0; training uses all ranks. A rank that is killed is started again with all others, and
    training continues from the newest checkpoint. The store must be the same on all nodes. See docs/parallel.md.

    Examples:

        whorl launch quickstart --ranks 2

        whorl launch quickstart --on torchrun --ranks 2 --budget 2m

        whorl launch my.toml --on slurm --nodes 2 --ranks 64 --store /shared/whorl

        whorl launch my.toml --on kubernetes --nodes 2 --ranks 64 --write job.yaml
    """
    from whorl.errors import ConfigError, one_of
    from whorl.machine.device_probe import usable_cores
    from whorl.parallel.launch.schedulers import SCHEDULERS, submit_job, write_job
    from whorl.parallel.launch.spec import LaunchSpec

    on = on or ("local" if layout is None else "torchrun")
    if on not in PLACES:
        raise ConfigError(f"--on {on}", expected=one_of(on, PLACES))
    for option, given, places in (
        ("--write", write is not None, tuple(SCHEDULERS)),
        ("--nodes", nodes > 1, ("torchrun", *SCHEDULERS)),
        ("--rendezvous", bool(rendezvous), ("torchrun",)),
        ("--layout", layout is not None, PLACES[1:]),
    ):
        if given and on not in places:
            raise ConfigError(f"{option} with --on {on}", expected=f"--on {' or '.join(places)}")
    ranks = ranks or usable_cores() * nodes
    words = ["run", recipe, *context.args]
    run = _checked_run(context, words)
    if layout is not None:
        words += _layout_words(run, layout, ranks)
        run = _checked_run(context, words)
    options = ["--on", "torchrun", "--ranks", str(ranks), "--nodes", str(nodes), "--restarts", str(restarts)]
    job = LaunchSpec(
        run.params["name"] or Path(recipe).stem,
        rank=(sys.executable, "-m", "whorl.parallel.launch.rank", *words),
        node=(sys.executable, "-m", "whorl.cli", "launch", *words[1:], *options),
        ranks=ranks, nodes=nodes, rendezvous=rendezvous, restarts=restarts,
    )  # fmt: skip
    if write is not None:
        write_job(on, job, write)
        print(f"written: {write}")
    elif on in SCHEDULERS:
        print(submit_job(on, job))
    elif on == "local":
        from whorl.parallel.process_group import use_local_ranks

        use_local_ranks(ranks)
        try:
            run.command.invoke(run)
        finally:
            use_local_ranks(0)
    else:
        if on == "torchrun":
            from whorl.parallel.launch.elastic import run_elastic as launcher
        else:
            from whorl.parallel.launch.ray_train import run_ray as launcher
        raise typer.Exit(launcher(job))


def _layout_words(run: Any, text: str, ranks: int) -> list[str]:
    """Return the options that set the layout of the recipe's pretraining steps.

    Raises:
        ConfigError: the layout has other ranks, no step trains with one, or the file of the cluster is wrong.
    """
    from whorl.errors import ConfigError
    from whorl.parallel.layout import Layout
    from whorl.plan.cluster import ClusterSpec

    steps = [name for name, step in run.obj.steps.items() if "layout" in type(step.config).model_fields]
    if not steps:
        raise ConfigError(f"--layout {text}", expected="a recipe with a step of the kind pretrain")
    if text.startswith("auto:"):
        ClusterSpec.read(Path(text.removeprefix("auto:")))  # its errors come before hours of other steps
    elif text != "auto":
        Layout.parse(text).check_ranks(ranks)
    return [word for name in steps for word in ("--set", f"{name}.layout={text}")]


def _checked_run(context: typer.Context, words: list[str]) -> Any:
    """Return the command `whorl run` with its options parsed, and its recipe checked, before anything is started.

    Raises:
        ConfigError: of the recipe. click.UsageError: an option that `whorl run` does not have.
    """
    from whorl.recipes import load_recipe

    parent: Any = context.parent
    run = parent.command.get_command(parent, "run").make_context("run", words[1:], parent=parent)
    given = {name: run.params[name] for name in ("budget", "deterministic", "model")}
    run.obj = load_recipe(run.params["recipe"], sets=run.params["sets"] or (), **given)
    return run
