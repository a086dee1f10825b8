"""Checkpoints of a 1 GB state: the stall of a step, the speed of a restore, and the cost of the writer to training.

    python bench/train/checkpoint_stall.py [--folder ON_THE_DISK]
    python bench/train/checkpoint_stall.py --quick      # 128 MB, two rounds, without the cost of the writers

There are three claims. A step stalls for at most 1.3 times one `memmove` of the state between two touched buffers. It
stalls for at most a fifth of `torch.save`'s time. A restore (read, check every hash, copy into the live tensors) from a
disk with a cold page cache reaches 70 % of the speed of a plain reader. The plain reader is the fastest of three: in
order; many requests at once; the same with O_DIRECT.

All contenders run in every round; figures are medians. The samples also hold other peers (safetensors, torch's
asynchronous distributed checkpoint), other ways to copy, and hashes. For each kind of writer they hold the seconds
until a checkpoint is complete, its CPU seconds, and the seconds that training-like work (matrix products on every core)
lost meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse, sized, smoke
from safetensors.torch import load_file, save_file
from torch import Tensor

from whorl.machine.device_probe import usable_cores
from whorl.train.checkpoint import writer
from whorl.train.checkpoint.format import build_index, load, restore
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.checkpoint.staging import Layout, StagingBuffer, copy_pool, copy_to_staging, read_pool
from whorl.train.checkpoint.writer_process import AsyncWriter
from whorl.train.config import CheckpointConfig


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
    clones = {n: t.clone() for n, t in state.items()}
    keeper = CheckpointManager(folder / "ours", {}, seconds=0.0)
    keeper.prepare(state)
    taken: dict[str, list[float]] = {}

    def unprepared() -> None:
        area = StagingBuffer()
        with copy_pool() as pool:
            copy_to_staging(area, Layout.from_tensors(state), state, pool)
        area.close()

    def tensor_by_tensor() -> None:
        for name, t in state.items():
            clones[name].copy_(t)

    def torch_save(sync: bool) -> None:
        with (folder / "torch.pt").open("wb") as file:
            torch.save(state, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    ways: dict[str, Callable[[], object]] = {
        "one memmove": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), n_bytes),
        "ours": lambda: keeper.save(len(taken.get("ours", [])) + 1, state),
        "Tensor.copy_, tensor by tensor": tensor_by_tensor,
        "ours, area not prepared": unprepared,
        "torch.save": lambda: torch_save(False),
        "torch.save and fsync": lambda: torch_save(True),
        "safetensors save_file": lambda: save_file(state, folder / "peer.safetensors"),
    }
    dcp = distributed(state, folder)
    if dcp is not None:
        ways["torch.distributed.checkpoint.async_save"] = dcp
    for turn in range(rounds + 1):
        for name, way in ways.items():
            took = seconds(way)
            if name == "ours":
                keeper.finish()
            if turn:
                taken.setdefault(name, []).append(took)
        wait_for_distributed()
    taken["ours, until it is complete"] = [keeper.stats.write_seconds / keeper.stats.written]
    keeper.close()
    return taken


FUTURES: list[Any] = []


def distributed(state: dict[str, Tensor], folder: Path) -> Callable[[], object] | None:
    try:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    except Exception as error:
        print(f"no torch.distributed available: {error}")
        return None

    def save() -> None:
        FUTURES.append(dcp.async_save(dict(state), checkpoint_id=str(folder / "dcp")))

    return save


def wait_for_distributed() -> None:
    while FUTURES:
        FUTURES.pop().result()


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

    def safetensors_load() -> None:
        found = load_file(folder / "peer.safetensors")
        for name, t in state.items():
            t.copy_(found[name])

    ways: dict[str, tuple[Path, Callable[[], object]]] = {
        "disk, in order": (file, lambda: read_plainly(file, area, at_once=False)),
        "disk, many at once": (file, lambda: read_plainly(file, area, at_once=True)),
        "disk, many at once, direct": (file, lambda: read_plainly(file, area, at_once=True, direct=True)),
        "ours": (path, ours),
        "torch.load (checks nothing)": (folder / "torch.pt", torch_load),
        "safetensors load_file (checks nothing)": (folder / "peer.safetensors", safetensors_load),
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


def writers(state: dict[str, Tensor], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Measure how much each kind of writer slows down matrix products on every core."""
    layout = Layout.from_tensors(state)
    area = StagingBuffer()
    with copy_pool() as pool:
        copy_to_staging(area, layout, state, pool)
    torch.set_num_threads(usable_cores())
    a, b = torch.rand(512, 512), torch.rand(512, 512)

    def busy(until: Callable[[], bool], at_least: float) -> float:
        """Products per second."""
        began, n = time.perf_counter(), 0
        while not until() or time.perf_counter() - began < at_least:
            a @ b
            n += 1
        return n / (time.perf_counter() - began)

    kinds: dict[str, dict[str, Any]] = {
        "process, nice 10": {}, "process, SCHED_IDLE": {"priority": "idle"}, "process, normal": {"priority": "normal"},
        "thread": {"thread": True},
    }  # fmt: skip
    backgrounds = {name: AsyncWriter(area, **options) for name, options in kinds.items()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    request = {"folder": str(folder / "w"), "index": build_index(1, layout, {}), "upload": False,
               "wait_for_upload": False, "job_id": "", "config": CheckpointConfig().model_dump(mode="json")}  # fmt: skip
    for turn in range(rounds + 1):
        for name, background in backgrounds.items():
            alone = busy(lambda: True, sized(1.0, 0.05))
            answer: dict[str, Any] = {}

            def done(background: AsyncWriter = background, answer: dict[str, Any] = answer) -> bool:
                answer.update(background.poll_reply() or {})
                return bool(answer)

            background.submit(request)
            concurrent = busy(done, 0.0)
            if turn:
                # lost work in seconds of the machine: the products that are missing, at the undisturbed rate
                found[name].append(
                    (answer["seconds"], answer["cpu"], (1 - concurrent / alone) * answer["seconds"])
                )
    for background in backgrounds.values():
        background.close(10.0)
    area.close()
    return [
        {"writer": name, **dict(zip(("complete_after_s", "cpu_s", "training_lost_s"),
                                    (round(median(x), 3) for x in zip(*each, strict=True)), strict=True))}
        for name, each in found.items()
    ]  # fmt: skip


def hashes(n_bytes: int) -> dict[str, str]:
    data = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8)
    view = memoryview(data.numpy())
    ways: dict[str, Callable[[memoryview], object]] = {
        "xxh3-128": writer.digest, "sha256": lambda part: hashlib.sha256(part).digest(), "crc32": zlib.crc32,
        "blake2b": lambda part: hashlib.blake2b(part).digest(),
    }  # fmt: skip
    try:
        import blake3  # type: ignore[import-not-found, unused-ignore]

        ways["blake3"] = lambda part: blake3.blake3(part).digest()
    except ImportError:
        pass
    found = {}
    for name, way in ways.items():
        took = min(
            seconds(
                lambda way=way: [way(view[o : o + writer.CHUNK]) for o in range(0, n_bytes, writer.CHUNK)]
            )
            for _ in range(3)
        )
        found[name] = f"{n_bytes / took / 1e9:.2f} GB/s, one core"
    return found


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
        writer_costs = writers(state, rounds, folder) if smoke() or not a.quick else []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    waits = {name: round(median(each), 4) for name, each in taken.items()}
    speeds = {name: round(n_bytes / median(each) / 1e9, 3) for name, each in cold.items()}
    samples = [{"bytes": n_bytes, "tensors": len(state)}, {"seconds": waits}, {"GB/s, cold": speeds}, *writer_costs,
               {"hashes": hashes(n_bytes // 4)}]  # fmt: skip
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
