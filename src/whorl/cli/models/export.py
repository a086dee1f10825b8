"""`whorl export`: write a model of the store in another format."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption, open_artifact

if TYPE_CHECKING:
    from whorl.models import LanguageModel
    from whorl.store import Artifact


def export(
    artifact: RefArgument,
    target: Annotated[
        Path | None,
        typer.Argument(
            help="The folder to make (gguf: the file); must be empty or absent; default: by name, as chat-sft.gguf."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            metavar="hf|gguf|dcp|FAMILY",
            help="hf: the first matching family of transformers; gguf: one file for llama.cpp; dcp: as hf, with "
            "weights as a checkpoint of torch.distributed. Or the name of a "
            "family, e.g. llama, qwen3, mixtral, clip.",
        ),
    ] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of a folder: float32, bfloat16 or float16; default: unchanged."),
    ] = None,
    type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="Of a GGUF file: f32, f16, bf16, q8_0 or q4_k; default: unchanged."
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Write a model as a folder for transformers, or as a file for llama.cpp.

    Whorl's own decoder brings its code: load it with trust_remote_code=True.

    Examples:

        whorl export quickstart/sft --to hf mine

        whorl export imported/Qwen3-0.6B mine --to qwen3 --dtype bfloat16

        whorl export llama/pretrain mine.gguf --to gguf --type q8_0
    """
    from whorl.errors import ConfigError, one_of
    from whorl.models.exchange import FAMILIES, VISION_FAMILIES

    known = ["hf", "gguf", "dcp", *FAMILIES, *VISION_FAMILIES]
    if to not in known:
        raise ConfigError(f"--to {to}", expected=one_of(to, known))
    if to == "gguf" and dtype is not None:
        raise ConfigError(f"--dtype {dtype} with --to gguf", expected="--type f32, f16, bf16, q8_0 or q4_k")
    if to != "gguf" and type is not None:
        raise ConfigError(f"--type {type} with --to {to}", expected="--dtype float32, bfloat16 or float16")
    found = open_artifact(artifact, store, ("model", "vision"), "a model")
    if found.kind == "model" and to in VISION_FAMILIES:
        raise ConfigError(
            f"--to {to}: {found.name} is a language model", expected=one_of(to, ["hf", "gguf", *FAMILIES])
        )
    found.check()
    if target is None:
        target = Path(found.name.replace("/", "-") + (".gguf" if to == "gguf" else ""))
    if to == "gguf" and found.kind == "model":
        _write_gguf(found, target, type)
        print(f"gguf: {target}")
    else:
        print(f"{write_hf_folder(found, target, 'hf' if to == 'dcp' else to, dtype)}: {target}")
        if to == "dcp":
            _convert_to_dcp(target)


def write_hf_folder(found: Artifact, target: Path, to: str = "hf", dtype: str | None = None) -> str:
    """Write an artifact of the kind `model` or `vision` as a folder, as a family or `hf`; return the family.

    Raises:
        ConfigError: no family can express the model; the type is unknown; `target` is not empty.
    """
    import torch

    from whorl.errors import ConfigError, one_of
    from whorl.models.exchange import VISION_FAMILIES, export_model, export_vision, find_family, import_vision
    from whorl.tokens.chat.exported_folder import complete_exported_folder

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in kinds:
        raise ConfigError(f"--dtype {dtype}", expected=one_of(dtype, list(kinds)))
    weights = kinds[dtype] if dtype else None
    if found.kind == "vision":
        if "family" not in found.summary:
            raise ConfigError(
                f"{found.name} was trained by Whorl, and its format is not that of transformers",
                expected="an imported ViT or CLIP",
                do="call whorl.models.exchange.export_vision on the network of whorl.vision.load.load_vision(folder)",
            )
        family = str(found.summary["family"]) if to == "hf" else to
        if family not in VISION_FAMILIES:
            raise ConfigError(f"--to {to}: {found.name} is a vision model", expected="hf, vit or clip")
        export_vision(import_vision(found.path), target, family, dtype=weights, source=found.path)
        return family
    model = _load(found.path)
    family = find_family(model.config) if to == "hf" else to
    export_model(model, target, family, dtype=weights, source=found.path)
    complete_exported_folder(target)
    return family


def _convert_to_dcp(folder: Path) -> None:
    from safetensors.torch import load_file

    from whorl.models.exchange.dcp import write_dcp

    files = sorted(folder.glob("model*.safetensors*"))
    write_dcp({n: t for f in files if f.suffix == ".safetensors" for n, t in load_file(f).items()}, folder)
    for file in files:
        file.unlink()


def _load(folder: Path) -> LanguageModel:
    """Return the model of a folder. Raises ConfigError: it is quantized."""
    from whorl.errors import ConfigError
    from whorl.models import load_model

    model = load_model(folder)
    if model.quantization is not None:
        raise ConfigError(
            "the model is quantized, in a format of Whorl", expected="a model in full precision",
            do="export the model that it was made of; for llama.cpp, --to gguf --type q8_0 or q4_k quantizes",
        )  # fmt: skip
    return model


def _write_gguf(found: Artifact, file: Path, type: str | None) -> None:
    from whorl.models.exchange.gguf_file import export_gguf
    from whorl.tokens.chat import load_chat_template
    from whorl.tokens.hf_tokenizer import load_tokenizer

    folder = found.path if (found.path / "tokenizer.json").is_file() else None
    chat = load_chat_template(folder, load_tokenizer(folder)) if folder else None
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        export_gguf(
            _load(found.path), file, kind=type, source=folder, turn_end=chat.turn_end if chat else None,
            template=chat.source if chat and chat.is_trained else None,
        )  # fmt: skip
    for note in notes:
        print(f"note: {note.message}", file=sys.stderr)
