"""The terminal dashboard of a run: loss curve, latest metrics, and a sample of the model.

    pretrain, step 1,240
    4.61 ┤⠲⡀
         │ ⠈⠢⣀              validation     2.104 bits per byte
         │     ⠉⠒⠤⣀         tokens/s      21,304
    2.80 ┤          ⠉⠉⠒⠒⠤   ...
    def add(a, b): return a

It is a metrics sink (`sinks.py`) and is drawn above the bars of `Progress`, on a terminal only. When the step ends it
disappears, and the log lines remain. The text is rendered again only after a new metric; other refreshes reuse it, so
that drawing costs little.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.tracking.progress import Progress
from whorl.tracking.sinks import Values

if TYPE_CHECKING:
    from rich.text import Text

HEIGHT = 8  # lines of the curve
SAMPLE_LINES = 4
MAX_POINTS = 4000
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille cell, by row and column
# Metrics next to the curve: name, label, format.
_METRIC_ROWS = (
    ("held_out_bits_per_byte", "validation", "{:.3f} bits per byte"),
    ("held_out_bits_per_byte_bound", "validation", "at most {:.3f} bits per byte"),
    ("induction_nll", "induction", "{:.3f} nats"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("mfu", "MFU", "{:.0%}"),
    ("time/data_fraction", "data wait", "{:.1%}"),
    ("grad_norm", "grad norm", "{:.3f}"),
    ("learning_rate", "learning rate", "{:.2e}"),
)


def plot(values: Sequence[float], width: int, height: int, *, braille: bool = True) -> list[str]:
    """Return a curve as `height` lines of `width` characters: 2 x 4 Braille dots per character, or one star.

    The highest value is on the first line. Non-finite values are skipped; fewer than two values give empty lines.
    """
    across, down = (2, 4) if braille else (1, 1)
    columns, rows = width * across, height * down
    points = [v for v in values if math.isfinite(v)]
    if len(points) < 2 or columns < 2:
        return [" " * width] * height
    levels: list[float] = []
    for column in range(columns):  # mean per column, or interpolation between neighbours
        part = points[column * len(points) // columns : (column + 1) * len(points) // columns]
        if part:
            levels.append(sum(part) / len(part))
        else:
            at = column * (len(points) - 1) / (columns - 1)
            left = min(int(at), len(points) - 2)
            levels.append(points[left] + (at - left) * (points[left + 1] - points[left]))
    low, high = min(levels), max(levels)
    scale = (rows - 1) / (high - low) if high > low else 0.0
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for column, level in enumerate(levels):
        row = round((high - level) * scale)
        span = range(row, row + 1)
        if (
            previous is not None and abs(previous - row) > 1
        ):  # a steep segment becomes a line instead of two dots
            span = range(previous + 1, row + 1) if previous < row else range(row, previous)
        for r in span:
            cells[r // down][column // across] |= _DOTS[r % down][column % across] if braille else 1
        previous = row
    if braille:
        return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]
    return ["".join("*" if cell else " " for cell in line) for line in cells]


class Dashboard:
    """The dashboard sink. It sets itself as the header of `progress`."""

    name = "the dashboard"

    def __init__(self, progress: Progress) -> None:
        self._lock = threading.Lock()
        encoding = getattr(progress.stream, "encoding", None) or "ascii"
        self.braille = encoding.lower().replace("-", "").startswith("utf")
        self._reset()
        progress.header = self.render

    @staticmethod
    def enabled(progress: Progress, requested: bool | None) -> bool:
        """Whether to show the dashboard: as requested; by default on a terminal with cursor movement."""
        able = progress.interactive and os.environ.get("TERM", "") not in ("", "dumb")
        return able if requested is None else requested and able

    def _reset(self) -> None:
        self.step_name, self.step = "", 0
        self.losses: list[float] = []
        self.last: dict[str, float] = {}
        self.sample = ""
        self._drawn: tuple[tuple[int, int], Text] | None = None

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        pass

    def write(self, step_name: str, step: int, values: Values) -> None:
        with self._lock:
            if step_name != self.step_name:
                self._reset()
                self.step_name = step_name
            self.step = max(step, self.step)
            for name, value in values.items():
                if not isinstance(value, str):
                    self.last[name] = value
                elif name == "sample":  # the text of events is in the log
                    self.sample = value
            if isinstance(loss := values.get("nll", values.get("loss")), float | int):
                self.losses.append(loss)
            if len(self.losses) > MAX_POINTS:
                self.losses = [sum(self.losses[i : i + 2]) / 2 for i in range(0, len(self.losses) - 1, 2)]
            self._drawn = None

    def end_step(self, step_name: str) -> None:
        with self._lock:
            if step_name == self.step_name:
                self._reset()

    def close(self) -> None:
        with self._lock:
            self._reset()

    def render(self, width: int, height: int) -> Text | None:
        """Return the text for a terminal of this size; None without data or if it is too small."""
        with self._lock:
            if not self.step_name or width < 40 or height < 12:
                return None
            if self._drawn is None or self._drawn[0] != (width, height):
                self._drawn = (width, height), self._draw(width, height)
            return self._drawn[1]

    def _draw(self, width: int, height: int) -> Text:
        from rich.text import Text

        tall = HEIGHT if height >= 20 else 4
        metric_lines = [
            f"{name:<15}{form.format(self.last[key])}" for key, name, form in _METRIC_ROWS if key in self.last
        ]
        side = max(map(len, metric_lines), default=0) + 2
        room = width - side - 10
        if room < 16:  # too narrow for both: metrics only
            metric_lines, room = [], width - 10
        losses = self.losses[len(self.losses) // 20 :]  # the drop of the first steps would flatten the rest
        curve = plot(losses, min(room, 100), tall, braille=self.braille)
        low, high = (min(losses), max(losses)) if losses else (math.nan, math.nan)
        bar, tick = ("│", "┤") if self.braille else ("|", "+")
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{self.step_name}, step {self.step:,}", style="bold")
        text.append(f"  loss {self.losses[-1]:.3f}\n" if self.losses else "\n")
        for number, line in enumerate(curve):
            label = f"{high:.2f}" if number == 0 else f"{low:.2f}" if number == tall - 1 else ""
            text.append(f"{label:>7} {tick if label else bar}", style="dim")
            text.append(line, style="cyan")
            text.append(f"  {metric_lines[number] if number < len(metric_lines) else ''}\n")
        for line in self.sample.splitlines()[-SAMPLE_LINES:]:
            printable = "".join(c if c.isprintable() else " " for c in line.expandtabs(4))
            text.append(f"  {printable[: width - 3]}\n", style="italic dim")
        text.rstrip()
        return text
