"""Fixtures of this room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.align.byte_model import tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tokenizer."""
    place = tmp_path_factory.mktemp("tokenizer")
    tokenizer(place)
    return place


@pytest.fixture
def one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the engine's runners is faster is measured, and they differ in last bits: here it is not left to that."""
    monkeypatch.setenv("WHORL_NATIVE", "0")
