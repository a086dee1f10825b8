"""Files that are written in one step: content, permissions, and what an error leaves."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from whorl.files import write_atomic


def test_write_atomic_replaces_content_and_sets_mode(tmp_path: Path) -> None:
    path, staging = tmp_path / "a.json", tmp_path / "staging"
    staging.mkdir()
    write_atomic(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    path.unlink()
    write_atomic(path, b"\xff", staging=staging, mode=0o600)
    assert path.read_bytes() == b"\xff" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["a.json", "staging"]


@pytest.mark.parametrize("call", ["fsync", "fdopen"])
def test_failed_write_keeps_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
