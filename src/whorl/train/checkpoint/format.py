"""Checkpoints: everything a run needs to continue as if it had never stopped. The format, and reading it.

One folder a checkpoint, `step-00001200/`:

    state.safetensors   weights, buffers, moments, averages, generators: tensors by name, in the ordinary format
    state.json          the index: the step, each file's size and the hash of each of its chunks, where each tensor lies,
                        and the record (schedule and data position, counts, metrics); sealed with its own hash

It is written beside its final name, flushed to the disk, then renamed (`writer.py`): a folder that carries a final name is
whole, whatever was killed when. Reading checks all of it *before* any of it is used, takes the newest that is whole and
says why it passed over others.

*Why an index beside a format that has a header.* A tensor of the index is a list of pieces,

    "weights/head": {"dtype": "F32", "shape": [8192, 384], "pieces": [
        {"file": "state.safetensors", "start": [0, 0], "shape": [8192, 384], "offset": 4096}]}

today one piece and one file. When tensors are sharded, each rank writes a file of its own with the pieces that it holds
(`state-00002-of-00008.safetensors`, its own hashes), one of them writes the index of all, last, and a reader on any other
number of ranks asks for the pieces that overlap its own. `load` assembles tensors from any number of pieces and files
already, so neither the format nor a reader of it needs to change. Names say nothing of ranks: a state is read on any number
of replicas, on any device and in any type (`restore` converts). A *job* continues only where all that decides its bits
is the same (`job.identity`).

*Versions.* `format` counts up when a reader of before would misread. An older program refuses a newer checkpoint and does
not pass over it: going on from an older one beside it would throw work away.

Speed: each chunk is read past the page cache, and hashed at once, by several threads, into memory that is touched before:
the staging area (`staging.py`), which the first save needs anyway.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.errors import CheckpointError
from whorl.train.checkpoint import writer
from whorl.train.checkpoint.staging import (
    DTYPES_BY_NAME,
    PAGE,
    Entry,
    Layout,
    StagingBuffer,
    copy_all,
    copy_pool,
    copy_to_staging,
    read_pool,
)
from whorl.train.checkpoint.writer import FORMAT, HASH, INDEX, TENSORS

DEFAULT_KEEP = 2
FLOAT_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


class NewerFormatError(CheckpointError):
    """Written by a newer version: going on from an older one beside it would lose what it holds."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and what else the run needs (JSON). The tensors may share a `Keeper`'s staging area: they are
    good until its next save."""

    step: int
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def build_index(step: int, layout: Layout, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What `writer.write` is to be told beside the bytes."""
    tensors = {}
    for name, entry in layout.entries.items():
        shape = list(entry.shape)
        whole = {"file": TENSORS, "start": [0] * len(shape), "shape": shape, "offset": entry.offset}
        tensors[name] = {"dtype": entry.dtype, "shape": shape, "pieces": [whole]}
    return {"step": step, "bytes": layout.n_bytes, "tensors": tensors, "metadata": dict(metadata)}


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    *,
    keep: int = DEFAULT_KEEP,
) -> Path:
    """Writes the checkpoint of `step` before it returns, and removes all but the newest `keep`.

    Raises:
        DiskFullError: no space; older checkpoints are untouched.
    """
    area, layout = StagingBuffer(), Layout.from_tensors(tensors)
    try:
        with copy_pool() as threads:
            copy_to_staging(area, layout, tensors, threads)
        view = area.view(0, area.size)
        return writer.write_checkpoint(folder, build_index(step, layout, metadata), view, keep=keep)
    finally:
        area.close()


def load_latest(
    folder: Path, log: Callable[[str], None] = lambda _: None, staging: StagingBuffer | None = None
) -> Checkpoint | None:
    """The newest whole checkpoint of `folder`, or None. `say` is told of each that was passed over and why.

    Raises:
        NewerFormatError: there is one of a newer format.
    """
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            return load(path, staging)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            log(f"passed over {path.name}: {error}")
    return None


def read_index(path: Path) -> dict[str, Any]:
    """The index of the checkpoint at `path`.

    Raises:
        CheckpointError: missing, damaged, or of another format. NewerFormatError: of a newer one.
    """
    try:
        body = writer.parse_index((path / INDEX).read_text())
        if body["format"] != FORMAT:
            newer = int(body["format"]) > FORMAT
            raise (NewerFormatError if newer else CheckpointError)(
                f"{path}: checkpoint format {body['format']}",
                expected=f"{FORMAT}, the one this version reads",
                do="use the version that wrote it" if newer else "remove it: nothing is converted",
            )
        return body
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX}: {_error_text(error)}") from error


