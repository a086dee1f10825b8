"""Small Llama folders as `transformers` writes them, with tokenizers of several kinds.

whorl       byte-level BPE of this package, exported
unigram     SentencePiece's unigram model with metaspaces and a template that adds <s>
wordpiece   WordPiece over words, whose tokens spell no bytes
gpt2        byte-level BPE of `tokenizers`, with one token as bos and eos
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from whorl.tokens.tokenizer import Tokenizer

KINDS = ("whorl", "unigram", "wordpiece", "gpt2")
WORDS = [
    "the", "a", "red", "blue", "small", "big", "dog", "cat", "house", "tree", "runs", "sleeps", "sees", "and",
    "or", "not", "under", "over", "near", "who", "that",
]  # fmt: skip


def sentences(n: int, seed: int = 0) -> list[str]:
    """Return sentences of 4 to 12 random words, with commas, numbers and capitals."""
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        words = [rng.choice(WORDS) for _ in range(rng.randint(4, 12))]
        words.insert(rng.randrange(len(words)), str(rng.randrange(1000)))
        out.append((" ".join(words).capitalize() + rng.choice(".!?,")).replace(" and", ", and"))
    return out


def write_tokenizer(folder: Path, kind: str, texts: list[str], vocab_size: int = 400) -> int:
    """Train and write a tokenizer; returns the number of its ids."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "whorl":
        words = Tokenizer.train(texts, vocab_size, workers=1)
        words.save(folder)
        return words.vocab_size
    names: dict[str, str] = {}
    if kind == "unigram":
        core = Core(models.Unigram())
        core.normalizer = normalizers.NFKC()
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        core.decoder = decoders.Metaspace(prepend_scheme="always")
        special = ["<unk>", "<s>", "</s>"]
        trainer: object = trainers.UnigramTrainer(
            vocab_size=vocab_size, special_tokens=special, unk_token="<unk>"
        )
        core.train_from_iterator(texts, trainer)
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    elif kind == "wordpiece":
        core = Core(models.WordPiece(unk_token="[UNK]"))
        core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        core.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=["[UNK]", "[END]"])
        core.train_from_iterator(texts, trainer)
        names = {"eos_token": "[END]", "unk_token": "[UNK]"}
    elif kind == "gpt2":
        core = Core(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
        )
        core.train_from_iterator(texts, trainer)
        names = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
    else:
        raise ValueError(kind)
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(core.get_vocab_size())


def write_llama(
    folder: Path, vocab_size: int, *, d_model: int = 48, n_layers: int = 2, length: int = 128
) -> Path:
    """Write a Llama model with random weights, large enough to make predictions that differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=d_model, intermediate_size=2 * d_model, num_hidden_layers=n_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_folder(folder: Path, kind: str) -> Path:
    """Write a model and its tokenizer."""
    return write_llama(folder, write_tokenizer(folder, kind, sentences(300)))
