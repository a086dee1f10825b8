"""Weight files in the layout of Hugging Face: one `model.safetensors`, or shards with an index.

A folder holds either `model.safetensors`, or `model-00001-of-0000N.safetensors` ... and `model.safetensors.index.json`,
whose `weight_map` gives the shard of each tensor; or the files of torch's DCP. `Shards` reads them, safetensors a tensor at
a time, so a model larger than half of the memory can be read. Before the first weight is used, it checks three things. Every
file opens and is complete (a safetensors header states the file's length). The index and the shards name the same tensors.
No shard is outside the folder.

`write_shards` writes them. The number of shards is part of each name, so sizes are planned from shapes first, then each
shard is filled, written and freed. Everything is written to a temporary folder and renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whorl.errors import CheckpointError, ConfigError
from whorl.store.files import load_json, require_regular

SINGLE, METADATA = "model.safetensors", ".metadata"  # the latter of torch's DCP format
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 1000**3
FLOATS = {"F64", "F32", "F16", "BF16"}
# Files of a folder that are not part of the network; copied unchanged, by name.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises:
        CheckpointError: the file is missing, is not JSON, or holds no object.
    """
    try:
        data = load_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            expected="a JSON object",
            do="name a folder as `save_pretrained` writes it, or fetch the file again",
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}", expected="a JSON object")
    return data


class Shards:
    """The tensors of a folder, by name.

    Raises:
        CheckpointError: a file is missing or damaged, or the index and the shards disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        if (folder / SINGLE).is_file():
            self._add(folder / SINGLE)
            return
        if (folder / METADATA).is_file():  # read whole, and kept as a file
            from whorl.models.exchange.dcp import read_dcp

            self._converted = tempfile.TemporaryDirectory(prefix="whorl-dcp-")
            save_file(read_dcp(folder), Path(self._converted.name) / SINGLE)
            self._add(Path(self._converted.name) / SINGLE)
            return
        if not (folder / INDEX).is_file():
            pickled = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
            raise CheckpointError(
                f"{folder} holds neither {SINGLE} nor {INDEX}"
                + (f", but {pickled[0]}: a pickle can run any code, so it is not read" if pickled else ""),
                expected="weights as safetensors",
                do="save the model again with `save_pretrained` (safe_serialization)"
                if pickled
                else "name another folder",
            )
        self._add_indexed(folder / INDEX)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self.file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from its file's header."""
        return tuple(self._slice(name).get_shape())

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return one tensor, as `dtype`.

        Raises:
            CheckpointError: it holds no floating-point numbers (quantized weights), or cannot be read.
        """
        kind = self._slice(name).get_dtype()
        if kind not in FLOATS:
            raise CheckpointError(
                f"{self.file_of[name]}: tensor {name!r} is of type {kind}",
                expected=f"one of {', '.join(sorted(FLOATS))}",
                do="convert the quantized weights to bf16 first",
            )
        try:
            tensor: Tensor = self._open[self.file_of[name]].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _damaged(self.file_of[name], error) from error
        return tensor.to(dtype)

    def _slice(self, name: str) -> Any:
        return self._open[self.file_of[name]].get_slice(name)

    def _add(self, path: Path) -> set[str]:
        try:
            opened: Any = safe_open(require_regular(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from error
        self._open[path] = opened
        names = set(opened.keys())
        self.file_of.update(dict.fromkeys(names, path))
        return names

    def _add_indexed(self, index: Path) -> None:
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
            raise CheckpointError(f"{index} has no usable `weight_map`", expected="tensor name -> file name")
        for file in sorted(set(listed.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{index} names {file!r}", expected="files in the same folder")
            wanted = {name for name, f in listed.items() if f == file}
            found = self._add(self.folder / file)
            for name in sorted(wanted ^ found):
                at_fault = (
                    "is listed in the index but not in the file" if name in wanted else "is not in the index"
                )
                raise CheckpointError(
                    f"{self.folder / file}: tensor {name!r} {at_fault}",
                    expected=f"the tensors that {INDEX} lists",
                    do="fetch index and shards of the same version",
                )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    size = f" ({path.stat().st_size} bytes)" if path.is_file() else ""
    return CheckpointError(
        f"{path}{size} cannot be read: {error}",
        expected="a whole safetensors file",
        do="fetch the file again",
    )


def plan_shards(sizes: dict[str, int], shard_bytes: int) -> list[list[str]]:
    """Return names, in order, in shards of at most `shard_bytes` (a larger tensor gets a separate shard)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_shards(
    folder: Path, sizes: dict[str, int], make: Callable[[Sequence[str]], dict[str, Tensor]], shard_bytes: int
) -> None:
    """Write tensors as one file, or as shards with an index.

    Args:
        sizes: name -> bytes, in the order of the file.
        make: names of one shard -> its tensors; called for one shard at a time.
    """
    shards = plan_shards(sizes, shard_bytes)
    if len(shards) == 1:
        save_file(make(shards[0]), folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(make(names), folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_files(source: Path, folder: Path, files: Iterable[str] = TOKENIZER_FILES) -> list[str]:
    """Copy those of `files` that exist in `source` into `folder`; return their names."""
    found = [name for name in files if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, folder / name)
    return found


class AtomicFolder:
    """`with AtomicFolder(folder) as temp:` gives a temporary folder, renamed to `folder` on success.

    Raises:
        ConfigError: `folder` exists and is not empty.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} is not empty", expected="a new folder", do="name another, or remove it first"
            )
        self.folder = folder
        self.temp = folder.with_name(f".{folder.name}.{os.getpid()}.partial")

    def __enter__(self) -> Path:
        shutil.rmtree(self.temp, ignore_errors=True)
        self.temp.mkdir(parents=True)
        return self.temp

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None:
            if self.folder.exists():
                self.folder.rmdir()
            self.temp.rename(self.folder)
        else:
            shutil.rmtree(self.temp, ignore_errors=True)
