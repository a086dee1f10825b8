"""The catalog of objectives: complete, importable without torch, and equal to docs/objectives.md."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from whorl.agents.methods.registration import METHODS
from whorl.align.config import PREFERENCE_OBJECTIVES, Divergence
from whorl.align.rl.config import ALGORITHMS
from whorl.objectives.catalog import CATALOG, ObjectiveInfo
from whorl.objectives.llm_policy import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
ROWS = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}


def test_catalog_imports_without_torch() -> None:
    code = "import sys, whorl.objectives.catalog; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_catalog_covers_every_configured_objective() -> None:
    names = {
        *ALGORITHMS, *METHODS, *PREFERENCE_OBJECTIVES, *get_args(Divergence),
    }  # fmt: skip
    assert names | PRESETS.keys() | {"next_token", "sft", "reward_model", "info_nce"} <= CATALOG.keys()
    assert all(name == info.name and "\n" not in info.formula for name, info in CATALOG.items())


@pytest.mark.parametrize("info", CATALOG.values(), ids=lambda info: info.name)
def test_catalog_entry_has_module_and_row_in_docs(info: ObjectiveInfo) -> None:
    file = info.module.removeprefix("whorl.").replace(".", "/") + ".py"
    assert import_module(info.module).__doc__
    row = ROWS[info.name].replace("\\|", "|")
    assert f"`{info.formula}`" in row and f"`{file}`" in row
    assert info.paper.split(",")[0] in row


def test_docs_have_no_other_rows() -> None:
    assert ROWS.keys() == CATALOG.keys()
