"""The pages of agents: what the step `agents` has trained, and the comparison of several agents."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch

from whorl.agents.comparison import AgentComparison, return_curve
from whorl.agents.meta.bandit_optimum import FIVE_ARMS, PULLS, rewards_by_pull
from whorl.agents.methods.method import MethodConfig
from whorl.agents.search.match import play_match, uct_player
from whorl.agents.search.play import TrainedPlayer
from whorl.agents.search.tree import Tree
from whorl.agents.seed_statistics import SeedSummary, SummaryCurve
from whorl.errors import ConfigError
from whorl.report.animation import AnimatedEpisode, record_episode
from whorl.report.blocks import (
    Bar,
    BarStyle,
    Block,
    Card,
    Cell,
    Column,
    Curve,
    Facts,
    HeatMap,
    Histogram,
    Image,
    Line,
    LineStyle,
    StepReport,
    Table,
)
from whorl.report.data import ReportData

STYLES: tuple[LineStyle, ...] = tuple(style for style in get_args(LineStyle) if style != "faint")
LEAST_SHARE = 0.02  # of the simulations, of a move in the picture of a tree
INTERVALS = "Intervals hold 95 % of a bootstrap over seeds."
# Metric of `curves` in result.json -> title and note of its chart.
TRAINING_CURVES = {
    "return": ("Return of the last 100 episodes", f"Interquartile mean over the seeds. {INTERVALS} Faint: each seed."),
    "loss": (
        "Loss",
        "A loss does not measure a policy: its targets move with the policy, and it may rise while the return grows.",
    ),
    "lag": ("Policy lag", "Updates since the weights that acted in the rollouts of a training step, on average."),
}  # fmt: skip

MOVE_COLUMNS = [
    Column(name="Move"),
    Column(name="Player"),
    *(Column(name=n, number=True) for n in ("Plays", "Value")),
]
MOVE_COLUMNS += [Column(name=f"{name} of the search", number=True) for name in ("Choice", "Visits", "Prior")]


def try_recording(
    config: MethodConfig, networks: Any, *, max_steps: int, max_frames: int, log: Callable[[str], None]
) -> AnimatedEpisode | None:
    """Return an animated episode; without a package that draws it, log the reason and return None."""
    try:
        return record_episode(config, networks, max_steps=max_steps, max_frames=max_frames)
    except ConfigError as error:
        log(f"    no animation: {error.what}")
        return None


def training_blocks(
    title: str, facts: Sequence[tuple[str, str]], result: Mapping[str, Any], episode: AnimatedEpisode | None
) -> Iterator[Block]:
    """Yield the blocks of a trained agent.

    Args:
        title: heading of the section.
        result: the content of result.json.
        episode: to show, if any.
    """
    yield Facts(section=title, rows=[*facts])
    for metric, (heading, note) in TRAINING_CURVES.items():
        each = [
            Line(
                name=f"seed {curve['seed']}",
                x=[x for x, _ in points],
                y=[y for _, y in points],
                style="faint",
            )
            for curve in result["curves"]
            if (points := curve[metric]) and (metric != "lag" or any(lag for _, lag in points))
        ]
        if not each:  # no return exists before the first episode ends, and actors in this process do not lag
            continue
        summary = return_curve(dict(result), np.random.default_rng(0), metric) if len(each) > 1 else None
        lines = [*each, _line("interquartile mean", summary, "main")] if summary else each
        if not summary:
            lines = [line.model_copy(update={"style": "main"}) for line in each]
        yield Curve(
            section=title, title=heading, note=note, lines=lines, x_label="environment steps", height=200,
            x_range=(0.0, float(result["steps"])),
        )  # fmt: skip
    if grid := result.get("value_map"):
        note = "Value of each cell under the trained networks, and the greedy action. Colours grow with the value."
        yield HeatMap(
            section=title, title="Value map", note=note, values=grid["values"], signs=grid["arrows"]
        )
    if phases := dict(result.get("adaptation") or {}):
        if "pulls" in phases:
            phases["Bayes optimum"] = rewards_by_pull(FIVE_ARMS, PULLS).tolist()
        lines = [
            Line(name=name, x=[*range(1, len(y) + 1)], y=y, style=style)
            for style, (name, y) in zip(STYLES, phases.items(), strict=False)
        ]
        note = "Mean return of each episode with greedy actions. The task is hidden, and drawn for a trial."
        yield Curve(
            section=title, title="Adaptation within a trial", note=note, lines=lines, x_label="episode"
        )
    if found := result.get("recovered"):
        yield from _recovered_blocks(title, found)
    if episode is not None:
        yield Image(
            section=title, title="An episode of the best seed", note=f"Greedy actions: {episode}.",
            media_type="image/gif", data=base64.b64encode(episode.to_gif()).decode(),
            alt=f"Animation of an episode: {episode}",
        )  # fmt: skip


def game_blocks(title: str, config: MethodConfig, networks: Any) -> Iterator[Block]:
    """Yield two games of an agent against UCT, one with each colour; nothing if it plays no game."""
    try:
        agent = TrainedPlayer.open(title, config, networks)
    except ConfigError:
        return
    game = agent.method.game
    opening = game.initial(1), agent.simulations, torch.Generator().manual_seed(0)
    yield search_block(title, agent.method.search(networks, *opening).tree)
    simulations = agent.method.config.opponent_simulations
    found = play_match(game, (agent.player, uct_player(game, simulations)), 2, config.seed)
    for own, moves in zip("XO", found.moves, strict=True):
        yield from _game_record(title, agent, own, moves, f"UCT with {simulations:,} simulations")


def search_block(title: str, tree: Tree) -> Histogram:
    """Return the search of the first position of a tree: its moves by visits, and below each the replies to it."""
    root = int(tree.roots[0])
    least = LEAST_SHARE * float(tree.statistics[0, :, root].sum())
    best = tree.variation(root)

    def bars(row: int, depth: int, line: Sequence[int]) -> Iterator[Bar]:
        """line: the principal variation, if the node is on it."""
        edges, prior = tree.edges(torch.tensor([row])), tree.prior(torch.tensor([row]))
        visits, means, share = (field[:, 0].tolist() for field in (edges.visits, edges.means, prior))
        for action in sorted(range(len(visits)), key=lambda a: -visits[a]):
            if visits[action] >= max(1.0, least):
                numbers = f"{visits[action]:,.0f}", f"{means[action]:+.2f}", f"{share[action]:.0%}"
                style: BarStyle = "main" if line[:1] == [action] else ""
                cells = ["\u2003" * depth + str(1 + action), *numbers]
                yield Bar(cells=cells, value=visits[action], style=style)
                if child := int(tree.children[action, row]):
                    yield from bars(child, depth + 1, line[1:] if style else [])

    return Histogram(
        section=title, title="Search tree of the opening", bars=[*bars(root, 0, best)],
        columns=[Column(name=name, number=name != "Move") for name in ("Move", "Visits", "Value", "Prior")],
        note=f"Replies below each move, from {LEAST_SHARE:.0%} of the visits. Value: mean result for the player who moves. "
        f"Principal variation: {', '.join(str(1 + action) for action in best)}.",
    )  # fmt: skip


def _game_record(
    title: str, agent: TrainedPlayer, own: str, moves: Sequence[int], opponent: str
) -> Iterator[Block]:
    found = [agent.position(moves[:n]) for n in range(len(moves) + 1)]
    board, winner = found[-1]["board"], found[-1]["winner"]
    rows = list[list[Cell]]()
    for n, move in enumerate(moves):
        search, player = found[n]["search"], "agent" if found[n]["turn"] == own else "UCT"
        share, prior = search["visits"][move] / sum(search["visits"]), search["prior"][move]
        played = str(n + 1), player, str(move + 1)
        rows.append(
            [*played, f"{search['value']:+.2f}", str(search["move"] + 1), f"{share:.0%}", f"{prior:.0%}"]
        )
    values: list[list[float | None]] = [
        [sum(not p["board"][r][c] for p in found) if sign else None for c, sign in enumerate(row)]
        for r, row in enumerate(board)
    ]
    yield HeatMap(
        section=title, title=f"Game as {own} against UCT: {f'{winner} has won' if winner else 'a draw'}",
        note=f"X began, against {opponent}. The first two moves were random. Each stone has the number of its move.",
        values=values, signs=board,
    )  # fmt: skip
    yield Table(
        section=title, title=f"Moves as {own}", columns=MOVE_COLUMNS, rows=rows,
        note="The agent's search of each position: value for the player to move; visits and prior of the move played.",
    )  # fmt: skip


def _recovered_blocks(title: str, found: Mapping[str, Any]) -> Iterator[Block]:
    """Yield maps of rewards and visits, and the Lorenz curves of the visits."""
    width = len(found["rows"][0]) if found["rows"] else 0
    kinds = {
        "reward": "Reward for reaching each cell.",
        "visits": "Discounted visits of each cell, per episode.",
    }
    for kind, note in kinds.items():
        for name in (name for name in found if kind in name and width):
            cells = [found[name][i : i + width] for i in range(0, len(found[name]), width)]
            signs = [[*row] for row in found["rows"]]
            yield HeatMap(section=title, title=name.capitalize(), note=note, values=cells, signs=signs)
    lines = [
        Line(
            name=f"{name}, Gini {found['gini'][name]:.2f}",
            x=np.linspace(0, 1, len(y)).tolist(),
            y=y,
            style=style,
        )
        for (name, y), style in zip(found["lorenz"].items(), STYLES, strict=False)
    ]
    note = f"The total variation between the visits of expert and policy is {found['total_variation']:.3f}."
    yield Curve(
        section=title, title="Lorenz curves of visits", note=note, lines=lines, x_label="share of states",
        unit="share",
    )  # fmt: skip


def comparison_tables(found: AgentComparison) -> Iterator[Table]:
    """Yield the tables of a comparison: returns, normalised returns on several environments, and improvement."""
    environments = found.environments
    normalised = len(environments) > 1
    number = [Column(name=heading, number=True) for heading in ("Steps", "Seeds", "Return", "95 % interval")]
    yield Table(
        section="Comparison", title="Returns", columns=[Column(name="Agent"), Column(name="Environment"), *number],
        note=f"Interquartile mean over the seeds, {found.agents[0].result['episodes']} greedy episodes each. {INTERVALS}",
        rows=[
            [
                a.name, a.environment, f"{a.result['steps']:,}", f"{len(a.returns)}",
                *_cells(found.returns[a.name, a.environment]),
            ]
            for a in found.agents
        ],
    )  # fmt: skip
    if normalised:
        yield Table(
            section="Comparison", title="Normalised returns",
            columns=[Column(name="Agent"), *(Column(name=c.name, number=True) for c in number[2:])],
            note="Interquartile mean over all runs. On each environment the lowest run compared has 0 and the highest 1.",
            rows=[[name, *_cells(score, ".2f")] for name, score in found.scores.items()],
        )  # fmt: skip
    yield Table(
        section="Comparison", title="Probability of improvement",
        columns=[Column(name="Agent"), Column(name="Over"), *(Column(name=n, number=True) for n in ("P", "95 % interval"))],
        note="That a run of the first agent has a higher return than one of the second; a tie counts half.",
        rows=[[one, other, *_cells(p, ".2f")] for (one, other), p in found.improvement.items()],
    )  # fmt: skip


def comparison_page(found: AgentComparison) -> ReportData:
    """Return the page of a comparison: tables, curves and performance profiles."""
    styles = dict(zip(found.names, STYLES, strict=False))
    blocks: list[Block] = [*comparison_tables(found)]
    for environment, curves in found.curves.items():
        if curves:
            blocks.append(
                Curve(
                    section="Learning curves", title=environment, x_label="environment steps",
                    note=f"Return of the last 100 training episodes, interquartile mean over the seeds. {INTERVALS}",
                    lines=[_line(name, curve, styles[name]) for name, curve in curves.items()],
                )
            )  # fmt: skip
    several = len(found.environments) > 1
    blocks.append(
        Curve(
            section="Performance profiles", x_label="normalised return" if several else "return", y_range=(0.0, 1.0),
            title="Share of runs above a return", unit="share",
            note=f"A curve above another at every return is better everywhere. {INTERVALS}",
            lines=[_line(name, profile, styles[name]) for name, profile in found.profiles.items()],
        )
    )  # fmt: skip
    title = f"Agents on {', '.join(found.environments)}"
    cards = [return_card(name, score, several) for name, score in found.scores.items()]
    return ReportData(title=title, reports=[("compare", StepReport(cards=cards, blocks=blocks))])


def return_card(label: str, summary: SeedSummary, normalised: bool = False) -> Card:
    """Return the card of a return over seeds."""
    value, interval = _cells(summary, ".2f" if normalised else "")
    return Card(label=label, value=value, more=f"95 % interval {interval}", number=summary.mean)


def _cells(summary: SeedSummary, spec: str = "") -> list[str]:
    """Return the cells of a value and its interval."""
    value, _, interval = format(summary, spec).partition(" ")
    return [value, interval.strip("()") or "not available: one seed"]


def _line(name: str, curve: SummaryCurve, style: LineStyle) -> Line:
    ends = ([] if end is None else end.tolist() for end in (curve.low, curve.high))
    low, high = ends
    return Line(name=name, x=curve.x.tolist(), y=curve.mean.tolist(), low=low, high=high, style=style)
