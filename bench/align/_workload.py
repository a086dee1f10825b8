"""What both sides of the alignment benchmarks are given: one model, one tokenizer, one set of texts.

The model has Llama's shape and 6.9 M parameters (6 layers of width 256, 4 heads, MLPs of 704, a vocabulary of 4096, an
untied head), with random weights: what a step costs depends on shapes and types only. It is one of our `Transformer`s,
written as a Hugging Face folder too, so that both sides hold the very same numbers. The tokenizer is a byte-level BPE,
learnt from the source of the interpreter's own standard library, and so are prompts and texts: nothing is downloaded.

`reward` is a task that can be learnt within a few steps from random weights, and that costs nothing to judge: the share of
spaces. A contender that does not raise it does not train.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from whorl.models.exchange.convert import export_model
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig

VOCAB, MAX_LENGTH = 4096, 1024
PAD, BOS, EOS = 0, 1, 2
RATE = 1e-3  # of AdamW on both sides: high, that a few steps show whether it learns
Rows = list[list[int]]


def config() -> TransformerConfig:
    """The shape: 6,917,376 parameters."""
    return TransformerConfig(
        vocab_size=VOCAB, d_model=256, n_layers=6, max_length=MAX_LENGTH, mlp_hidden=704, tie_embeddings=False,
        mixers={"full": AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=64)},
    )  # fmt: skip


def model(dtype: torch.dtype = torch.float32) -> Transformer:
    """The network, computing in `dtype`, its weights in fp32 and the same each time.

    Matrices that training begins at 0 are drawn too: or layers would add nothing, and a mistake in one would not be seen.
    """
    draw = torch.Generator().manual_seed(0)
    network = Transformer(config(), draw, dtype=dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.5 * parameter.shape[-1] ** -0.5, generator=draw)
    return network


def sources() -> list[str]:
    """The standard library's modules, in the order of their names; packages (tests, site-packages) are left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [file.read_text(encoding="utf-8", errors="ignore") for file in sorted(folder.glob("*.py"))]


def write(folder: Path) -> Path:
    """The model and its tokenizer as a Hugging Face folder.  -> folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    export_model(model(), folder, "llama")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<pad>", "<bos>", "<eos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    raw.train_from_iterator(sources()[:60], learner)
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)
    return folder


def tokenizer(folder: Path) -> Any:
    """The tokenizer that `write` left there."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def prompts(folder: Path, rows: int, length: int) -> list[str]:
    """`rows` different texts that are exactly `length` tokens, and the same ones whenever they are tokenised again."""
    encoder, found = tokenizer(folder), dict[str, None]()
    for source in sources():
        ids = encoder(source)["input_ids"]
        for at in range(0, len(ids) - length, 16 * length):
            text = encoder.decode(ids[at : at + length])
            if encoder(text)["input_ids"] == ids[at : at + length]:
                found[text] = None
        if len(found) >= rows:
            return list(found)[:rows]
    raise ValueError(f"only {len(found)} prompts of {length} tokens, {rows} wanted")


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
    """Functions of the standard library as ids, an end behind each, none longer than `longest`: `n_tokens` or a few more."""
    encoder, found, total = tokenizer(folder), [], 0
    for text in _functions():
        ids = [*encoder(text)["input_ids"], EOS]
        if 16 <= len(ids) <= longest:
            found.append(ids)
            total += len(ids)
        if total >= n_tokens:
            return found
    raise ValueError(f"only {total} tokens of functions, {n_tokens} wanted")


def reward(text: str) -> float:
    """The share of an answer's characters that are spaces; 0 for an empty one."""
    return text.count(" ") / max(len(text), 1)
