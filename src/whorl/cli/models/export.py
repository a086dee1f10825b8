"""`whorl export`: write a model of the store in another format."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption, open_artifact

if TYPE_CHECKING:
    from whorl.tokens.chat import ChatTemplate


def export(
    artifact: RefArgument,
    target: Annotated[
        Path, typer.Argument(help="The folder to make (gguf: the file); must be empty or absent.")
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="hf|gguf|FAMILY",
            help="hf: the first matching family of transformers; gguf: one file for llama.cpp; or the name of a "
            "family, e.g. llama, qwen3, mixtral, clip.",
        ),
    ] = "hf",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: unchanged.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Write a model as a folder for transformers, or as a file for llama.cpp.

    Examples:

        whorl export llama/pretrain mine

        whorl export imported/Qwen3-0.6B mine --to qwen3 --dtype bfloat16

        whorl export llama/pretrain mine.gguf --to gguf
    """
    import torch

    from whorl.errors import DOCS_URL, ConfigError, one_of
    from whorl.models import load_model
    from whorl.models.exchange import (
        FAMILIES,
        VISION_FAMILIES,
        export_model,
        export_vision,
        find_family,
        import_vision,
    )

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in kinds:
        raise ConfigError(f"--dtype {dtype}", expected=one_of(dtype, list(kinds)))
    known = ["hf", "gguf", *FAMILIES, *VISION_FAMILIES]
    if to not in known:
        raise ConfigError(f"--to {to}", expected=one_of(to, known))
    found = open_artifact(artifact, store, ("model", "vision"), "a model")
    if found.kind == "model" and to in VISION_FAMILIES:
        raise ConfigError(
            f"--to {to}: {found.name} is a language model", expected=one_of(to, ["hf", "gguf", *FAMILIES])
        )
    found.check()
    weights = kinds[dtype] if dtype else None
    if found.kind == "vision" and "family" not in found.summary:
        raise ConfigError(
            f"{found.name} was trained by Whorl, and its format is not that of transformers",
            expected="an imported ViT or CLIP",
            do="call whorl.models.exchange.export_vision on the network of whorl.vision.load.load_vision(folder)",
        )
    if found.kind == "vision":
        vision_model = import_vision(found.path)
        family = str(found.summary["family"]) if to == "hf" else to
        if family not in VISION_FAMILIES:
            raise ConfigError(f"--to {to}: {found.name} is a vision model", expected="hf, vit or clip")
        export_vision(vision_model, target, family, dtype=weights, source=found.path)
        print(f"{family}: {target}")
        return
    model = load_model(found.path)
    if model.unexportable is not None:
        raise ConfigError(
            f"{found.name} is Whorl's own decoder, whose {model.unexportable} {to} cannot represent",
            expected="a model with an architecture of transformers",
            do=f"train one with `whorl run llama`, or with [steps.plan.model] in a recipe ({DOCS_URL}/models.md)",
        )
    if to == "gguf":
        from whorl.models.exchange.gguf_file import export_gguf

        tokenizer_folder = found.path if (found.path / "tokenizer.json").is_file() else None
        chat = _chat_template(found.path)
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always", UserWarning)
            export_gguf(
                model,
                target,
                dtype=weights,
                source=tokenizer_folder,
                turn_end=chat.turn_end if chat else None,
            )
        for note in notes:
            print(f"note: {note.message}", file=sys.stderr)
    else:
        to = find_family(model.config) if to == "hf" else to
        export_model(model, target, to, dtype=weights, source=found.path)
        if chat := _chat_template(found.path):
            write_end_ids(target / "generation_config.json", chat)
    print(f"{to}: {target}")


def _chat_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a model's folder, or None without a tokenizer."""
    from whorl.tokens.chat import load_chat_template
    from whorl.tokens.hf_tokenizer import load_tokenizer

    if not (folder / "tokenizer.json").is_file():
        return None
    return load_chat_template(folder, load_tokenizer(folder))


def write_end_ids(file: Path, chat: ChatTemplate) -> None:
    """Write the ids that end a text or a turn, so that other programs stop where this model was trained to stop."""
    config = json.loads(file.read_text()) if file.is_file() else {}
    ids = [*dict.fromkeys((*chat.tokenizer.end_ids, *sorted(chat.stop_ids)))]
    if len(ids) > 1:
        file.write_text(json.dumps({**config, "eos_token_id": ids}, indent=1) + "\n")
