"""Grids and patches in answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import WhorlError
from whorl.evals.grading.structures import grid, patch, read_grids

DIFF = "--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,2 @@\n x = 0\n-y = 1\n+y = 2\n"
rows = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(0, 9), min_size=width, max_size=width), min_size=1, max_size=5
    )
)


@given(rows)
def test_grid_is_read_in_every_form(gold: Any) -> None:
    spaced = "\n".join(" ".join(map(str, row)) for row in gold)
    dense = "\n".join("".join(map(str, row)) for row in gold)
    for text in (
        spaced,
        f"The rule turns it.\n\n{spaced}\n",
        dense,
        str(gold),
        "[" + ",\n ".join(map(str, gold)) + "]",
    ):
        assert read_grids(text)[-1] == gold, text
        assert grid(gold, text).outcome == "right"


@pytest.mark.parametrize(
    ("text", "outcome", "cells"),
    [
        ("1 2\n3 5", "wrong", 0.75),
        ("1 2", "wrong", 0.0),
        ("", "not_found", 0.0),
        ("1 2\n3 4\n\n9 9\n9 9", "wrong", 0.0),
    ],
)
def test_wrong_grids(text: str, outcome: str, cells: float) -> None:
    found = grid([[1, 2], [3, 4]], text)
    assert (found.outcome, found.scores["grid_cells"], found.scores["grid"]) == (outcome, cells, 0.0)
    assert grid([[1, 2], [3, 4]], "no", finish="length").outcome == "truncated"
    assert grid([[[1]], [[2, 2]]], "1\n\n2 2").outcome == "right"


def test_patch_by_files_and_lines() -> None:
    assert patch(DIFF, f"Here:\n```diff\n{DIFF}```").scores == {
        "patch_files": 1,
        "patch_lines": 1,
        "patch_found": 1,
    }
    other = DIFF.replace("y = 2", "y = 3")
    assert patch(DIFF, other).scores == {"patch_files": 1, "patch_lines": 0, "patch_found": 1}
    assert patch(DIFF, DIFF.replace("m.py", "n.py")).outcome == "wrong"
    assert patch(DIFF, "Change y to 2.").outcome == "not_found"


@pytest.mark.parametrize("gold", [None, "x", [], [1, 2]])
def test_wrong_gold_is_refused(gold: Any) -> None:
    with pytest.raises(WhorlError, match="the gold answer is no"):
        grid(gold, "1 2")
    with pytest.raises(WhorlError, match="the gold answer is no patch"):
        patch(gold, "1 2")
