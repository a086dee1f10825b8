"""The tensors of a folder into a network of any kind, and back: what all exchanges have in common.

A network is here its state by name (`own`), and a table of rules that says what each tensor is called and how it lies in a
folder of others. From the two follows which tensors the folder must hold and of which shapes, so `unread` compares that
with the headers of its files before a weight is read, and gives what is left over: it is for the caller to know
what of it may be passed over, and to `refuse` the rest. `pull` then reads a rule at a time, so that there are never two
copies of more than one layer's matrix; `write_folder` makes a shard at a time.
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
    """Their tensors' names and shapes: our shapes pushed through the rules, without data."""
    found = {}
    for rule in rules:
        pushed = rule.to_hf([torch.empty(state_dict[name].shape, device="meta") for name in rule.names])
        found.update({name: tuple(t.shape) for name, t in zip(rule.hf_names, pushed, strict=True)})
    return found


def matmul_weights(model: nn.Module) -> set[str]:
    """Names of the weights (and biases) that are cast to the compute type wherever they are used."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Linear | Experts)
        for name, _ in module.named_parameters()
    }


def unmatched_tensors(shards: Shards, names: Mapping[str, str], shapes: Mapping[str, Shape]) -> list[str]:
    """The tensors that nobody asked for, by the names of the rules.

    Args:
        names: name in the rules -> name in the files; shapes: from `wanted`.

    Raises:
        CheckpointError: a tensor is missing, or of another shape.
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
    """Raises CheckpointError if there is any tensor in `extra`. kind: the `model_type`; n_known: tensors it has."""
    if extra:
        raise CheckpointError(
            f"{shards.file_of[names[extra[0]]]}: tensor {extra[0]!r} is not known ({len(extra)} in all)",
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
    """Our state by name, read a rule at a time; those in `low` as `dtype`, the others in the type of `own`.

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
    """The type in which each tensor is written: `dtype`, if it is given and the tensor holds fractions, or its own.

    The bias that balances experts keeps its own: it is added to scores that differ by little, and others keep it so too.
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
    shard_bytes: int,
) -> None:
    """Writes `config.json`, the tensors, and the `files` that `source` holds, aside; then renames.

    Args:
        fields: of `config.json`; types: from `types_of`; shard_bytes: the largest file of weights.

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
        write_shards(draft, sizes, make, shard_bytes)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (draft / "config.json").write_text(text, encoding="utf-8")