def load(path: Path, staging: StagingBuffer | None = None) -> Checkpoint:
    """The checkpoint at `path`, checked.

    Args:
        area: memory to read it into; without one, its own.

    Raises:
        CheckpointError: missing or unreadable files, a hash that differs, or another format.
    """
    body = read_index(path)
    staging = staging or StagingBuffer()
    try:
        files: dict[str, Any] = body["files"]
        sizes = {name: int(file["bytes"]) for name, file in files.items()}
        starts, end = {}, 0
        for name, size in sizes.items():
            have = (path / name).stat().st_size
            if have != size:
                raise CheckpointError(f"{path / name} has {have:,} bytes", expected=f"{size:,}")
            starts[name], end = end, end + -(-size // PAGE) * PAGE
        staging.ensure_capacity(end)
        with read_pool() as threads:
            for name, start in starts.items():
                _read(
                    path / name,
                    files[name],
                    sizes[name],
                    staging.view(start, -(-sizes[name] // PAGE) * PAGE),
                    threads,
                )
        tensors = {name: _assemble(t, staging, starts) for name, t in body["tensors"].items()}
        return Checkpoint(int(body["step"]), tensors, body["metadata"])
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {_error_text(error)}") from error


def _read(path: Path, file_entry: Mapping[str, Any], size: int, into: memoryview, pool: Executor) -> None:
    """The file at `path`, checked while it is read. `into`: whole pages, which a read past the page cache wants."""
    if file_entry["hash"] != HASH:
        raise CheckpointError(f"{path} is hashed with {file_entry['hash']!r}", expected=HASH)
    chunk = int(file_entry["chunk"])
    if len(file_entry["chunks"]) != -(-size // chunk):
        raise CheckpointError(f"{path} has {len(file_entry['chunks'])} hashes for {size:,} bytes")
    file = os.open(path, os.O_RDONLY)
    direct = file
    if hasattr(os, "O_DIRECT") and chunk % PAGE == 0:
        with suppress(OSError):
            direct = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def one(number: int) -> bool:
        start, end = number * chunk, min(size, (number + 1) * chunk)
        at = start
        while at < end:
            try:
                n = os.preadv(direct if at == start else file, [into[at : start + chunk]], at)
            except OSError as error:
                if error.errno != errno.EINVAL or direct == file:
                    raise
                n = os.preadv(file, [into[at:end]], at)  # not past the cache on this file system
            if not n:
                return False
            at += n
        return writer.digest(into[start:end]) == str(file_entry["chunks"][number])

    try:
        for number, whole in enumerate(pool.map(one, range(len(file_entry["chunks"])))):
            if not whole:
                raise CheckpointError(
                    f"{path}: its content differs from its recorded hash, between the bytes {number * chunk:,} and "
                    f"{min(size, (number + 1) * chunk):,}"
                )
    finally:
        for each in {file, direct}:
            os.close(each)


def _assemble(tensor_entry: Mapping[str, Any], staging: StagingBuffer, starts: Mapping[str, int]) -> Tensor:
    """A tensor from its pieces; one piece that is all of it stays where it was read."""
    shape, dtype = tuple(tensor_entry["shape"]), str(tensor_entry["dtype"])
    whole: Tensor | None = None
    for piece in tensor_entry["pieces"]:
        part = tuple(piece["shape"])
        size = DTYPES_BY_NAME[dtype].itemsize
        for n in part:
            size *= n
        found = staging.tensor(Entry(dtype, part, int(piece["offset"]), size), starts[piece["file"]])
        if part == shape:
            return found
        whole = torch.empty(shape, dtype=DTYPES_BY_NAME[dtype]) if whole is None else whole
        whole[tuple(slice(s, s + n) for s, n in zip(piece["start"], part, strict=True))] = found
    if whole is None:
        raise ValueError(f"a tensor of shape {shape} has no pieces")
    return whole


def restore(target: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into `target` in place, by name, in the target's type and on its device. All or nothing.

    Raises:
        CheckpointError: a name is missing or unknown, a shape differs, or numbers would become whole ones (or the reverse).
    """
    for name in sorted(target.keys() | tensors.keys()):
        want, have = target.get(name), tensors.get(name)
        if want is None or have is None or want.shape != have.shape:
            raise CheckpointError(
                f"checkpoint tensor {name!r} is {'missing' if have is None else tuple(have.shape)}",
                expected=f"{'no such tensor' if want is None else tuple(want.shape)}",
                do="the checkpoint is of another model: remove it to start again",
            )
        if want.dtype != have.dtype and not (want.dtype in FLOAT_DTYPES and have.dtype in FLOAT_DTYPES):
            raise CheckpointError(
                f"checkpoint tensor {name!r} is of type {have.dtype}", expected=str(want.dtype)
            )
    with copy_pool() as threads:
        copy_all([(target[name], tensors[name]) for name in target], threads)


def _error_text(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name if error.filename else 'a file'} is missing"
    if isinstance(error, json.JSONDecodeError):
        return f"not an index ({error})"
    return f"{type(error).__name__}: {error}"
