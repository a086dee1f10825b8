"""`whorl simulate-raters`: raters with a known preference vote on the answers of a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.options import serve_extra


def simulate_raters(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://localhost:8000.")],
    preference: Annotated[str, typer.Option(help="Preference of the raters: compiles, brackets or shorter.")],
    raters: Annotated[int, typer.Option(min=1, help="Raters; each is an actor.")] = 300,
    votes: Annotated[int, typer.Option(min=1, help="Votes of all raters.")] = 1000,
    wrong: Annotated[float, typer.Option(min=0, max=0.5, help="Mean error rate of a rater.")] = 0.15,
    left: Annotated[float, typer.Option(min=0, max=1, help="Share of errors for the left answer.")] = 0.6,
    random: Annotated[float, typer.Option(min=0, max=1, help="Share of random raters.")] = 0.1,
    thumbs: Annotated[
        bool, typer.Option("--thumbs", help="Like or dislike each of the two answers.")
    ] = False,
    model: Annotated[str, typer.Option(help="Name of the model in the API; default: the first.")] = "",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Rate the answers of a running server with a preference that a program computes.

    The raters send `store: true`, get two answers to each prompt, and vote. So the whole circle can be tried before people
    use it, and it can be measured how well training recovers a preference from noisy votes.

    Examples:

        whorl simulate-raters http://localhost:8000 --preference compiles

        whorl simulate-raters http://localhost:8000 --preference compiles --thumbs --votes 2000
    """
    import asyncio

    from whorl.tracking.progress import Progress

    with serve_extra("client"):
        from whorl.loop.simulated_raters import RaterConfig, Simulation
    config = RaterConfig(preference, raters, votes, wrong, left, random, thumbs, model, seed)
    with Progress().task("Rating", total=votes, unit="votes") as bar:
        session = Simulation(url, config, bar.advance)
        asyncio.run(session.run())
    print(", ".join(f"{session.counts[kind]:,} {kind}" for kind in sorted(+session.counts)))
