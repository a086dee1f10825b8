"""A run to look at while it goes: the loss curve, what was measured last, and what the model says.

    pretrain, step 1,240
    4.61 ┤⠲⡀
         │ ⠈⠢⣀              held-out       2.104 bits per byte
         │     ⠉⠒⠤⣀         tokens/s      21,304
    2.80 ┤          ⠉⠉⠒⠒⠤   ...
    def add(a, b): return a

It is one more sink of the metrics (`sinks.py`) and stands above the bars of `Progress`, on a terminal only; in a pipe
nothing of it exists. When the step ends it goes, and the lines that scrolled by remain, as they would be without it.

The subtle part is its price, since whoever draws does not train: what is drawn is made anew only when a number came, and
in between the same text is given to the terminal.
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
# What stands beside the curve: metric, its name here, how it is written.
_METRIC_ROWS = (
    ("held_out_bits_per_byte", "held-out", "{:.3f} bits per byte"),
    ("induction_nll", "induction", "{:.3f} nats"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("mfu", "MFU", "{:.0%}"),
    ("time/data_fraction", "data wait", "{:.1%}"),
    ("grad_norm", "grad norm", "{:.3f}"),
    ("learning_rate", "learning rate", "{:.2e}"),
)


def plot(values: Sequence[float], width: int, height: int, *, braille: bool = True) -> list[str]:
    """A curve as `height` lines of `width` characters: 2 x 4 dots in each, or, without Braille, one star.

    The highest value is on the first line. Values that are no numbers are left out; fewer than two give empty lines.
    """
    across, down = (2, 4) if braille else (1, 1)
    columns, rows = width * across, height * down
    points = [v for v in values if math.isfinite(v)]
    if len(points) < 2 or columns < 2:
        return [" " * width] * height
    levels: list[float] = []
    for column in range(columns):  # means of what falls on a column, or a point between neighbours
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
    before: int | None = None
    for column, level in enumerate(levels):
        row = round((high - level) * scale)
        span = range(row, row + 1)
        if before is not None and abs(before - row) > 1:  # a steep piece is a line, not two dots
            span = range(before + 1, row + 1) if before < row else range(row, before)
        for r in span:
            cells[r // down][column // across] |= _DOTS[r % down][column % across] if braille else 1
        before = row
    if braille:
        return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]
    return ["".join("*" if cell else " " for cell in line) for line in cells]


class Dashboard:
    """The sink. Puts itself above the bars of `progress`."""

    name = "the dashboard"

    def __init__(self, progress: Progress) -> None:
        self._lock = threading.Lock()
        encoding = getattr(progress.stream, "encoding", None) or "ascii"
        self.braille = encoding.lower().replace("-", "").startswith("utf")
        self._reset()
        progress.header = self.render

    @staticmethod
    def enabled(progress: Progress, requested: bool | None) -> bool:
        """Whether to show one: as asked; by default on a terminal that can move its cursor."""
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
                elif name == "sample":  # an event's words are in the log
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
        """What is to be seen in a terminal of this size; None while there is nothing, or no room."""
        with self._lock:
            if not self.step_name or width < 40 or height < 12:
                return None
            if self._drawn is None or self._drawn[0] != (width, height):
                self._drawn = (width, height), self._draw(width, height)
            return self._drawn[1]

    def _draw(self, width: int, height: int) -> Text:
        from rich.text import Text

        tall = HEIGHT if height >= 20 else 4
        beside = [
            f"{name:<15}{form.format(self.last[key])}" for key, name, form in _METRIC_ROWS if key in self.last
        ]
        side = max(map(len, beside), default=0) + 2
        room = width - side - 10
        if room < 16:  # too narrow for both: the numbers
            beside, room = [], width - 10
        losses = self.losses[len(self.losses) // 20 :]  # the fall of the first steps would flatten the rest
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
            text.append(f"  {beside[number] if number < len(beside) else ''}\n")
        for line in self.sample.splitlines()[-SAMPLE_LINES:]:
            printable = "".join(c if c.isprintable() else " " for c in line.expandtabs(4))
            text.append(f"  {printable[: width - 3]}\n", style="italic dim")
        text.rstrip()
        return text
