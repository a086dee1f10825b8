"""Checkpoints of a 1 GB state: the stall of a step, and the speed of a restore.

    python bench/train/checkpoint_stall.py [--folder ON_THE_DISK]
    python bench/train/checkpoint_stall.py --quick      # 128 MB, two rounds

There are three claims. A step stalls for at most 1.3 times one `memmove` of the state between two touched buffers. It
stalls for at most a fifth of `torch.save`'s time. A restore (read, check every hash, copy into the live tensors) from a
disk with a cold page cache reaches 70 % of the speed of a plain reader. The plain reader is the fastest of three: in
order; many requests at once; the same with O_DIRECT.

All contenders run in every round; figures are medians.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse, sized
from torch import Tensor

from whorl.train.checkpoint import writer
from whorl.train.checkpoint.format import load, restore
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.checkpoint.staging import StagingBuffer, read_pool


def a_state(n_bytes: int) -> dict[str, Tensor]:
    """Weights and two moments of matrices and gains, like those of a model with 24 layers."""
    width = int((n_bytes / (24 * 12 * 3 * 4)) ** 0.5)
    shapes = {}
    for layer in range(24):
        for name, shape in {
            "attention/in": (3 * width, width), "attention/out": (width, width), "mlp/in": (4 * width, width),
            "mlp/out": (width, 4 * width), "gain": (width,),
        }.items():  # fmt: skip
            shapes[f"{layer}/{name}"] = shape
    tensors = {}
    for kind in ("weights/{}", "state/{}/mean", "state/{}/square"):
        tensors |= {kind.format(name): torch.rand(shape) for name, shape in shapes.items()}
    return tensors


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def drop_from_cache(path: Path) -> None:
    """Drop a file from the page cache."""
    for each in path.rglob("*") if path.is_dir() else [path]:
        file = os.open(each, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_plainly(path: Path, area: StagingBuffer, *, at_once: bool, direct: bool = False) -> None:
    """Read a file in chunks, in order or many at once, into touched memory."""
    size, chunk = path.stat().st_size, writer.CHUNK
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    starts = range(0, size, chunk)
    if at_once:
        with read_pool() as pool:
            list(pool.map(lambda at: os.preadv(file, [area.view(at, chunk)], at), starts))
    else:
        for at in starts:
            os.preadv(file, [area.view(0, chunk)], at)
    os.close(file)


def copies(state: dict[str, Tensor], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds that a step stalls, for each way to save."""
    n_bytes = sum(t.numel() * t.element_size() for t in state.values())
    source, target = torch.ones(n_bytes, dtype=torch.uint8), torch.zeros(n_bytes, dtype=torch.uint8)
    keeper = CheckpointManager(folder / "ours", {}, seconds=0.0)
    keeper.prepare(state)
    taken: dict[str, list[float]] = {}

    def torch_save() -> None:
        with (folder / "torch.pt").open("wb") as file:
            torch.save(state, file)

    ways: dict[str, Callable[[], object]] = {
        "one memmove": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), n_bytes),
        "ours": lambda: keeper.save(len(taken.get("ours", [])) + 1, state),
        "torch.save": torch_save,
    }
    for turn in range(rounds + 1):
        for name, way in ways.items():
            took = seconds(way)
            if name == "ours":
                keeper.finish()
            if turn:
                taken.setdefault(name, []).append(took)
    keeper.close()
    return taken


def reads(state: dict[str, Tensor], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds from a cold file to live tensors for each way to load, and plain reads of the same file."""
    path = folder / "ours" / sorted(p.name for p in (folder / "ours").glob("step-*"))[-1]
    file = path / "state.safetensors"
    area = StagingBuffer()
    area.ensure_capacity(file.stat().st_size + writer.CHUNK)

    def ours() -> None:
        found = load(path, area)
        restore(state, {n: t for n, t in found.tensors.items() if n in state})

    def torch_load() -> None:
        found = torch.load(folder / "torch.pt")
        for name, t in state.items():
            t.copy_(found[name])

    ways: dict[str, tuple[Path, Callable[[], object]]] = {
        "disk, in order": (file, lambda: read_plainly(file, area, at_once=False)),
        "disk, many at once": (file, lambda: read_plainly(file, area, at_once=True)),
        "disk, many at once, direct": (file, lambda: read_plainly(file, area, at_once=True, direct=True)),
        "ours": (path, ours),
        "torch.load (checks nothing)": (folder / "torch.pt", torch_load),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (what, way) in ways.items():
            drop_from_cache(what)
            took = seconds(way)
            if turn:
                taken[name].append(took)
    drop_from_cache(path)
    restored = load(path, area).tensors
    assert all(torch.equal(restored[name], t) for name, t in state.items())
    area.close()
    return taken


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quick", action="store_true")
        parser.add_argument(
            "--folder", type=Path, help="on the disk to measure; default: the folder for temporary files"
        )

    a = parse(__doc__, arguments, smoke={"quick": True})
    n_bytes, rounds = sized((128 << 20, 2), (8 << 20, 1)) if a.quick else (1 << 30, 7)
    state = a_state(n_bytes)
    n_bytes = sum(t.numel() * t.element_size() for t in state.values())
    folder = Path(tempfile.mkdtemp(dir=a.folder))
    try:
        taken = copies(state, rounds, folder)
        cold = reads(state, rounds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    waits = {name: round(median(each), 4) for name, each in taken.items()}
    speeds = {name: round(n_bytes / median(each) / 1e9, 3) for name, each in cold.items()}
    samples = [{"bytes": n_bytes, "tensors": len(state)}, {"seconds": waits}, {"GB/s, cold": speeds}]
    for sample in samples:
        print(sample, flush=True)
    size = f"{n_bytes / 1e9:.2f} GB state"
    ratio = waits["ours"] / waits["one memmove"]
    claim(f"{size}: checkpoint stall of a step", ours=waits["ours"], peer=waits["one memmove"], unit="s",
          peer_name="one memcpy", variant="memcpy",
          ratio=ratio, bar=1.3, ok=ratio <= 1.3, samples=samples, quick=a.quick)  # fmt: skip
    ratio = waits["torch.save"] / waits["ours"]
    claim(f"{size}: checkpoint stall of a step", ours=waits["ours"], peer=waits["torch.save"],
          peer_name="torch.save, not flushed", variant="save",
          unit="s", ratio=ratio, bar=5.0, ok=ratio >= 5.0, quick=a.quick)  # fmt: skip
    disk = max(speed for name, speed in speeds.items() if name.startswith("disk"))
    ratio = speeds["ours"] / disk
    claim(f"{size}: restore with hashes checked", ours=speeds["ours"], peer=disk, unit="GB/s",
          peer_name="plain read of the file", variant="restore",
          ratio=ratio, bar=0.7, ok=ratio >= 0.7, quick=a.quick)  # fmt: skip


if __name__ == "__main__":
    main()
