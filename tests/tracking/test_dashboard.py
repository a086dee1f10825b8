"""The dashboard: contents, cost, and its absence in a pipe."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from whorl.tracking.dashboard import Dashboard, plot
from whorl.tracking.progress import Progress
from whorl.tracking.run import Run
from whorl.tracking.sinks import SafeSinks

BRAILLE = re.compile("[\u2801-\u28ff]")
SCRIPT = """
import sys, time
from pathlib import Path
from whorl.tracking.dashboard import Dashboard
from whorl.tracking.progress import Progress
from whorl.tracking.run import Run
from whorl.tracking.sinks import SafeSinks
progress = Progress()
sinks = [Dashboard(progress)] if Dashboard.enabled(progress, None) else []
run = Run(Path(sys.argv[1]), tensorboard=False, sinks=SafeSinks(sinks, progress.log))
with progress.task("Training", total=40, unit="steps") as task, run.metrics("pretrain") as log:
    for step in range(1, 41):
        log.write(step, {"nll": 5 / step ** 0.5, "tokens_per_second": 21000.0, "held_out_bits_per_byte": 2.125})
        if step == 20:
            log.write(step, {"sample": "def add(a, b): return a"})
        task.update(done=step, note=f"loss {5 / step:.3f}")
        time.sleep(0.03)
progress.log("done")
"""


def on_a_terminal(command: list[str], *, columns: int = 100, lines: int = 30, **more: str) -> str:
    """Return the output of a command on a pseudo-terminal."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **more}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.STDOUT, env=environment)
    os.close(its)
    seen = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            seen += part
    os.close(ours)
    assert process.wait(timeout=60) == 0, seen.decode(errors="replace")
    return seen.decode(errors="replace")


def test_plot_falling_curve() -> None:
    lines = plot([10 - x for x in range(10)], 20, 4)
    assert len(lines) == 4 and all(len(line) == 20 for line in lines)
    assert lines[0].strip() and lines[0].startswith(lines[0].strip())  # starts high on the left
    assert lines[3].endswith(lines[3].strip()) and lines[3].strip()
    dots = sum(bin(ord(c) - 0x2800).count("1") for line in lines for c in line if c != " ")
    assert 40 <= dots <= 60  # one per column, and connecting dots


def test_plot_any_length() -> None:
    assert plot([], 10, 3) == plot([1.0], 10, 3) == [" " * 10] * 3
    assert plot([float("nan"), 1.0], 10, 3) == [" " * 10] * 3
    for n in (2, 3, 19, 20, 21, 1000):
        assert any(line.strip() for line in plot([float(i % 7) for i in range(n)], 10, 3))
    flat = plot([2.0] * 50, 10, 3)
    assert BRAILLE.search(flat[0]) and not flat[1].strip()
    stars = plot([3.0, 2.0, 1.0], 9, 3, braille=False)
    assert set("".join(stars)) == {" ", "*"} and stars[0][0] == "*" and stars[2][-1] == "*"


def test_dashboard_hidden_on_small_or_dumb_terminal(tmp_path: Path) -> None:
    script = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    assert not BRAILLE.search(on_a_terminal(script, lines=8))
    assert "validation" not in on_a_terminal(script, TERM="dumb")
    plain = on_a_terminal(script, PYTHONIOENCODING="ascii:replace")
    assert not BRAILLE.search(plain) and "*" in plain and "validation" in plain


def test_dashboard_enabled_needs_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    piped, shown = Progress(io.StringIO()), Progress(io.StringIO(), interactive=True)
    assert not Dashboard.enabled(piped, None) and not Dashboard.enabled(piped, True)
    assert Dashboard.enabled(shown, None) and not Dashboard.enabled(shown, False)


def test_dashboard_render_is_cached(tmp_path: Path) -> None:
    board = Dashboard(Progress(io.StringIO(), interactive=True))
    log = Run(tmp_path, tensorboard=False, sinks=SafeSinks([board], print)).metrics("pretrain")
    for step in range(5000):
        board.write("pretrain", step, {"nll": 1.0 / (step + 1), "tokens_per_second": 1.0})
    assert len(board.losses) <= 4000
    first = board.render(100, 30)
    assert board.render(100, 30) is first and board.render(90, 30) is not first
    log.close()
    assert board.render(100, 30) is None


def drawn(*records: dict[str, float | str]) -> str:
    """The dashboard's text after these records."""
    board = Dashboard(Progress(io.StringIO(), interactive=True))
    for step, values in enumerate(records, start=1):
        board.write("pretrain", step, values)
    text = board.render(100, 30)
    assert text is not None
    return text.plain


def test_dashboard_sample_cannot_move_cursor() -> None:
    text = drawn({"nll": 1.0, "sample": "def f():\n\x1b[2Jx\r\tpass [bold]"})
    assert "\x1b" not in text and "\r" not in text and "[bold]" in text


def test_dashboard_ignores_event_text() -> None:
    event = {"event": "spike", "message": "the loss is 9", "documents": '[{"path": "a.txt"}]'}
    text = drawn({"nll": 3.0, "sample": "def f():"}, event)
    assert "def f():" in text and "a.txt" not in text
