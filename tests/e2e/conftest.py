"""The corpus of the end-to-end tests, and a mixture of experts that two of them read."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
from tests.support.cli import output_of
from tests.support.e2e_recipe import MOE_RECIPE


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with about 1 MB of source code."""
    folder = tmp_path_factory.mktemp("code")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("asyncio", "email", "json", "logging", "unittest", "xml", "http", "importlib", "concurrent"):
        shutil.copytree(library / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "test*"))
    return folder


@pytest.fixture(scope="session")
def mixture(code: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe of a small mixture of experts, run in deterministic mode by one thread. Read-only."""
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "small.toml").write_text(MOE_RECIPE.replace("CODE", str(code)))
    assert "4 experts, top 2" in output_of("run", "small.toml", "--deterministic", cwd=folder)
    return folder
