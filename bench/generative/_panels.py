"""Curves by name, in panels of one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#1f4e99", "#d1431f", "#3a8f5c", "#8a8a8a")
Curves = dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class Panel:
    """Curves by name. axes: properties of matplotlib's axes."""

    title: str
    curves: Curves
    axes: Mapping[str, Any]


def add(curves: Curves, step: float, values: Mapping[str, float]) -> None:
    """Add one point to each of the curves."""
    for name, value in values.items():
        steps, found = curves.setdefault(name, ([], []))
        steps.append(step)
        found.append(value)


def show(effect: str, **figures: Any) -> None:
    """Print the figures of an effect."""
    shown = {
        k: [float(f"{x:.4g}") for x in (v if isinstance(v, tuple) else (v,))] for k, v in figures.items()
    }
    print(f"{effect}: " + ", ".join(f"{k} {' to '.join(map(str, v))}" for k, v in shown.items()), flush=True)


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels, four to a line."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 4).flatten(), panels, strict=False):
        for (name, curve), colour in zip(panel.curves.items(), COLOURS, strict=False):
            width = 1.2 if axes.lines else 2.0  # of equal curves the first is seen behind the second
            axes.plot(*curve, color=colour, linewidth=width, label=name)
        axes.set(**panel.axes)
        axes.set_title(panel.title, fontsize=9)
        axes.xaxis.label.set_size(8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")
