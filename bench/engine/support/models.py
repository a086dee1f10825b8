"""The models of the engine's benchmarks: Llama's architecture, random weights, and files for the peers.

13.8 M and 109.5 M parameters. The embedding is tied to the head, so that decoding a token reads every weight once. The
cost of a token depends on shapes and types only, not on the values of the weights, so no trained model is needed.

    files = write_files(folder, "109M", ["f32"])         files/hf, files/f32.gguf

Under `--smoke` all names stand for one tiny shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from bench._run import sized

from whorl.models.exchange.convert import export_model
from whorl.models.exchange.gguf_file import export_gguf
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig

Rows = list[list[int]]


def config(name: str, max_length: int = 8192) -> TransformerConfig:
    """The shape of "4M", "14M" or "109M"."""
    shapes = {"4M": (256, 4, 704, 4096), "14M": (384, 6, 1024, 8192), "109M": (768, 12, 2048, 32000)}
    d_model, n_layers, hidden, vocab = sized(shapes[name], (64, 2, 128, 512))
    heads = AttentionConfig(n_heads=d_model // 64, n_kv_heads=d_model // 64, head_dim=64)
    return TransformerConfig(
        vocab_size=vocab, d_model=d_model, n_layers=n_layers, max_length=max_length, mixers={"full": heads},
        mlp_hidden=hidden, tie_embeddings=True,
    )  # fmt: skip


def model(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model with fixed random weights, in `dtype`.

    Matrices that are initialized to zero are drawn too. Otherwise every layer would add zero, and errors would not show.
    """
    draw = torch.Generator().manual_seed(0)
    network = Transformer(config(name), draw, dtype=dtype).eval().requires_grad_(False)
    for parameter in network.parameters():
        if not parameter.any():
            parameter.normal_(0.0, 0.5 * parameter.shape[-1] ** -0.5, generator=draw)
    return network


def prompts(name: str, rows: int, length: int, seed: int = 1) -> list[list[int]]:
    """`rows` prompts of random ids."""
    draw = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(
        0, config(name).vocab_size, (rows, length), generator=draw
    ).tolist()
    return found


def write_files(folder: Path, name: str, ggufs: Sequence[str]) -> Path:
    """Write what peers read, unless it is there, and return its folder: `hf`, a folder for `LlamaForCausalLM` in fp32, and
    GGUF files of the types `ggufs`."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "hf" / "config.json").exists():
        export_model(model(name), place / "hf", "llama")
    for kind in ggufs:
        if not (place / f"{kind}.gguf").exists():
            export_gguf(model(name), place / f"{kind}.gguf", kind=kind)
    return place
