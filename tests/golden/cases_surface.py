"""Golden cases of what users and files see: merges, parameter names, initial weights, help texts; and the quickstart."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import typer
from golden_case import Result, case, digest, tensor_hash, text_hash
from golden_inputs import HEADS, SHAPES, scratch
from safetensors.torch import load_file
from tests.support.train.model_shapes import EXPERTS
from torch import nn

from whorl.cli import build_app
from whorl.models import TransformerConfig, make_model, whorl_decoder
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.vision.resnet import ResNet
from whorl.models.vision.vit import ViT
from whorl.recipes import load_recipe, run_recipe
from whorl.store import Store
from whorl.tokens.shards import TokenSet
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100  # columns of a help text


@case("merges")
def _merges() -> Result:
    """A vocabulary of 512 ids from the text of the licence, and that text's ids."""
    text = (ROOT / "LICENSE").read_text()
    tokenizer = Tokenizer.train([text], 512, workers=1)
    tokens = [token.hex() for token in tokenizer.token_bytes]
    ids = [digest(tokenizer.encode(text).tolist())]
    return Result(exact={"merges": text_hash("\n".join(tokens))}, ids={"LICENSE": ids})


LATENT = {"kind": "latent", "n_heads": 2, "kv_rank": 8, "q_rank": 8, "nope_dim": 8, "rope_dim": 8, "v_dim": 8}
ROUTED = {**EXPERTS, "shared_hidden": 16, "shared_gate": True}


SMALL = {"d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden": 64}


def _language(changes: dict[str, Any] | None, draw: torch.Generator) -> nn.Module:
    small = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "mlp_hidden": 64}
    if changes is None:
        return make_model(whorl_decoder(**{**small, **HEADS, "ngram_buckets": 16}), draw)
    return make_model(TransformerConfig.model_validate({**small, **changes}), draw)


def _encoder(draw: torch.Generator) -> nn.Module:
    return Encoder(EncoderConfig(vocab_size=50, **SMALL, max_length=24, n_classes=3), draw)


def _vit(draw: torch.Generator) -> nn.Module:
    return ViT(image_size=16, patch=4, channels=1, classes=8, **SMALL, generator=draw)


def _resnet(draw: torch.Generator) -> nn.Module:
    return ResNet(1, 8, widths=(8, 16), depths=(1, 1), generator=draw)


NETWORKS: dict[str, Callable[[torch.Generator], nn.Module]] = {
    "decoder": partial(_language, None), "llama": partial(_language, SHAPES["llama"]),
    "mamba": partial(_language, SHAPES["mamba"]),
    "experts": partial(_language, {"mixers": {"m": HEADS}, "experts": ROUTED}),
    "latent": partial(_language, {"mixers": {"m": LATENT, "n": {"kind": "gru"}}}), "encoder": _encoder,
    "vit": _vit, "resnet": _resnet,
}  # fmt: skip


def network(name: str) -> nn.Module:
    """One of the eight networks, untrained."""
    return NETWORKS[name](torch.Generator().manual_seed(0))


def names() -> dict[str, list[str]]:
    """Keys of each network's `state_dict`, in their order."""
    return {name: list(network(name).state_dict()) for name in NETWORKS}


@case("names")
def _names() -> Result:
    return Result(exact={name: text_hash("\n".join(keys)) for name, keys in names().items()})


@case("initial-weights")
def _initial() -> Result:
    """Initial weights depend on the order in which a constructor draws from its generator."""
    return Result(bits={name: tensor_hash(network(name).state_dict()) for name in NETWORKS})


def help_texts() -> dict[str, str]:
    """`whorl VERB --help` of every verb, by the verb."""
    texts: dict[str, str] = {}

    def add(command: click.Command, path: tuple[str, ...], parent: click.Context | None) -> None:
        # the context class of a command: Typer may carry its own copy of click
        context = command.context_class(command, info_name=path[-1], parent=parent, terminal_width=WIDTH)
        texts[" ".join(path)] = command.get_help(context)
        for name, inner in getattr(command, "commands", {}).items():
            add(inner, (*path, name), context)

    add(typer.main.get_command(build_app()), ("whorl",), None)
    return texts


@case("help")
def _help() -> Result:
    return Result(exact={verb: text_hash(text) for verb, text in help_texts().items()})


@case("quickstart", slow=True)
def _quickstart() -> Result:
    """The weights of each model of a deterministic quickstart of 1e12 operations."""
    recipe = load_recipe("quickstart", sets=["rl.steps=6"], budget="1e12flops", deterministic=True)
    with scratch() as folder:
        made = run_recipe(recipe, Store(folder), Progress.silent(), until="rl").artifacts
        ids = TokenSet(made["tokens"].path).split("train")
        found = {"tokens": text_hash(json.dumps(ids[0 : len(ids)].tolist()))}
        for step in ("pretrain", "sft", "rl"):
            found[step] = tensor_hash(load_file(made[step].file("model.safetensors")))
        return Result(bits=found)
