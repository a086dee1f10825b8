"""States for checkpoint tests, and a process that saves a checkpoint per step until it is killed.

python -m tests.support.train.checkpoint_states FOLDER MEGABYTES [graceful]
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
from torch import Tensor

from whorl.train.checkpoint.format import save
from whorl.train.checkpoint.manager import CheckpointManager


def state(step: int = 1) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(step)
    return {
        "weights/a": torch.randn(300, 257, generator=rng),
        "weights/b": torch.randn(5, generator=rng).bfloat16(),
        "state/a/mean": torch.randn(300, 257, generator=rng).t(),  # not contiguous
        "buffers/scalar": torch.tensor(step),
        "buffers/none": torch.zeros(0, 4),
        "buffers/flags": torch.rand(7, generator=rng) < 0.5,
    }


def save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        save(folder, step, state(step), {})


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def main() -> None:
    folder, megabytes = Path(sys.argv[1]), int(sys.argv[2])
    if "graceful" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    state = {"weights/a": torch.zeros(megabytes << 18), "state/a/mean": torch.zeros(1000).double()}
    with CheckpointManager(folder, {"job": "keeping"}, seconds=0.0) as keeper:
        found = keeper.resume()
        step = 0 if found is None else found.step
        keeper.prepare(state)
        print("ready", flush=True)
        while True:
            step += 1
            for tensor in state.values():
                tensor.fill_(step)
            keeper.save(step, state)


if __name__ == "__main__":
    main()
