"""Progress output for terminals and log files.

On a terminal a task is a moving bar, or a line where the bar is too wide; elsewhere (a pipe, CI, nohup) a plain line every
few seconds. In both cases it ends with one closing line with its duration. The command line creates one `Progress` and
passes it down; library calls use `Progress.silent()`. Every line also goes to the `sinks` (the run folder's log).

The subtle point: only the thread that holds `_lock` touches the live display. The display is removed when the last task
ends, since it owns the cursor and would garble the caller's prints.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PLAIN_SECONDS = 5.0  # minimum seconds between plain lines
PLAIN_FRACTION = (
    0.05  # of the time since the start of a task: so its lines grow with the logarithm of its duration
)
# A plain line has an estimate of the remaining time after so many seconds, and so much of the work: the start is slower.
REMAINING_AFTER, REMAINING_FRACTION = 10.0, 0.05


_CONTROLS = {c: repr(chr(c))[1:-1] for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


def escape_controls(text: str) -> str:
    """Return the text with control characters other than line ends and tabs as escapes: terminals act on them."""
    return text.translate(_CONTROLS)


def format_duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `1 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_count(value: float) -> str:
    """Format a count with thousands separators, and decimals only for small values."""
    if value != int(value) and abs(value) < 100:
        return f"{value:.1f}"
    return f"{value:,.0f}"


class ProgressTask:
    """A unit of work; a context manager. Made by `Progress.task`."""

    def __init__(self, progress: Progress, label: str, total: float | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.counted = 0.0, False
        self.ended = False
        self.note = ""
        self._progress = progress
        self._start = self._said = time.monotonic()
        self._bar: TaskID | None = None

    def advance(self, amount: float = 1.0, *, note: str | None = None) -> None:
        """Add `amount` to the work done."""
        self.update(done=self.done + amount, note=note)

    def update(
        self, *, done: float | None = None, total: float | None = None, note: str | None = None
    ) -> None:
        """Set the work done, the total, or the note after the bar."""
        if done is not None:
            self.done, self.counted = done, True
        if total is not None:
            self.total = total
        if note is not None:
            self.note = note
        self._progress._show(self)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def summary(self) -> str:
        """The task as text: `Tokenizing: 34 of 100 MB (34 %), 12 s, 3.1 MB/s`."""
        parts = []
        unit = f" {self.unit}" if self.unit else ""
        if self.total:
            share = f" ({100 * self.done / self.total:.0f} %)" if self.done < 0.995 * self.total else ""
            parts.append(f"{format_count(self.done)} of {format_count(self.total)}{unit}{share}")
        elif self.done:
            parts.append(f"{format_count(self.done)}{unit}")
        parts.append(format_duration(self.seconds))
        if remaining := self._remaining():
            parts.append(f"about {format_duration(round(remaining))} left")
        if self.note:
            parts.append(self.note)
        return f"{self.label}: {', '.join(parts)}"

    def _remaining(self) -> float:
        """Seconds to the end at the mean speed so far; 0 if unknown."""
        early = (
            self.ended or self.seconds < REMAINING_AFTER or self.done < REMAINING_FRACTION * (self.total or 0)
        )
        if not self.total or early or self.done >= self.total:
            return 0.0
        return self.seconds * (self.total / self.done - 1)

    def __enter__(self) -> ProgressTask:
        self._progress._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress._end(self, stopped=kind is not None)


class Progress:
    """Progress output of a run.

    Args:
        stream: output; standard output by default.
        interactive: a moving bar (True) or plain lines (False); by default, whether `stream` is a terminal.
        every: seconds between the plain lines of a task.
    """

    def __init__(
        self, stream: TextIO | None = None, *, interactive: bool | None = None, every: float = PLAIN_SECONDS
    ) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.interactive = self.stream.isatty() if interactive is None else interactive
        self.every = every
        self.sinks: list[Callable[[str], None]] = []
        self.header: Callable[[int, int], Any] | None = (
            None  # (width, height) -> text above the bars, or None
        )
        self._quiet = False
        self._lock = threading.RLock()
        self._live: RichProgress | None = None
        self._tasks: list[ProgressTask] = []

    @classmethod
    def silent(cls) -> Progress:
        """Return one without output (sinks still receive lines), for tests and library calls."""
        progress = cls(interactive=False)
        progress._quiet = True
        return progress

    def task(self, label: str, total: float | None = None, unit: str = "") -> ProgressTask:
        """Return a task for a `with` statement; `total` None: the length is unknown."""
        return ProgressTask(self, label, total, unit)

    def log(self, text: str) -> None:
        """Print one or several lines. Control characters, such as those that a model samples, are shown as escapes."""
        text = escape_controls(text)
        with self._lock:
            for sink in self.sinks:
                sink(text)
            if self._quiet:
                return
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self.stream, flush=True)

    def _begin(self, task: ProgressTask) -> None:
        with self._lock:
            self._tasks.append(task)
            if not self.interactive or self._quiet:
                return
            if self._live is None:
                self._live = _bars(self.stream, self._render_header, self._summaries)
                self._live.start()
            task._bar = self._live.add_task(task.label, total=task.total, unit=task.unit, note="")

    def _summaries(self) -> list[str]:
        return [task.summary() for task in [*self._tasks]]

    def _render_header(self, width: int, height: int) -> Any:
        return None if self.header is None else self.header(width, height)

    def _show(self, task: ProgressTask) -> None:
        if self._quiet:
            return
        if task._bar is not None:
            with self._lock:
                if self._live is not None:
                    self._live.update(task._bar, completed=task.done, total=task.total, note=task.note)
        elif not self.interactive:
            now = time.monotonic()
            if now - task._said >= max(self.every, PLAIN_FRACTION * task.seconds) and task.done != task.total:
                task._said = now
                self.log(task.summary())

    def _end(self, task: ProgressTask, *, stopped: bool) -> None:
        task.ended = True
        if not stopped and not task.counted:  # work without a count is done when its block is
            task.done = task.total or 0.0
        with self._lock:
            self._tasks.remove(task)
            if self._live is not None and task._bar is not None:
                self._live.remove_task(task._bar)
                if not self._tasks:
                    self._live.stop()
                    self._live = None
            self.log(f"{task.summary()}{' (stopped)' if stopped else ''}")


def _bars(
    stream: TextIO, header: Callable[[int, int], Any], summaries: Callable[[], list[str]]
) -> RichProgress:
    """Return the display of the tasks: bars, or where they do not fit the width the `summaries`, cut off at its end."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    console = Console(file=stream)

    class Bars(RichProgress):
        def get_renderables(self) -> Iterable[Any]:
            over = header(*console.size)
            if over is not None:
                yield over
            table = self.make_tasks_table(self.tasks)
            if console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width:
                yield table
            else:
                yield from (Text(line, no_wrap=True, overflow="ellipsis") for line in summaries())

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        transient=True,
        refresh_per_second=4,
    )
