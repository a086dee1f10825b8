"""A small artifact and a child process, for the tests of the store."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from whorl.store import Artifact, Store


def make(
    store: Store, name: str = "a/one", text: str = "hello", parents: dict[str, Artifact] | None = None
) -> Artifact:
    with store.build(
        kind="note", name=name, parents=parents or {}, config={"text": text}, version=1
    ) as build:
        if build.existing is None:
            (build.path / "note.txt").write_text(text)
            (build.path / "deep").mkdir()
            (build.path / "deep" / "part.bin").write_bytes(bytes(1000))
            build.summary["letters"] = len(text)
    assert build.artifact is not None
    return build.artifact


def child(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], stdout=subprocess.PIPE, text=True
    )
