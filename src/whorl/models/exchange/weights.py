"""Transfer of the tensors between a folder and a network of any kind.

The inputs are the network's `state_dict` and a table of rules with the folder's tensor names and layouts. They determine
the tensors and shapes that the folder must hold. `unmatched_tensors` compares these with the files' headers before a
weight is read and returns the extra tensors. The caller selects those that may be ignored and calls `reject_unexpected`
on the rest. `load_tensors` reads a rule at a time, so that at most one layer's matrix exists twice; `write_folder` makes
one shard at a time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whorl.errors import CheckpointError
from whorl.models.exchange.rules import ConversionRule
from whorl.models.exchange.safetensors_io import (
    TOKENIZER_FILES,
    AtomicFolder,
    Shards,
    copy_files,
    write_shards,
)
from whorl.nn.experts import Experts
from whorl.nn.linear import Linear

Shape = tuple[int, ...]


def expected_shapes(rules: Iterable[ConversionRule], state_dict: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the names and shapes of the family's tensors: Whorl's shapes through the rules, without data."""
    found = {}
    for rule in rules:
        pushed = rule.to_hf([torch.empty(state_dict[name].shape, device="meta") for name in rule.names])
        found.update({name: tuple(t.shape) for name, t in zip(rule.hf_names, pushed, strict=True)})
    return found


def matmul_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights (and biases) that are cast to the compute type at each use."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Linear | Experts)
        for name, _ in module.named_parameters()
    }


def unmatched_tensors(shards: Shards, names: Mapping[str, str], shapes: Mapping[str, Shape]) -> list[str]:
    """Return the tensors of the files that no rule needs, by the names of the rules.

    Args:
        names: name in the rules -> name in the files; shapes: from `expected_shapes`.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    missing = sorted(shapes.keys() - names.keys())
    if missing:
        raise CheckpointError(
            f"{shards.folder}: tensor {missing[0]!r} is missing ({len(missing)} in all)",
            expected=f"shape {list(shapes[missing[0]])} by config.json",
            do="fetch all files of the model again",
        )
    for name in sorted(shapes):
        shape = shards.shape(names[name])
        if shape != shapes[name]:
            raise CheckpointError(
                f"{shards.file_of[names[name]]}: tensor {name!r} has the shape {list(shape)}",
                expected=f"{list(shapes[name])} by config.json",
            )
    return sorted(names.keys() - shapes.keys())


def reject_unexpected(
    shards: Shards, names: Mapping[str, str], extra: Sequence[str], kind: str, n_known: int
) -> None:
    """Raise CheckpointError if `extra` has a tensor. kind: the `model_type`; n_known: its number of tensors."""
    if extra:
        raise CheckpointError(
            f"{shards.file_of[names[extra[0]]]}: tensor {extra[0]!r} is unknown ({len(extra)} in all)",
            expected=f"the {n_known} tensors of a {kind} model with this config.json",
            do="check that config.json belongs to these weights",
        )


def load_tensors(
    shards: Shards,
    names: Mapping[str, str],
    rules: Iterable[ConversionRule],
    state_dict: Mapping[str, Tensor],
    low_precision: Collection[str],
    dtype: torch.dtype,
    device: str,
) -> dict[str, Tensor]:
    """Return Whorl's state by name, read a rule at a time: those in `low_precision` as `dtype`, others as in `state_dict`.

    Raises:
        CheckpointError: a tensor holds no floating-point numbers, or cannot be read.
    """
    state: dict[str, Tensor] = {}
    for rule in rules:
        given = rule.from_hf([shards.tensor(names[name]) for name in rule.hf_names])
        for name, tensor in zip(rule.names, given, strict=True):
            tensor = tensor.to(device, dtype if name in low_precision else state_dict[name].dtype)
            state[name] = tensor.clone(memory_format=torch.contiguous_format)
    return state


def export_dtypes(state_dict: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the written type of each tensor: `dtype` if given and the tensor is floating, or its present type.

    The bias that balances experts keeps its type, as in published files: it is added to scores with small differences.
    """

    def kept(name: str, tensor: Tensor) -> bool:
        return dtype is None or not tensor.is_floating_point() or name.rpartition(".")[2] == "balance_bias"

    return {name: t.dtype if dtype is None or kept(name, t) else dtype for name, t in state_dict.items()}


def write_folder(
    folder: Path,
    fields: dict[str, Any],
    rules: Sequence[ConversionRule],
    state_dict: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    *,
    source: Path | None,
    files: Iterable[str] = TOKENIZER_FILES,
    code: Iterable[Path] = (),
    shard_bytes: int,
) -> None:
    """Write `config.json`, the tensors, `code`, and the `files` that exist in `source`, atomically.

    Args:
        fields: of `config.json`; dtypes: from `export_dtypes`; shard_bytes: the maximum size of a weight file.

    Raises:
        ConfigError: `folder` is not empty.
    """
    rule_of = {name: (rule, n) for rule in rules for n, name in enumerate(rule.hf_names)}
    shapes = expected_shapes(rules, state_dict)
    sizes = {}
    for name, (rule, n) in rule_of.items():
        ours = rule.names[min(n, len(rule.names) - 1)]
        sizes[name] = torch.Size(shapes[name]).numel() * dtypes[ours].itemsize

    def make(names: Sequence[str]) -> dict[str, Tensor]:
        made = {}
        for name in names:
            rule, n = rule_of[name]
            tensor = rule.to_hf([state_dict[o].detach().to("cpu", dtypes[o]) for o in rule.names])[n]
            made[name] = tensor.clone(memory_format=torch.contiguous_format)
        return made

    with AtomicFolder(folder) as draft:
        if source is not None:
            copy_files(source, draft, files)
        for file in code:
            copy_files(file.parent, draft, [file.name])
        write_shards(draft, sizes, make, shard_bytes)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (draft / "config.json").write_text(text, encoding="utf-8")
