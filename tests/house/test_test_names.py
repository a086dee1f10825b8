"""Test modules have unique names: pytest imports those of folders without `__init__.py` by their names alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_names_of_test_modules_are_unique() -> None:
    files = [*Path(__file__).parents[1].rglob("test_*.py")]
    counts = Counter(file.name for file in files)
    assert len(files) > 200
    assert [name for name, count in counts.items() if count > 1] == []
