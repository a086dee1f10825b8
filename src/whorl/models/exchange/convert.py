"""`import_model` and `export_model`: a folder of `transformers` to a `Transformer`, and back.

Import reads the fields, builds the network on the meta device, and derives the required tensors and shapes from the rules.
It compares these with the headers of the files before it reads weights, a rule at a time (`weights.py`).

Every tensor must match: an extra tensor is an error like a missing one, because the network then differs from the trained
one. Three kinds of tensors may be left unread:

- computed tables (causal masks and rotary frequencies in old files);
- the head of a tied model, if it equals the embedding;
- multi-token prediction layers after the last layer, with a warning.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from whorl.errors import CheckpointError, ConfigError
from whorl.models.exchange.families import LANGUAGE_FAMILIES
from whorl.models.exchange.families.deepseek import DEEPSEEK
from whorl.models.exchange.family import (
    UNSUPPORTED_PREFIX,
    ModelFamily,
    config_differences,
    unsupported_by_family,
)
from whorl.models.exchange.fields import ConfigReader, invalid_config_error, model_type
from whorl.models.exchange.rules import ConversionRule, unchanged
from whorl.models.exchange.safetensors_io import SHARD_BYTES, Shards, read_json
from whorl.models.exchange.weights import (
    Shape,
    expected_shapes,
    export_dtypes,
    load_tensors,
    matmul_weights,
    reject_unexpected,
    unmatched_tensors,
    write_folder,
)
from whorl.models.language_model import LanguageModel
from whorl.models.transformer import Transformer, TransformerConfig
from whorl.nn.compiler import meta_device

SPECIAL_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _read_whorl(fields: ConfigReader) -> TransformerConfig:
    return TransformerConfig.model_validate(fields.get("transformer", dict))


def _whorl_rules(config: TransformerConfig) -> list[ConversionRule]:
    return [unchanged(name, name) for name in _meta_model(config, torch.float32).state_dict()]


# Whorl's own field names in the same file format: every `Transformer` can be written so, with any mixers.
WHORL_FAMILY = ModelFamily(
    "whorl",
    "Transformer",
    _read_whorl,
    lambda config: {"transformer": config.model_dump(mode="json")},
    _whorl_rules,
    prefix="",
    head="head",
    embedding="embedding",
)
FAMILIES: dict[str, ModelFamily] = {
    family.model_type: family for family in (*LANGUAGE_FAMILIES, WHORL_FAMILY)
}


def read_config(data: dict[str, Any], where: str, ignore: Collection[str] = ()) -> TransformerConfig:
    """Return the configuration that a `config.json` describes.

    Args:
        data: its object; where: its path, for messages; ignore: fields that the caller declares harmless.

    Raises:
        ConfigError: a field that is missing, wrong, or would change the result and is not supported.
    """
    family = FAMILIES[model_type(data, where, FAMILIES)]
    if quantized := data.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"{where}: field 'quantization_config': quantized weights ({method})", expected="fp32, bf16 or fp16",
            do="import the model that they were quantized from, then `whorl quantize`",
        )  # fmt: skip
    fields = ConfigReader(data, where)
    try:
        config = family.read(fields)
    except ValidationError as error:
        raise invalid_config_error(error, where, family.model_type) from error
    fields.require_causal()
    fields.reject_unread(ignore)
    return config


def import_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    to_train: bool = True,
    ignore: Collection[str] = (),
) -> Transformer:
    """Return the model of a folder with `config.json` and safetensors weights.

    Args:
        dtype: compute type of the activations.
        to_train: keep all weights in fp32; False keeps the matrices in `dtype`, for inference.
        ignore: names of fields in `config.json` that do not change the result.

    Raises:
        ConfigError: see `read_config`.
        CheckpointError: a file is missing or damaged; a tensor is missing, unknown, or has another shape or type.
    """
    where = folder / "config.json"
    data = read_json(where)
    config = read_config(data, str(where), ignore)
    family = FAMILIES[data["model_type"]]
    shards = Shards(folder)
    if config.n_layers > (n_tensors := len(shards.names())):  # before the layers are made
        raise CheckpointError(
            f"{where}: the model has {config.n_layers:,} layers, and its files {n_tensors:,} tensors",
            expected="config.json of these weights",
        )
    try:
        model = _meta_model(config, dtype)
    except ConfigError as error:  # a layer rejects its sizes
        raise ConfigError(f"{where}: {error.what}", expected=error.expected, do=error.do) from error
    own = model.state_dict()
    rules = family.rules(config)
    names = _file_names(shards, family)
    _check(shards, names, expected_shapes(rules, own), family, config)
    low = set() if to_train else matmul_weights(model) | {"embedding", "positions", "head"}
    if config.embedding_norm:  # which reads the embedding in fp32
        low -= {"embedding"}
    state = load_tensors(shards, names, rules, own, low, dtype, device)
    family.fold(data, state)
    if any(name not in own for name, _ in model.named_buffers()):
        model = Transformer(config, dtype=dtype)  # buffers that are not stored must be computed
    model.load_state_dict(state, assign=True)
    return model.to(device)


def export_model(
    model: LanguageModel,
    folder: Path,
    family: str = "whorl",
    *,
    dtype: torch.dtype | None = None,
    source: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model as a folder of a family.

    Args:
        family: its `model_type`.
        dtype: of the weights written; None keeps each unchanged.
        source: a folder whose tokenizer files, generation settings and special ids are copied.
        shard_bytes: the maximum size of a weight file.

    Raises:
        ConfigError: the family cannot express this model (the error names the field), or `folder` is not empty.
    """
    chosen = FAMILIES[model_type({"model_type": family}, "export_model", FAMILIES)]
    fields = _config_fields(model.config, chosen)
    rules, own = chosen.rules(model.config), model.state_dict()
    if left := set(own) - {name for rule in rules for name in rule.names}:
        raise unsupported_by_family(
            f"the model has the tensor {sorted(left)[0]!r}", f"the tensors of {family}"
        )
    types = export_dtypes(own, dtype)
    fields["dtype"] = str(types["embedding"]).removeprefix("torch.")
    for name in ("generation_config.json", "config.json") if source is not None else ():
        assert source is not None
        if (source / name).is_file():
            given = read_json(source / name)
            fields |= {field: given[field] for field in SPECIAL_ID_FIELDS if field in given}
    write_folder(folder, fields, rules, own, types, source=source, code=chosen.code, shard_bytes=shard_bytes)


