"""States for checkpoint tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.errors import CheckpointError
from whorl.train.checkpoint import writer
from whorl.train.checkpoint.format import Checkpoint, NewerFormatError, build_index, load
from whorl.train.checkpoint.staging import FileLayout, StagingBuffer, copy_pool, copy_to_staging


def save(
    folder: Path, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint without a writer process."""
    buffer, layout = StagingBuffer(), FileLayout.from_tensors(tensors)
    try:
        with copy_pool() as threads:
            copy_to_staging(buffer, layout, tensors, threads)
        view = buffer.view(0, buffer.size)
        return writer.write_checkpoint(folder, build_index(step, layout, metadata), view, keep=keep)
    finally:
        buffer.close()


def load_latest(folder: Path, log: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
    """Return the newest valid checkpoint of `folder`, or None. `log` receives the reason for each rejected one."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            return load(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            log(f"rejected {path.name}: {error}")
    return None


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
