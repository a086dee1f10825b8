"""The embedded index after kill -9, and what it keeps on disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from whorl.search.documents import Passage, SearchDocument, SearchQuery
from whorl.search.index import open_index

WRITER = """
import sys
from tests.search.test_embedded_kills import change, encode
from whorl.search import vectors
from whorl.search.index import open_index
vectors.FLAT = 40  # so that FAISS builds too
index = open_index(sys.argv[1], writable=True, encode=encode, encoder="e")
step = index.position().get("t/0", 0)
print("ready", flush=True)
while True:
    index.write(*change(step), {"t/0": step + 1})
    step += 1
"""


def encode(texts: list[str]) -> np.ndarray:
    """A direction per text."""
    made = np.stack([np.random.default_rng(list(text.encode())).standard_normal(8) for text in texts])
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def change(step: int) -> tuple[list[SearchDocument], list[tuple[str, int]]]:
    """The documents that a step puts, and what it deletes."""
    rng = random.Random(step)
    texts = {str(rng.randrange(60)): f"word{step} n{n}" for n in range(5)}
    puts = [
        SearchDocument(i, step, [Passage(0, text, {"e": encode([text])[0]})], digest=text)
        for i, text in texts.items()
    ]
    gone = str(rng.randrange(60))
    return puts, [] if gone in texts else [(gone, step)]


def expected(steps: int) -> dict[str, str]:
    """id -> text after so many steps."""
    found: dict[str, str] = {}
    for step in range(steps):
        puts, deletes = change(step)
        found.update({put.id: put.digest for put in puts})
        for id_, _ in deletes:
            found.pop(id_, None)
    return found


def test_kill_leaves_the_state_of_the_position(tmp_path: Path) -> None:
    folder, rng, before = tmp_path / "index", random.Random(0), 0
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(0.2 + 0.3 * rng.random())
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        reader = open_index(folder, encode=encode, encoder="e")
        steps = reader.position().get("t/0", 0)
        right = expected(steps)
        assert {id_: digest for id_, _, digest in reader.documents()} == right
        for id_, text in list(right.items())[:20]:
            assert reader.search(SearchQuery(text, 1, "vectors")).hits[0].id == id_
            assert reader.search(SearchQuery(f'"{text}"', 1, "text")).hits[0].id == id_
        before = max(before, steps)
    assert before > 2
    index = open_index(folder, writable=True, encode=encode, encoder="e")
    index.write(*change(steps), {"t/0": steps + 1})
    named = {index._manifest["vectors"]["e"]["name"]}  # type: ignore[attr-defined]
    assert {path.stem for path in folder.glob("vectors-*")} == named
    index.close()
