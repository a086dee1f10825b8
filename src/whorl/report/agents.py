"""The pages of agents: what the step `agents` has trained, and the comparison of several agents."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from whorl.agents.comparison import AgentComparison, return_curve
from whorl.agents.methods.method import MethodConfig
from whorl.agents.seed_statistics import SeedSummary, SummaryCurve
from whorl.errors import ConfigError
from whorl.report.animation import AnimatedEpisode, record_episode
from whorl.report.blocks import (
    Block,
    Card,
    Column,
    Curve,
    Facts,
    HeatMap,
    Image,
    Line,
    LineStyle,
    StepReport,
    Table,
)
from whorl.report.data import ReportData

STYLES: tuple[LineStyle, ...] = tuple(style for style in get_args(LineStyle) if style != "faint")
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
    if episode is not None:
        yield Image(
            section=title, title="An episode of the best seed", note=f"Greedy actions: {episode}.",
            media_type="image/gif", data=base64.b64encode(episode.to_gif()).decode(),
            alt=f"Animation of an episode: {episode}",
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
