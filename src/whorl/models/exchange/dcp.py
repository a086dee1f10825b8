"""Tensors in the format of torch's distributed checkpoints (DCP), of any number of ranks: `.metadata` and `*.distcp`.

`.metadata` is a pickle, which could run any code. Only the types that DCP writes into it are loaded.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from whorl.errors import CheckpointError

METADATA = ".metadata"

_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _TYPES.get(module, ()):
            raise CheckpointError(
                f"{METADATA} names {module}.{name}, which could run any code", expected="types of DCP"
            )
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        found: Metadata = _Unpickler(io.BytesIO((Path(self.path) / METADATA).read_bytes())).load()
        return found


def write_dcp(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors to a folder, for `torch.distributed.checkpoint.load`."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that this is one process
        save(dict(tensors), checkpoint_id=folder, no_dist=True)


def read_dcp(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder by name, whole.

    Raises:
        CheckpointError: a file is missing or damaged, or names other types than those of DCP.
    """
    reader = _Reader(folder)
    try:
        found = reader.read_metadata().state_dict_metadata.items()
        tensors = {
            name: torch.empty(each.size, dtype=each.properties.dtype)
            for name, each in found
            if isinstance(each, TensorStorageMetadata)
        }
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # the latter wraps those of a rank
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
    return tensors
