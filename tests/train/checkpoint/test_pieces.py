"""Checkpoints in pieces: every layout reads those of every other; a missing piece is named; a killed writer leaves none."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.train.checkpoint_states import load_latest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from whorl.errors import CheckpointError
from whorl.models.exchange.dcp import METADATA, read_dcp, write_dcp
from whorl.parallel.distributed import DistributedGroup, join
from whorl.parallel.ranks import run_ranks
from whorl.train.checkpoint import manager, writer
from whorl.train.checkpoint.format import load, restore
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.checkpoint.staging import local_part

LAYOUTS: dict[str, Any] = {
    "rows": ((4,), [Shard(0)]), "columns": ((4,), [Shard(1)]), "both": ((2, 2), [Shard(0), Shard(1)]),
    "copies": ((2, 2), [Replicate(), Shard(0)]), "one holds all": ((4,), [Replicate()]),
}  # fmt: skip


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {"weights/a": torch.randn(7, 6, generator=generator), "state/a/mean": torch.randn(7, 6)}
    return {"weights/b": torch.arange(5.0), **made, "state/a/mean": made["weights/a"].square()}


def laid_out(name: str, meshes: dict[tuple[int, ...], DeviceMesh]) -> dict[str, Tensor]:
    shape, placements = LAYOUTS[name]
    mesh = meshes[shape]
    return {
        n: t if t.dim() == 1 else distribute_tensor(t, mesh, placements, src_data_rank=None)
        for n, t in whole().items()
    }


def open_group() -> DistributedGroup:
    rank = join()
    return rank._open(rank.size)


def save_each(folder: Path) -> None:
    """Save in every layout, then read each in every other one."""
    group, meshes = open_group(), {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    for name in LAYOUTS:
        with CheckpointManager(folder / name, {}, seconds=0.0, thread=True) as keeper:
            keeper.join(group, {"a": 1, "b": 2})
            keeper.save(3, laid_out(name, meshes))
    group.all_gather_scalars()
    for name in LAYOUTS:
        found = load(folder / name / "step-00000003").tensors
        for other in LAYOUTS:
            target = {n: torch.zeros_like(t) for n, t in laid_out(other, meshes).items()}
            restore(target, {n: t for n, t in found.items() if n in target})
            for n, t in target.items():
                assert torch.equal(*local_part(t, whole()[n])), (name, other, n)


def die_while_writing(folder: Path) -> None:
    """Rank 1's writer is killed with half of its piece on disk."""
    group = open_group()
    with CheckpointManager(folder, {}, seconds=0.0) as keeper:
        keeper.join(group, {"a": 1})
        keeper.save(1, whole())
        keeper.finish()
        group.all_gather_scalars()
        if dist.get_rank():
            assert keeper.writer is not None and keeper.writer.process is not None
            os.kill(keeper.writer.process.pid, signal.SIGKILL)
            with pytest.raises(CheckpointError, match=r"the checkpoint writer died.*SIGKILL"):
                keeper.save(2, whole())
                keeper.finish()
            os._exit(0)
        keeper.save(2, whole())
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)


def test_layouts_read_each_other_and_a_missing_piece_is_named(tmp_path: Path) -> None:
    run_ranks(4, save_each, tmp_path, preload=(manager.__name__, "torch.distributed.tensor", "torch._dynamo"))
    for name in LAYOUTS:
        folder = tmp_path / name / "step-00000003"
        assert len(list(folder.glob("*.safetensors"))) == 4
        found = load(folder).tensors  # as one rank
        assert all(torch.equal(found[n], t) for n, t in whole().items()), name
    folder = tmp_path / "rows" / "step-00000003"
    (folder / "state-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"state-00002\.safetensors is missing"):
        load(folder)
    folder = tmp_path / "both" / "step-00000003"
    body = writer.parse_index((folder / writer.INDEX).read_text())
    body["tensors"]["weights/a"]["pieces"].pop()
    (folder / writer.INDEX).write_text(writer.dump_index(body))
    with pytest.raises(CheckpointError, match=r"weights/a has 33 of 42 elements: a piece is missing"):
        load(folder)


def test_killed_writer_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="without a result"):
        run_ranks(2, die_while_writing, tmp_path)
    found = load_latest(tmp_path)
    assert found is not None and found.step == 1


def test_a_rank_begins_the_next_save_of_a_step_while_others_write_this_one(tmp_path: Path) -> None:
    index = {"step": 1, "bytes": 4, "tensors": {}, "metadata": {}}
    for number in (1, 2):
        piece, content = writer.Piece(1, 2, "a", number), memoryview(bytearray(writer.PAGE))
        folder = writer.write_checkpoint(tmp_path, index, content, keep=1, piece=piece)
        assert (folder / "state-00001.safetensors").stat().st_size == 4
    assert len(list(tmp_path.iterdir())) == 2


def test_an_error_does_not_wait_for_the_piece_of_a_dead_rank(tmp_path: Path) -> None:
    began = time.monotonic()
    with (
        pytest.raises(ValueError, match="planted"),
        CheckpointManager(tmp_path, {}, seconds=0.0) as keeper,
    ):
        keeper.piece = writer.Piece(0, 2, "a")
        keeper.save(1, whole())
        raise ValueError("planted")
    assert time.monotonic() - began < 30


def test_dcp_out_and_in_and_refuses_code(tmp_path: Path) -> None:
    write_dcp(whole(), tmp_path / "a")
    assert all(torch.equal(t, whole()[n]) for n, t in read_dcp(tmp_path / "a").items())
    file = next((tmp_path / "a").glob("*.distcp"))
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"(?s)cannot be read.*distcp"):
        read_dcp(tmp_path / "a")
    (tmp_path / "a" / METADATA).write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(CheckpointError, match="could run any code"):
        read_dcp(tmp_path / "a")
