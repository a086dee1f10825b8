"""Every file that the package reads or compiles is part of its wheel."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "whorl"


def test_files_other_than_python_are_package_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["whorl"]
    files = [str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*") if p.is_file()]
    files = [name for name in files if not name.endswith((".py", ".pyc"))]
    assert "machine/tile_registers.h" in files
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)] == []
