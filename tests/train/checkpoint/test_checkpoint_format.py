"""The checkpoint format: valid or rejected after any damage, readable as safetensors."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.train.checkpoint_states import load_latest, same, save, save_steps, state

from whorl.errors import CheckpointError, DiskFullError
from whorl.train.checkpoint import writer
from whorl.train.checkpoint.format import NewerFormatError, load, restore
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.checkpoint.staging import FileLayout, StagingBuffer


def test_save_load_round_trip_and_safetensors(tmp_path: Path) -> None:
    path = save(tmp_path, 7, state(), {"place": [1, {"x": 2.5}]})
    found = load(path)
    assert found.step == 7 and found.metadata == {"place": [1, {"x": 2.5}]} and same(found.tensors, state())
    assert same(load_file(path / "state.safetensors"), {n: t.contiguous() for n, t in state().items()})
    layout = FileLayout.from_tensors(state())
    assert all(e.offset % state()[n].element_size() == 0 for n, e in layout.entries.items())
    assert len(layout.header) % 4096 == 0 and layout.n_bytes == (path / "state.safetensors").stat().st_size


@pytest.mark.parametrize("megabytes", [0, 9, 40])
def test_load_reuses_staging_buffer_over_chunks(tmp_path: Path, megabytes: int) -> None:
    area = StagingBuffer()
    for step in (1, 2):
        tensors = {"weights/a": torch.full((megabytes * 262144 + step,), float(step)), **state(step)}
        found = load(save(tmp_path, step, tensors, {}), area)
        assert same(found.tensors, tensors)
    area.close()


@pytest.mark.parametrize("seed", range(12))
def test_bit_flip_is_detected_and_previous_loaded(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    save_steps(tmp_path, 1, 2)
    damaged = tmp_path / "step-00000002" / ("state.safetensors", "state.json")[seed % 2]
    content = bytearray(damaged.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    damaged.write_bytes(bytes(content))
    messages: list[str] = []
    try:
        found = load_latest(tmp_path, messages.append)
    except NewerFormatError:  # the flipped bit is in the format number
        return
    if found is not None and found.step == 2:  # whitespace in the JSON: no relevant change
        assert damaged.name == "state.json" and same(found.tensors, state(2))
        return
    assert found is not None and found.step == 1 and same(found.tensors, state(1))
    assert len(messages) == 1 and "rejected step-00000002" in messages[0]


@contextmanager
def edited_index(path: Path) -> Iterator[dict[str, Any]]:
    body = writer.parse_index((path / "state.json").read_text())
    yield body
    (path / "state.json").write_text(writer.dump_index(body))


def _wrong_hash(path: Path) -> None:
    with edited_index(path) as body:
        body["files"]["state.safetensors"]["hash"] = "md5"


def _wrong_shape(path: Path) -> None:
    with edited_index(path) as body:
        a, b = (body["tensors"][f"weights/{name}"] for name in "ab")
        a["pieces"][0]["shape"] = a["shape"] = [299, 257]
        b["pieces"][0]["shape"] = [10**12]


def index_is(text: str) -> Callable[[Path], Any]:
    return lambda path: (path / "state.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "state.safetensors").unlink(), "state.safetensors is missing"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (index_is(""), "not an index"),
        (index_is("[1, 2]"), "step-00000002"),
        (index_is('{"body": {"format": 2, "step": 2}}'), "checkpoint format 2"),
        (lambda path: os.truncate(path / "state.safetensors", 5000), "has 5,000 bytes"),
        (_wrong_hash, "hash type 'md5'"),
        (_wrong_shape, "step-00000002"),
    ],
)
def test_load_latest_rejects_damaged_with_reason(tmp_path: Path, damage: Any, words: str) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    messages: list[str] = []
    found = load_latest(tmp_path, messages.append)
    assert found is not None and found.step == 1
    assert len(messages) == 1 and words in messages[0], messages


def test_newer_format_raises(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    index_is('{"body": {"format": 5, "step": 2}}')(tmp_path / "step-00000002")
    words = r"checkpoint format 5(.|\n)*use the version that wrote it"
    for read in (lambda: load_latest(tmp_path), CheckpointManager(tmp_path, {}).resume):
        with pytest.raises(NewerFormatError, match=words):
            read()


def test_restore_converts_dtypes_and_rejects_mismatch() -> None:
    have = {"a": torch.randn(4, 4), "n": torch.tensor([3])}
    target = {"a": torch.zeros(4, 4, dtype=torch.bfloat16), "n": torch.tensor([0])}
    restore(target, have)
    assert torch.equal(target["a"], have["a"].bfloat16()) and int(target["n"]) == 3
    before = target["a"].clone()
    for wrong, words in (
        ({"a": torch.zeros(4, 4)}, "'n' is missing"),
        ({**have, "n": torch.tensor([1, 2])}, r"'n' is \(2,\)"),
        ({**have, "n": torch.tensor([1.5])}, "'n' has dtype torch.float32"),
        ({**have, "more": torch.zeros(1)}, "no such tensor"),
    ):
        with pytest.raises(CheckpointError, match=words):
            restore(target, {**wrong, "a": torch.ones(4, 4)})
    assert torch.equal(target["a"], before)  # all or nothing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_save_from_gpu_and_restore(tmp_path: Path) -> None:
    tensors = {"weights/a": torch.randn(1000, 1000, device="cuda")}
    with CheckpointManager(tmp_path, {}, seconds=0.0) as manager:
        manager.save(1, tensors)
        kept = tensors["weights/a"].cpu()
        tensors["weights/a"].zero_()
    restore(tensors, {n: t for n, t in load(tmp_path / "step-00000001").tensors.items() if n in tensors})
    assert torch.equal(tensors["weights/a"].cpu(), kept)


class FakeCudaRuntime:
    """Host memory as CUDA pins it: an address stays pinned until it is given up, also if its mapping is freed."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        already = address in self.pinned
        self.pinned.add(address)
        return 712 if already else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


