"""A small artifact and a child process, for the tests of the store."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from whorl.store import Artifact, Build, Store


def note(
    store: Store, name: str = "a/one", text: str = "hello", parents: Any = None, **options: Any
) -> Build:
    """A build whose address depends on `text` and `parents`."""
    inputs = {"kind": "note", "parents": parents or {}, "config": {"text": text}, "version": 1}
    return Build(store, name=name, **inputs, **options)


def make(store: Store, name: str = "a/one", text: str = "hello", parents: Any = None) -> Artifact:
    with note(store, name, text, parents) as build:
        if build.existing is None:
            (build.path / "note.txt").write_text(text)
            (build.path / "deep").mkdir()
            (build.path / "deep" / "part.bin").write_bytes(bytes(1000))
            build.summary["letters"] = len(text)
    assert build.artifact is not None
    return build.artifact


def child(code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
