"""Runs one contender of `bench/engine/throughput.py` in a separate interpreter.

    PYTHON contender.py JOB         JOB: a JSON file of a `Job`; its outcome is written to JOB with the suffix .out

The interpreter of a peer need not have Whorl. Each batch of prompts runs once with few new tokens, uncounted, and then
`rounds` times.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench.engine.support.peers import PACKAGES, PEERS, Rows, Sizes

WARM_TOKENS = 4


@dataclass
class Job:
    """model: its name in `models.py`; files: of `write_files`; batches: (prompts, new tokens)."""

    side: str
    kind: str
    model: str
    files: str
    batches: list[tuple[Rows, int]]
    rounds: int
    threads: int

    @property
    def sizes(self) -> Sizes:
        """Sizes that hold every batch."""
        lengths = [max(map(len, prompts)) + max(n_new, WARM_TOKENS) for prompts, n_new in self.batches]
        rows = [len(prompts) for prompts, _ in self.batches]
        tokens = max(n * length for n, length in zip(rows, lengths, strict=True))
        return Sizes(max(rows), max(lengths), tokens)


@dataclass
class Outcome:
    """Of each batch: the seconds of its rounds and the ids of the last."""

    version: str
    seconds: list[list[float]]
    ids: list[Rows]


def run(job: Job) -> Outcome:
    """Open the contender and run all batches."""
    contender: Any
    if job.side == "ours":
        from bench.engine.support.ours import Ours

        contender = Ours(job.model, job.kind, job.sizes, job.threads)
    else:
        weights = job.kind.removesuffix("-kv8")
        contender = PEERS[job.side](Path(job.files), weights, job.sizes, job.threads)
    found = Outcome(_version(job.side), [], [])
    for prompts, n_new in job.batches:
        contender.run(prompts, min(n_new, WARM_TOKENS))
        seconds, rows = [], Rows()
        for _ in range(job.rounds):
            began = time.perf_counter()
            rows = contender.run(prompts, n_new)
            seconds.append(time.perf_counter() - began)
        if [len(row) for row in rows] != [n_new] * len(prompts):
            raise RuntimeError(
                f"{job.side} {job.kind} returned {[len(row) for row in rows]} ids, not {n_new} a row"
            )
        found.seconds.append(seconds)
        found.ids.append(rows)
    return found


def _version(side: str) -> str:
    for name in PACKAGES.get(side, ()):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return ""


def main() -> None:
    file = Path(sys.argv[1])
    outcome = run(Job(**json.loads(file.read_text())))
    file.with_suffix(".out").write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
