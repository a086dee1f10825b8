"""Fixtures of the alignment tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.align.byte_model import tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the byte tokenizer."""
    place = tmp_path_factory.mktemp("tokenizer")
    tokenizer(place)
    return place


@pytest.fixture
def one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the native step: the choice of the faster runner is measured, and runners differ in last bits."""
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")
