"""The version stands in one place; the changelog's first section, `whorl --version` and the wheel have it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import whorl
from whorl.cli import build_app

ROOT = Path(__file__).parents[2]


def test_version_is_that_of_the_changelog(capsys: pytest.CaptureFixture[str]) -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == whorl.__version__
    with pytest.raises(SystemExit, match="0"):
        build_app()(["--version"])
    assert capsys.readouterr().out == f"whorl {whorl.__version__}\n"


def test_wheel_takes_its_version_from_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "whorl.__version__"}
