"""`whorl rl match` and `whorl rl play`: games between agents, and against a person."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import StoreOption, serve_extra, standard_input

if TYPE_CHECKING:
    from whorl.agents.search.play import TrainedPlayer

PlayerArgument = Annotated[str, typer.Argument(help="AGENT[:SIMULATIONS], uct:SIMULATIONS, or random.")]


def match(
    a: PlayerArgument,
    b: PlayerArgument,
    games: Annotated[int, typer.Option("-n", "--games", min=2, help="Each begins in half of them.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the openings and of playouts.")] = 0,
    store: StoreOption = None,
) -> None:
    """Play games between two agents, and print the first one's share of the points with its 95 % interval.

    A win is 1 point, a draw 1/2. The first two moves are random; each opening is played twice with changed sides.

    Examples:

        whorl rl match alphazero-connect4:100 uct:1000

        whorl rl match alphazero-tictactoe random --games 100
    """
    from whorl.agents.search.match import play_match, random_player, uct_player
    from whorl.errors import ConfigError
    from whorl.tracking.progress import Progress

    opened = [_open(text, store) for text in (a, b)]
    games_of = {agent.method.game.name: agent.method.game for agent, _ in opened if agent}
    if len(games_of) != 1:
        what, do = f"{a} and {b} play {' and '.join(games_of) or 'any game'}", "list agents with `whorl ls`"
        raise ConfigError(what, expected="players of one game, at least one of them trained", do=do)
    [game] = games_of.values()
    players = [
        agent.player if agent else uct_player(game, simulations) if simulations else random_player(game)
        for agent, simulations in opened
    ]
    with Progress().task(f"{a} against {b}", games, "games") as task:
        found = play_match(game, players, games, seed, observe=lambda ended: task.update(done=ended))
    print(f"{a} against {b} in {games} games of {game.name}: {found}")


def _open(text: str, store: str | None) -> tuple[TrainedPlayer | None, int]:
    """Return a trained player, or None for UCT with simulations, and for the random player with 0.

    Raises:
        ConfigError: the artifact plays no game, or the simulations are no number above 0.
    """
    import torch

    from whorl.agents.saved_agent import load_agent
    from whorl.agents.search.play import TrainedPlayer
    from whorl.errors import ConfigError
    from whorl.store import Store

    torch.set_num_threads(1)  # the operations of a search are too small for several
    name, colon, number = text.partition(":")
    if (colon or name == "uct") and not (number.isdecimal() and int(number)):
        what = f"player {text!r}: {number!r} simulations"
        raise ConfigError(what, expected="a number above 0", do=f"write {name}:100")
    simulations = int(number or 0)
    if name in ("uct", "random"):
        return None, simulations
    return TrainedPlayer.open(text, *load_agent(Store(store).open(name)), simulations), simulations


def play(
    model: Annotated[str, typer.Argument(help="AGENT[:SIMULATIONS]; default: those of its training.")],
    human: Annotated[bool, typer.Option("--human", help="Play in the terminal, without a page.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0 selects a free one.")] = 8000,
    store: StoreOption = None,
) -> None:
    """Play against a trained agent, on a page or in the terminal.

    The page shows the board, and visits and value of the agent's search at each move.

    Examples:

        whorl rl play alphazero-connect4

        whorl rl play alphazero-connect4:400 --human
    """
    from whorl.errors import ConfigError

    agent, _ = _open(model, store)
    if agent is None:
        raise ConfigError(f"{model} is not trained", expected="an agent", do="list agents with `whorl ls`")
    if human:
        _play_in_terminal(agent, standard_input())
        return
    with serve_extra("page"):
        from whorl.serve.game import run_game_server

    run_game_server(agent, port, lambda url: print(f"page: {url}/", flush=True))


def _play_in_terminal(agent: TrainedPlayer, lines: Iterable[str]) -> None:
    """Read moves until the input ends. An empty line lets the agent move for either side."""
    from whorl.errors import ConfigError

    game, moves = agent.method.game, list[int]()
    print(f"{agent.name}. A move is a number from 1. Enter alone: the agent moves. back, new, quit.")
    print(f"{game.draw(game.position([])[0])}\n> ", end="", flush=True)
    for line in lines:
        if (word := line.strip()) == "quit":
            break
        steps = {"back": moves[:-2], "new": [], "": moves}
        try:
            tried = steps[word] if word in steps else [*moves, game.parse(word)]
            shown = agent.position(tried, word not in ("back", "new"))
        except ConfigError as error:
            print(f"{error}\n> ", end="", flush=True)
            continue
        moves = tried
        if found := shown["search"]:
            visits = ", ".join(f"{move + 1}: {n}" for move, n in enumerate(found["visits"]) if n)
            print(f"the agent plays {found['move'] + 1} (value {found['value']:+.2f}; visits {visits})")
            shown = agent.position(moves := [*moves, found["move"]], search=False)
        end = f"\n{shown['winner']} has won" if shown["winner"] else "\na draw" if shown["ended"] else ""
        print(f"{game.draw(game.position(moves)[0])}{end}\n> ", end="", flush=True)
