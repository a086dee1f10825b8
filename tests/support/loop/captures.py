"""Captures of tests: one that is stopped at any step, and the fold of its topic."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

from whorl.log.port import Log
from whorl.loop.capture.capture import Capture
from whorl.loop.capture.source import SourceOptions, open_source


def open_capture(log: Log, target: str, table: str = "", warnings: list[str] | None = None) -> Capture:
    """Return a capture into the topic "docs"."""
    history = lambda: (record.event() for record in log.replay("docs"))  # noqa: E731
    options = SourceOptions(
        target, table, "docs", Path(tempfile.gettempdir()) / f"whorl-captures-{os.getpid()}", history
    )
    return Capture(open_source(options), log, "docs", (warnings if warnings is not None else []).append)


def catch_up(capture: Capture, seed: int | None = None) -> str:
    """Read everything that is there; with a seed stop at a random step. Returns the last step; "waiting" ends, too."""
    left = random.Random(seed).randrange(1, 12) if seed is not None else 1 << 30
    for point in capture.steps():
        left -= 1
        if point in ("idle", "waiting") or not left:
            return point
    raise AssertionError


def folded(log: Log) -> dict[str, dict[str, Any]]:
    """Fold the topic into key -> row, as a view does: a column that is absent keeps its value."""
    rows = dict[str, dict[str, Any]]()
    for data, key in ((record.event().data, record.key) for record in log.replay("docs")):
        if "op" in data:
            row = rows.pop(key, {}) if data["op"] == "u" else rows.pop(key, {}) and {}
            if data["op"] != "d":
                rows[key] = row | data["after"]
    return rows


def events(log: Log) -> list[tuple[Any, ...]]:
    """Return (op, key, before, after) of all changes."""
    found = ((record.key, record.event().data) for record in log.replay("docs"))
    return [(data["op"], key, data["before"], data["after"]) for key, data in found if "op" in data]