def find_family(config: TransformerConfig) -> str:
    """Return the first family that can express a model, except Whorl's own.

    Raises:
        ConfigError: none can; the error lists the reason for each.
    """
    reasons = []
    for name, family in FAMILIES.items():
        if family is not WHORL_FAMILY:
            try:
                _config_fields(config, family)
                return name
            except ConfigError as error:
                reasons.append(f"{name}: {error.what.removeprefix(UNSUPPORTED_PREFIX)}")
    raise ConfigError(
        "no family can express this model\n    " + "\n    ".join(reasons),
        expected="a configuration that one of the families has",
        do="export it as 'whorl', which can express every model",
    )


def _config_fields(config: TransformerConfig, family: ModelFamily) -> dict[str, Any]:
    """Return the fields of config.json; raise ConfigError where the family cannot express one."""
    fields = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.write(config),
    }
    back = read_config(fields, f"the {family.model_type} written of this model")
    if found := config_differences(config, back):
        raise unsupported_by_family(found[0], f"a value that {family.model_type} can express")
    return fields


def _meta_model(config: TransformerConfig, dtype: torch.dtype) -> Transformer:
    with meta_device():
        return Transformer(config, dtype=dtype)


def _file_names(shards: Shards, family: ModelFamily) -> dict[str, str]:
    """Return a map from names in the family's table to names in the file. Some files leave the prefix out."""
    found = shards.names()
    bare = not any(name.startswith(family.prefix) for name in found)
    return {family.prefix + name if bare and name != family.head else name: name for name in found}


def _check(
    shards: Shards,
    names: dict[str, str],
    shapes: dict[str, Shape],
    family: ModelFamily,
    config: TransformerConfig,
) -> None:
    """Raise CheckpointError unless the files hold exactly the expected tensors."""
    extra = [
        n for n in unmatched_tensors(shards, names, shapes) if not re.fullmatch(family.ignored_tensors, n)
    ]
    further = [
        n for n in extra if (layer := re.match(r".*?layers\.(\d+)\.", n)) and int(layer[1]) >= config.n_layers
    ]
    if further and family is DEEPSEEK:
        warnings.warn(
            f"{shards.folder}: {len(further)} tensors after the last layer are left out (multi-token prediction)",
            stacklevel=3,
        )
        extra = [n for n in extra if n not in further]
    if family.head in extra and config.tie_embeddings:
        head, embedding = (shards.tensor(names[n]) for n in (family.head, family.embedding))
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{shards.file_of[names[family.head]]}: tensor {family.head!r} differs from {family.embedding!r}",
                expected="the same, since tie_word_embeddings is true in config.json",
                do="set tie_word_embeddings to false if the head is a separate matrix",
            )
        extra.remove(family.head)
    reject_unexpected(shards, names, extra, family.model_type, len(shapes))
