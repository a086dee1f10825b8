"""Shared workload of the alignment benches: one model, one tokenizer, one set of texts.

The model has a Llama shape and 6.9 M parameters: 6 layers of width 256, 4 heads, MLPs of 704, a vocabulary of 4,096, an
untied head. Its weights are random, because the cost of a step depends on shapes and dtypes only. It is a Whorl
`Transformer` that is also exported as a Hugging Face folder, so both sides load the same numbers. The tokenizer is a
byte-level BPE. It, the prompts and the texts come from the interpreter's standard library: nothing is downloaded.

`reward` is a task that random weights learn within a few steps and that costs almost no time to score: the fraction of
spaces. A contender whose reward does not rise does not train. Under `--smoke` model and vocabulary are smaller.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench._run import sized

from whorl.machine.device_probe import probe
from whorl.models.exchange.convert import export_model
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig

VOCAB, MAX_LENGTH = sized(4096, 512), 1024
WIDTH, LAYERS, HEADS, MLP_HIDDEN = sized((256, 6, 4, 704), (64, 2, 1, 128))
TOKENIZER_SOURCES = sized(60, 4)  # modules that the tokenizer is trained on
PAD, BOS, EOS = 0, 1, 2
RATE = 1e-3  # AdamW's learning rate on both sides; high, so that a few steps show whether the loss falls
Rows = list[list[int]]


def own_dtype() -> str:
    """The dtype that this machine trains in, as an option of the benches."""
    return "bf16" if probe().dtype == "bfloat16" else "fp32"


def config() -> TransformerConfig:
    """The model configuration: 6,917,376 parameters at full size."""
    return TransformerConfig(
        vocab_size=VOCAB, d_model=WIDTH, n_layers=LAYERS, max_length=MAX_LENGTH, mlp_hidden=MLP_HIDDEN, tie_embeddings=False,
        mixers={"full": AttentionConfig(n_heads=HEADS, n_kv_heads=HEADS, head_dim=64)},
    )  # fmt: skip


def model(dtype: torch.dtype = torch.float32) -> Transformer:
    """Return the model: fp32 weights from seed 0, compute dtype `dtype`.

    Matrices that are initialized to 0 are drawn too. Otherwise layers would add nothing and hide their errors.
    """
    draw = torch.Generator().manual_seed(0)
    network = Transformer(config(), draw, dtype=dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.5 * parameter.shape[-1] ** -0.5, generator=draw)
    return network


def sources() -> list[str]:
    """Return the source of the standard library's modules, sorted by name, without packages."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[: sized(None, 24)]
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files]


def write(folder: Path) -> Path:
    """Write the model and its tokenizer as a Hugging Face folder, and return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    export_model(model(), folder, "llama")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<pad>", "<bos>", "<eos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(sources()[:TOKENIZER_SOURCES], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)
    return folder


def tokenizer(folder: Path) -> Any:
    """Return the tokenizer that `write` stored in `folder`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def prompts(folder: Path, rows: int, length: int) -> list[str]:
    """Return `rows` different texts of exactly `length` tokens that decode and encode to the same ids."""
    encoder, found = tokenizer(folder), dict[str, None]()
    for source in sources():
        ids = encoder(source)["input_ids"]
        for at in range(0, len(ids) - length, 16 * length):
            text = encoder.decode(ids[at : at + length])
            if encoder(text)["input_ids"] == ids[at : at + length]:
                found[text] = None
        if len(found) >= rows:
            return list(found)[:rows]
    raise ValueError(f"only {len(found)} prompts of {length} tokens, {rows} required")


def _functions() -> Iterator[str]:
    for source in sources():
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def texts(folder: Path, n_tokens: int, longest: int = 512) -> Rows:
    """Return functions of the standard library as ids that end in `EOS`.

    Each has 16 to `longest` ids. Together they have at least `n_tokens`.
    """
    encoder, found, total = tokenizer(folder), [], 0
    for text in _functions():
        ids = [*encoder(text)["input_ids"], EOS]
        if 16 <= len(ids) <= longest:
            found.append(ids)
            total += len(ids)
        if total >= n_tokens:
            return found
    raise ValueError(f"only {total} tokens of functions, {n_tokens} required")


def reward(text: str) -> float:
    """Return the fraction of spaces among a completion's characters; 0 for an empty completion."""
    return text.count(" ") / max(len(text), 1)