def test_staging_buffer_gives_up_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, waits = FakeCudaRuntime(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    area = StagingBuffer()
    for size in (1, 1 << 20):  # it grows, and the first mapping is given up
        area.ensure_capacity(size)
        area.pin()
        area.pin()
        assert runtime.pinned == {area.flat.data_ptr()} and area.pinned
    other = StagingBuffer()
    other.ensure_capacity(1)
    runtime.pinned.add(other.flat.data_ptr())
    other.pin()  # refused: it is used as it is, and the error is taken from CUDA
    assert not other.pinned and waits == [1]
    area.close()
    other.close()
    assert len(runtime.pinned) == 1


@pytest.mark.parametrize("refused", ["open", "write"])
def test_save_without_o_direct_writes_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    expected = (save(tmp_path / "a", 1, state(), {}) / "state.safetensors").read_bytes()
    opened, written, refusals = os.open, os.write, []

    def refuse(call: str, flags: int) -> None:
        if flags & os.O_DIRECT and refused == call:
            refusals.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")

    def open_(path: Any, flags: int, mode: int = 0o777) -> int:
        refuse("open", flags)
        return opened(path, flags, mode)

    def write(file: int, data: Any) -> int:
        refuse("write", fcntl.fcntl(file, fcntl.F_GETFL))
        return written(file, data[:100_001])  # and short writes

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "write", write)
    assert (save(tmp_path / "b", 1, state(), {}) / "state.safetensors").read_bytes() == expected
    assert refusals


@pytest.mark.parametrize("call", ["posix_fallocate", "write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_disk_full_keeps_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    save(tmp_path, 1, state(), {})

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched, pytest.raises(DiskFullError, match="no space left"):
        patched.setattr(os, call, full)
        save(tmp_path, 2, state(2), {})
    found = load_latest(tmp_path)
    assert found is not None and found.step == 1 and not list(tmp_path.glob("writing-*"))


def test_prune_by_count_and_age(tmp_path: Path) -> None:
    def kept() -> list[str]:
        return sorted(p.name[-1] for p in tmp_path.iterdir())

    for step in range(1, 6):
        save(tmp_path, step, state(), {}, keep=3)
    assert kept() == ["3", "4", "5"]
    for step in (4, 5):
        os.utime(tmp_path / f"step-0000000{step}", (0, 0))
    writer.prune(tmp_path, 3, 3600.0)
    assert kept() == ["3", "5"]  # the newest stays at any age
    writer.prune(tmp_path, 1, None, in_use=("step-00000003",))
    assert kept() == ["3", "5"]
