"""kill -9 at random moments over ingest and curate, and a resume with another number of workers: identical bytes.

    python bench/corpus/resume.py [--kills 20] [--engine local] [--quick] [--save]

A recipe of the steps `ingest` and `curate` runs in a process group that is killed at a random moment of the time that an
undisturbed run takes. It runs again on the same store with another number of workers (1, 2, 3). Every file of both
artifacts, manifests included but for times, must have the bytes of the undisturbed run. Blocks have 100 kB, so that there
are many units of work. The figure is how many of the moments gave identical bytes.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

WORDS = ["".join(random.Random(i).choices("abcdefghij", k=5)) for i in range(500)]
CHILD = """
import sys
from whorl.corpus import ingest
from whorl.recipes import run_recipe
from whorl.recipes.recipe import parse_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress

if __name__ == "__main__":
    sys.modules[ingest.__module__].BLOCK_BYTES = 100_000
    source, store, engine, workers = sys.argv[1:]
    text = f'''
[steps.ingest]
sources = ["{source}"]
equal_files = "all"
engine = "{engine}"
workers = {workers}

[steps.curate]
parents = ["ingest"]
filters = ["gopher_repetition"]
engine = "{engine}"
workers = {workers}
validation_bytes = 20000
test_bytes = 20000
'''
    recipe = parse_recipe(text, "resume.toml")
    print("ready", flush=True)
    run_recipe(recipe, Store(store), Progress.silent())
"""


@dataclass(frozen=True)
class Kill:
    """One moment. units: finished before it; artifacts: of the two steps; identical: the bytes after the resume."""

    seconds: float
    workers: tuple[int, int]
    units: int
    artifacts: int
    identical: bool


def write_texts(folder: Path, n: int) -> None:
    """Files of random words, of which every tenth is a near copy of its predecessor, and every 25th an equal one."""
    rng, text = random.Random(0), ""
    folder.mkdir()
    for i in range(n):
        near = " ".join([*text.split(" ")[:-3], "the", "new", "end"])
        fresh = "\n".join(" ".join(rng.choices(WORDS, k=10)) for _ in range(60))
        text = near if i % 10 == 9 else text if i % 25 == 24 else fresh
        (folder / f"{i:04d}.txt").write_text(text)


def start(data: Path, store: Path, workers: int, engine: str) -> subprocess.Popen[str]:
    """A run in a new process group, past its imports."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(data), str(store), engine, str(workers)],
        start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "the run did not start"
    return process


def contents(store: Path) -> dict[str, str]:
    """Hash of every file of both artifacts, by step and name. Manifests have times, and the hashes of the others."""
    found = {}
    for path in sorted((store / "artifacts").rglob("*")):
        if path.is_file() and not path.name.startswith("manifest"):
            name = str(path.relative_to(store / "artifacts"))
            found[name] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return found


def whole_run(data: Path, store: Path, workers: int, engine: str = "local") -> float:
    """Run to the end; seconds after the imports."""
    process = start(data, store, workers, engine)
    begin = time.perf_counter()
    assert process.wait(timeout=300) == 0, "the run failed"
    return time.perf_counter() - begin


def kill_and_resume(
    data: Path, store: Path, at: float, workers: tuple[int, int], expected: dict[str, str], engine: str = "local"
) -> Kill:  # fmt: skip
    """Kill a run `at` seconds after its imports, resume it with the second number of workers, and compare."""
    process = start(data, store, workers[0], engine)
    time.sleep(at)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    units, artifacts = (len(list((store / name).glob("[!.]*"))) for name in ("units", "artifacts"))
    whole_run(data, store, workers[1], engine)
    return Kill(round(at, 3), workers, units, artifacts, contents(store) == expected)


def trials(folder: Path, kills: int, files: int, engine: str = "local", seed: int = 0) -> list[Kill]:
    """Kill as often as this, each time a new run, at moments that are spread over a run's time."""
    data, rng, found = folder / "data", random.Random(seed), []
    write_texts(data, files)
    seconds = whole_run(data, folder / "whole", 2, engine)
    expected = contents(folder / "whole")
    assert len(expected) > 4
    for number in range(kills):
        at = seconds * (number + rng.random()) / kills
        first = rng.choice((1, 2, 3))
        second = rng.choice([n for n in (1, 2, 3) if n != first])
        found.append(kill_and_resume(data, folder / f"store{number}", at, (first, second), expected, engine))
    return found


def main() -> None:
    def add(parser: Any) -> None:
        parser.add_argument("--kills", type=int, default=20)
        parser.add_argument("--files", type=int, default=1000)
        parser.add_argument("--engine", default="local", choices=["local", "ray"])
        parser.add_argument("--quick", action="store_true", help="3 kills, 400 files")

    args = parse(__doc__, add, smoke={"kills": 2, "files": 60})
    if args.quick:
        args.kills, args.files = 3, 400
    with tempfile.TemporaryDirectory() as folder:
        found = trials(Path(folder), args.kills, args.files, args.engine)
    identical = sum(kill.identical for kill in found)
    claim(
        "kill -9 at random moments over ingest and curate, resumed with another number of workers: identical bytes",
        ours=identical, peer=len(found), peer_name="moments", unit="identical", ratio=identical / len(found),
        bar=1.0, ok=identical == len(found), samples=[vars(kill) for kill in found],
        variant="" if args.engine == "local" else args.engine, quick=args.quick
    )  # fmt: skip


if __name__ == "__main__":
    main()
