"""`import_model` and `export_model`: a folder of others to a `Transformer`, and back.

Importing goes: read the fields, build the network without memory, work out from the rules which tensors there must be and of
which shapes, compare that with the headers of the files, and only then read weights, a rule at a time. At no time are
there two copies of more than one layer's matrix.

What a folder must hold is exact: a tensor too many is as much of an error as one too few, since it means that the
network is not the one that was trained. Three kinds of tensors may be left unread: tables computed from nothing (old
files hold causal masks and rotary frequencies), the head of a tied model if it equals the embedding, and layers behind the
last one, which predict further tokens (with a warning).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from whorl.errors import CheckpointError, ConfigError, one_of
from whorl.models.exchange.deepseek import DEEPSEEK
from whorl.models.exchange.experts import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from whorl.models.exchange.family import Family, differences, not_possible
from whorl.models.exchange.fields import Fields
from whorl.models.exchange.files import SHARD_BYTES, Aside, Shards, carry, read_json, write_shards
from whorl.models.exchange.gemma import GEMMA2, GEMMA3
from whorl.models.exchange.gpt2 import GPT2
from whorl.models.exchange.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from whorl.models.exchange.rules import Rule, same
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import TransformerConfig
from whorl.nn.experts import Experts
from whorl.nn.linear import Linear

TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _read_own(fields: Fields) -> TransformerConfig:
    return TransformerConfig.model_validate(fields.get("transformer", dict))


def _own_rules(config: TransformerConfig) -> list[Rule]:
    return [same(name, name) for name in _without_memory(config, torch.float32).state_dict()]


# Our own shape of the same files: every `Transformer` can be written so, whatever its mixers.
OWN = Family(
    "whorl",
    "Transformer",
    _read_own,
    lambda config: {"transformer": config.model_dump(mode="json")},
    _own_rules,
    prefix="",
    head="head",
    embedding="embedding",
)
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK, OWN,
    )
}  # fmt: skip


def family_of(name: str, where: str) -> Family:
    """A family by its `model_type`.

    Raises:
        ConfigError: an unknown one.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    do = "save the text part by itself: this is the multimodal model" if name == "gemma3" else ""
    raise ConfigError(
        f"{where}: field 'model_type' is {name!r}", expected=one_of(name, list(FAMILIES)), do=do
    )


def read_config(data: dict[str, Any], where: str, ignore: Collection[str] = ()) -> TransformerConfig:
    """The shape that a `config.json` describes.

    Args:
        data: its object; where: its path, for messages; ignore: fields that the caller vouches for.

    Raises:
        ConfigError: a field that is missing, wrong, or would change the result and is not supported.
    """
    family = family_of(str(data.get("model_type")), where)
    fields = Fields(data, where)
    try:
        config = family.read(fields)
    except ValidationError as error:
        raise ConfigError(
            f"{where}: {error.errors()[0]['msg']}", expected=f"a possible {family.model_type} model"
        ) from error
    fields.finish(ignore)
    return config


def import_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    to_train: bool = True,
    ignore: Collection[str] = (),
) -> Transformer:
    """The model of a folder with `config.json` and safetensors weights.

    Args:
        dtype: the type that activations are computed in.
        to_train: keep all weights in fp32; False keeps the matrices in `dtype`, for a model that is only run.
        ignore: names of fields in `config.json` that are known not to change the result.

    Raises:
        ConfigError: see `read_config`.
        CheckpointError: a file is missing or damaged; a tensor is missing, unknown, or of another shape or type.
    """
    where = folder / "config.json"
    data = read_json(where)
    config = read_config(data, str(where), ignore)
    family, model = FAMILIES[data["model_type"]], _without_memory(config, dtype)
    shards = Shards(folder)
    own = model.state_dict()
    rules = family.rules(config)
    names = _named(shards, family)
    _check(shards, names, _wanted(rules, own), family, config)
    low = set() if to_train else _matrices(model)
    state: dict[str, Tensor] = {}
    for rule in rules:
        given = rule.pull([shards.tensor(names[name]) for name in rule.theirs])
        for name, tensor in zip(rule.ours, given, strict=True):
            tensor = tensor.to(device, dtype if name in low else own[name].dtype)
            state[name] = tensor.clone(memory_format=torch.contiguous_format)
    if any(name not in own for name, _ in model.named_buffers()):
        model = Transformer(config, dtype=dtype)  # buffers that are not stored must be made
    model.load_state_dict(state, assign=True)
    return model.to(device)


