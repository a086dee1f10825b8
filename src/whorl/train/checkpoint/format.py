"""Checkpoint format and reading. A checkpoint holds everything that a run needs to resume exactly.

One folder per checkpoint, `step-00001200/`:

    state.safetensors   weights, buffers, moments, averages, RNG states: tensors by name, in safetensors format
    state.json          the index: step, size and chunk hashes of each file, location of each tensor, and the metadata
                        (data position, counts, metrics); it has its own hash

The folder is written under a temporary name, flushed, then renamed (`writer.py`), so a folder with a final name is
complete. Reading verifies everything *before* use, takes the newest valid checkpoint and logs the reason for each
rejected one.

The index lists each tensor with its place:

    "weights/head": {"dtype": "F32", "shape": [8192, 384], "pieces": [
        {"file": "state.safetensors", "start": [0, 0], "shape": [8192, 384], "offset": 4096}]}

A rank of a world writes one file, `state-RANK.safetensors`, with the tensors that it keeps, or its parts of them.
Names of tensors contain no ranks, so any number of replicas, layout, device and dtype can read a state. A *job* resumes only
if its identity is equal (`job.identity`).

`format` increases when an older reader would misread. A newer format raises: resuming from an older checkpoint instead
would lose work. An older format is rejected with a message. Several threads read chunks with O_DIRECT into the staging
buffer (`staging.py`) and hash them at once.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
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
    FileLayout,
    StagingBuffer,
    copy_all,
    copy_pool,
    local_part,
    read_pool,
)
from whorl.train.checkpoint.writer import FORMAT, HASH, INDEX, PIECES_FORMAT, TENSORS


class NewerFormatError(CheckpointError):
    """Written by a newer version. Resuming from an older checkpoint instead would lose its steps."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and the metadata (JSON).

    The tensors may share the staging buffer of a `CheckpointManager`; they are valid until its next save.
    """

    step: int
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def build_index(
    step: int,
    layout: FileLayout,
    metadata: Mapping[str, Any],
    file: str = TENSORS,
    parts: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None,
) -> dict[str, Any]:
    """Return the index of a new checkpoint, for `writer.write_checkpoint`.

    file: with the tensors. parts: whole shape and first position of the tensors of which this file has a part.
    """
    tensors = {}
    for name, entry in layout.entries.items():
        shape = list(entry.shape)
        whole, start = (parts or {}).get(name, (shape, [0] * len(shape)))
        piece = {"file": file, "start": list(start), "shape": shape, "offset": entry.offset}
        tensors[name] = {"dtype": entry.dtype, "shape": list(whole), "pieces": [piece]}
    return {"step": step, "bytes": layout.n_bytes, "tensors": tensors, "metadata": dict(metadata)}


def read_index(path: Path) -> dict[str, Any]:
    """Return the index of the checkpoint at `path`.

    Raises:
        CheckpointError: missing, damaged, or of another format.
        NewerFormatError: of a newer format.
    """
    try:
        body = writer.parse_index((path / INDEX).read_text())
        if body["format"] not in (FORMAT, PIECES_FORMAT):
            newer = int(body["format"]) > PIECES_FORMAT
            raise (NewerFormatError if newer else CheckpointError)(
                f"{path}: checkpoint format {body['format']}",
                expected=f"{FORMAT} or {PIECES_FORMAT}, the formats of this version",
                do="use the version that wrote it" if newer else "remove it: older formats are not converted",
            )
        return body
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX}: {_error_text(error)}") from error


def load(path: Path, staging: StagingBuffer | None = None) -> Checkpoint:
    """Return the verified checkpoint at `path`.

    Args:
        staging: buffer to read into; by default a new one.

    Raises:
        CheckpointError: missing or unreadable files, a hash mismatch, or another format.
    """
    body = read_index(path)
    staging = staging or StagingBuffer()
    try:
        starts, end = {}, 0
        for name, file in body["files"].items():
            size, have = int(file["bytes"]), (path / name).stat().st_size
            if have != size:
                raise CheckpointError(f"{path / name} has {have:,} bytes", expected=f"{size:,}")
            starts[name], end = end, end + -(-size // PAGE) * PAGE
        staging.ensure_capacity(end)
        with read_pool() as threads:
            for name, file in body["files"].items():
                size = int(file["bytes"])
                into = staging.view(starts[name], -(-size // PAGE) * PAGE)
                _read(path / name, file, size, into, threads)
        tensors = {name: _tensor(name, entry, starts, staging) for name, entry in body["tensors"].items()}
        return Checkpoint(int(body["step"]), tensors, body["metadata"])
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {_error_text(error)}") from error


def _read(path: Path, file_entry: Mapping[str, Any], size: int, into: memoryview, pool: Executor) -> None:
    """Read and verify a file. `into` must consist of whole pages, for O_DIRECT."""
    if file_entry["hash"] != HASH:
        raise CheckpointError(f"{path} has the hash type {file_entry['hash']!r}", expected=HASH)
    chunk = int(file_entry["chunk"])
    if len(file_entry["chunks"]) != -(-size // chunk):
        raise CheckpointError(f"{path} has {len(file_entry['chunks'])} hashes for {size:,} bytes")
    file = os.open(path, os.O_RDONLY)
    direct = file
    if hasattr(os, "O_DIRECT") and chunk % PAGE == 0:
        with suppress(OSError):
            direct = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read_chunk(number: int) -> bool:
        start, end = number * chunk, min(size, (number + 1) * chunk)
        at = start
        while at < end:
            try:
                n = os.preadv(direct if at == start else file, [into[at : start + chunk]], at)
            except OSError as error:
                if error.errno != errno.EINVAL or direct == file:
                    raise
                n = os.preadv(file, [into[at:end]], at)  # this file system rejects O_DIRECT reads
            if not n:
                return False
            at += n
        return writer.digest(into[start:end]) == str(file_entry["chunks"][number])

    try:
        for number, whole in enumerate(pool.map(read_chunk, range(len(file_entry["chunks"])))):
            if not whole:
                raise CheckpointError(
                    f"{path}: the content differs from the recorded hash, between the bytes {number * chunk:,} and "
                    f"{min(size, (number + 1) * chunk):,}"
                )
    finally:
        for each in {file, direct}:
            os.close(each)


def _tensor(name: str, entry: Mapping[str, Any], starts: Mapping[str, int], staging: StagingBuffer) -> Tensor:
    """Return a tensor of the index: a view of the buffer, or a new tensor if it has several pieces."""
    dtype, whole = DTYPES_BY_NAME[str(entry["dtype"])], tuple(entry["shape"])
    views = []
    for piece in entry["pieces"]:
        shape, offset = tuple(piece["shape"]), starts[piece["file"]] + int(piece["offset"])
        views.append(staging.tensor(Entry(entry["dtype"], shape, offset, dtype.itemsize * math.prod(shape))))
    found, whole_size = sum(v.numel() for v in views), math.prod(whole)
    if found != whole_size:
        where = ", ".join(f"{p['file']} from {p['start']}" for p in entry["pieces"])
        raise CheckpointError(
            f"{name} has {found:,} of {whole_size:,} elements: a piece is missing; there is {where}"
        )
    if len(views) == 1:
        return views[0]
    tensor = torch.empty(whole, dtype=dtype)
    for piece, view in zip(entry["pieces"], views, strict=True):
        begins = zip(piece["start"], piece["shape"], strict=True)
        tensor[tuple(slice(begin, begin + n) for begin, n in begins)] = view
    return tensor


def restore(target: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into `target` in place, by name, converting dtype and device. All or nothing.

    Raises:
        CheckpointError: a name is missing or unknown, a shape differs, or one dtype is a float and the other is not.
    """
    for name in sorted(target.keys() | tensors.keys()):
        want, have = target.get(name), tensors.get(name)
        if want is None or have is None or want.shape != have.shape:
            raise CheckpointError(
                f"checkpoint tensor {name!r} is {'missing' if have is None else tuple(have.shape)}",
                expected=f"{'no such tensor' if want is None else tuple(want.shape)}",
                do="the checkpoint is of another model: remove it to start from step 0",
            )
        if want.dtype != have.dtype and not (want.dtype.is_floating_point and have.dtype.is_floating_point):
            raise CheckpointError(
                f"checkpoint tensor {name!r} has dtype {have.dtype}", expected=str(want.dtype)
            )
    with copy_pool() as threads:
        copy_all([local_part(target[name], tensors[name]) for name in target], threads)


def _error_text(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name if error.filename else 'a file'} is missing"
    if isinstance(error, json.JSONDecodeError):
        return f"not an index ({error})"
    return f"{type(error).__name__}: {error}"
