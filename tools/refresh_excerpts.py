"""Refresh the code excerpts of docs/one_loop.md after the code changed.

    python tools/refresh_excerpts.py

An excerpt follows a comment `<!-- source: PATH -->`. Its first line and its number of lines stay; the lines are read again.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "one_loop.md"
EXCERPT = re.compile(r"(<!-- source: (\S+) -->\n```python\n)(.*?)(```)", re.DOTALL)


def refresh(found: re.Match[str]) -> str:
    """The same excerpt with today's lines."""
    shown = found[3].splitlines(keepends=True)
    code = (ROOT / found[2]).read_text(encoding="utf-8").splitlines(keepends=True)
    starts = [n for n, line in enumerate(code) if line == shown[0]]
    if len(starts) != 1:
        raise SystemExit(
            f"{found[2]} has {len(starts)} lines {shown[0].strip()!r}: choose another first line"
        )
    return found[1] + "".join(code[starts[0] : starts[0] + len(shown)]) + found[4]


PAGE.write_text(EXCERPT.sub(refresh, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