def export_model(
    model: Transformer,
    folder: Path,
    family: str = "whorl",
    *,
    dtype: torch.dtype | None = None,
    source: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a model as a folder of some family.

    Args:
        family: its `model_type`.
        dtype: of the weights written; None keeps each as it is.
        source: a folder whose tokenizer files, generation settings and special ids are carried over.
        shard_bytes: the largest file of weights.

    Raises:
        ConfigError: the family cannot express this model (the field is named), or `folder` is not empty.
    """
    chosen = family_of(family, "export_model")
    fields = {"architectures": [chosen.architecture], "model_type": family, **chosen.write(model.config)}
    back = read_config(fields, f"the {family} written of this model")
    if found := differences(model.config, back):
        raise not_possible(found[0], f"what {family} can say")
    rules, own = chosen.rules(model.config), model.state_dict()
    if left := set(own) - {name for rule in rules for name in rule.ours}:
        raise not_possible(f"it has the tensor {sorted(left)[0]!r}", f"the tensors of {family}")
    kinds = {
        name: t.dtype if dtype is None or not t.is_floating_point() else dtype for name, t in own.items()
    }
    rule_of = {name: (rule, n) for rule in rules for n, name in enumerate(rule.theirs)}
    sizes = {}
    for name, (rule, n) in rule_of.items():
        shape = _wanted([rule], own)[name]
        sizes[name] = torch.Size(shape).numel() * kinds[rule.ours[min(n, len(rule.ours) - 1)]].itemsize

    def make(names: Sequence[str]) -> dict[str, Tensor]:
        made = {}
        for name in names:
            rule, n = rule_of[name]
            tensor = rule.push([own[o].detach().to("cpu", kinds[o]) for o in rule.ours])[n]
            made[name] = tensor.clone(memory_format=torch.contiguous_format)
        return made

    fields["dtype"] = str(kinds["embedding"]).removeprefix("torch.")
    with Aside(folder) as draft:
        if source is not None:
            carry(source, draft)
            given = read_json(source / "config.json")
            fields |= {name: given[name] for name in TEXT_IDS if name in given}
        write_shards(draft, sizes, make, shard_bytes)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (draft / "config.json").write_text(text, encoding="utf-8")


def _without_memory(config: TransformerConfig, dtype: torch.dtype) -> Transformer:
    with torch.device("meta"):
        return Transformer(config, dtype=dtype)


def _wanted(rules: list[Rule], own: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Their tensors' names and shapes: our shapes pushed through the rules, without data."""
    wanted = {}
    for rule in rules:
        pushed = rule.push([torch.empty(own[name].shape, device="meta") for name in rule.ours])
        wanted.update({name: tuple(t.shape) for name, t in zip(rule.theirs, pushed, strict=True)})
    return wanted


def _named(shards: Shards, family: Family) -> dict[str, str]:
    """Name in the family's table -> name in the file. Some files leave the prefix out."""
    found = shards.names()
    bare = not any(name.startswith(family.prefix) for name in found)
    return {family.prefix + name if bare and name != family.head else name: name for name in found}


def _check(
    shards: Shards,
    names: dict[str, str],
    wanted: dict[str, tuple[int, ...]],
    family: Family,
    config: TransformerConfig,
) -> None:
    """Raises CheckpointError unless the files hold just the wanted tensors."""
    missing = sorted(wanted.keys() - names.keys())
    if missing:
        raise CheckpointError(
            f"{shards.folder}: tensor {missing[0]!r} is missing ({len(missing)} in all)",
            expected=f"shape {list(wanted[missing[0]])} by config.json",
            do="fetch all files of the model again",
        )
    for name in sorted(wanted):
        shape = shards.shape(names[name])
        if shape != wanted[name]:
            raise CheckpointError(
                f"{shards.file_of[names[name]]}: tensor {name!r} has the shape {list(shape)}",
                expected=f"{list(wanted[name])} by config.json",
            )
    extra = sorted(n for n in names.keys() - wanted.keys() if not re.fullmatch(family.no_weights, n))
    further = [
        n for n in extra if (layer := re.match(r".*?layers\.(\d+)\.", n)) and int(layer[1]) >= config.n_layers
    ]
    if further and family is DEEPSEEK:
        warnings.warn(
            f"{shards.folder}: {len(further)} tensors behind the last layer are left out: they predict further tokens",
            stacklevel=3,
        )
        extra = [n for n in extra if n not in further]
    if family.head in extra and config.tie_embeddings:
        head, embedding = (shards.tensor(names[n]) for n in (family.head, family.embedding))
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{shards.file_of[names[family.head]]}: tensor {family.head!r} differs from {family.embedding!r}",
                expected="the same, since tie_word_embeddings is true in config.json",
                do="set tie_word_embeddings to false if the head is a matrix of its own",
            )
        extra.remove(family.head)
    if extra:
        raise CheckpointError(
            f"{shards.file_of[names[extra[0]]]}: tensor {extra[0]!r} is not known ({len(extra)} in all)",
            expected=f"the {len(wanted)} tensors of a {family.model_type} model with this config.json",
            do="check that config.json belongs to these weights",
        )


def _matrices(model: nn.Module) -> set[str]:
    """Names of the weights that are cast to the compute type wherever they are used."""
    names = {"embedding", "positions", "head"}
    for path, module in model.named_modules():
        if isinstance(module, Linear | Experts):
            names |= {f"{path}.{name}" for name, _ in module.named_parameters()}
    return names
