"""Vocabularies of GGUF files: ids of llama.cpp against those of the source tokenizers."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models.gguf_files import field, gguf, llama_cpp
from tests.support.tiny import transformer_config
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from whorl.errors import CheckpointError, ConfigError
from whorl.models import Transformer
from whorl.models.exchange.gguf_file import export_gguf
from whorl.models.exchange.gguf_vocabulary import (
    FALLBACK_PRE,
    GPT2_PATTERN,
    SPLITS,
    WHORL_PATTERN,
    read_vocabulary,
)
from whorl.models.transformer_config import AttentionConfig
from whorl.tokens.pretokens import PATTERNS
from whorl.tokens.tokenizer import Tokenizer

# Training text, and texts whose ids are compared.
SOURCE = Path(warnings.__file__).read_text(encoding="utf-8")
HELD_OUT = Path(json.decoder.__file__).read_text(encoding="utf-8")
TEXTS = [
    HELD_OUT,
    "Years 1984, 12 and 1234567.89; it's   three blanks,\ttabs\t\t and\r\n\r\n line  breaks \n\n  \n end. We'LL see\n",
    "Füße über Ägypten, naïve café — “quoted”… 日本語のテキスト и немного кириллицы 👩‍🔬!? ñ a\u0301 ٣٤٥",
    "CamelCase HTTPServer snake_case f(x)[0]->y += {'a': [1,2]} // /* */ http://a.b/c?d=e&f#g",
    " leading", "trailing ", "", "\n", "x",
]  # fmt: skip


def byte_level(splits: tuple[str, ...], folder: Path) -> Any:
    """Train a byte-level tokenizer of the `tokenizers` library with these splits, and save it in `folder`."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    patterns = [s for s in splits if s != "GPT-2"]
    steps = [digits if s == "digits" else pre_tokenizers.Split(Regex(s), "isolated") for s in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="GPT-2" in splits)
    tokenizer = Core(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    settings = {"initial_alphabet": last.alphabet(), "special_tokens": ["<|start|>", "<|end|>"]}
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, **settings)
    tokenizer.train_from_iterator([SOURCE, *TEXTS[2:4]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"eos_token": "<|end|>", "bos_token": {"content": "<|start|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    return tokenizer


def ids_of(engine: Any, text: str, special: bool = False, add_bos: bool = False) -> list[int]:
    return engine.tokenize(text.encode(), add_bos=add_bos, special=special)


def write_vocabulary(folder: Path, vocab_size: int, file: Path) -> Path:
    """Write a GGUF file with only the vocabulary."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vocabulary = read_vocabulary(folder, vocab_size, turn_end=5)
    writer = gguf.GGUFWriter(file, "llama")
    vocabulary.add_to(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("splits", SPLITS, ids=SPLITS.values())
def test_byte_level_ids_match_llama_cpp(splits: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = byte_level(splits, tmp_path)
    file = write_vocabulary(tmp_path, 1000, tmp_path / "v.gguf")
    assert field(file, "tokenizer.ggml.pre") == SPLITS[splits]
    assert field(file, "tokenizer.ggml.eos_token_id") == tokenizer.token_to_id("<|end|>")
    assert field(file, "tokenizer.ggml.bos_token_id") == tokenizer.token_to_id("<|start|>")
    assert field(file, "tokenizer.ggml.add_bos_token") is False
    assert field(file, "tokenizer.ggml.eot_token_id") == 5
    assert field(file, "tokenizer.ggml.tokens")[-1] == "[PAD999]"
    engine = llama_cpp(file, vocab_only=True)
    for text in TEXTS:
        assert ids_of(engine, text) == tokenizer.encode(text, add_special_tokens=False).ids
    engine.close()


def sentencepiece_like(folder: Path, **changes: Any) -> Any:
    """Train and save a tokenizer like Llama 2's: blanks as U+2581, byte fallback, all merges."""
    tokenizer = Core(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    special, pieces = ["<unk>", "<s>", "</s>"], [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*special, *pieces], show_progress=False)
    tokenizer.train_from_iterator(SOURCE.splitlines(keepends=True), trainer)
    data = json.loads(tokenizer.to_str())
    vocabulary, merges = data["model"]["vocab"], data["model"]["merges"]
    rank = {"".join(pair): n for n, pair in reversed(list(enumerate(merges)))}
    data["model"]["merges"] = [
        [token[:i], token[i:]]
        for token in sorted(rank, key=rank.__getitem__)
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] in special]
    data["post_processor"] = {
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }  # fmt: skip
    data["model"] |= changes
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2]}')
    return Core.from_str(json.dumps(data))


def test_sentencepiece_ids_match_llama_cpp(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    file = write_vocabulary(tmp_path, 900, tmp_path / "v.gguf")
    assert field(file, "tokenizer.ggml.model") == "llama"
    assert field(file, "tokenizer.ggml.token_type")[:4] == [2, 3, 3, 6]  # unknown, control, control, byte
    assert field(file, "tokenizer.ggml.add_bos_token") is True
    assert field(file, "tokenizer.ggml.add_space_prefix") is True
    engine = llama_cpp(file, vocab_only=True)
    for text in filter(None, TEXTS):
        assert ids_of(engine, text, add_bos=True) == tokenizer.encode(text).ids
    engine.close()


def test_vocabulary_rejects_merges_without_scores(tmp_path: Path) -> None:
    sentencepiece_like(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    merges = data["model"]["merges"]
    tokens = ["".join(m) for m in merges]
    several = next(t for t in tokens if tokens.count(t) > 1)
    first = tokens.index(several)
    sentencepiece_like(tmp_path, merges=merges[:first] + merges[first + 1 :])
    with pytest.raises(ConfigError, match="no \\('"):
        read_vocabulary(tmp_path, 900)
    sentencepiece_like(tmp_path, merges=[*merges[:first], *merges[first + 1 :], merges[first]])
    with pytest.raises(ConfigError, match="in two places"):
        read_vocabulary(tmp_path, 900)


@pytest.fixture(scope="module")
def whorl_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    folder = tmp_path_factory.mktemp("whorl_tokenizer")
    tokenizer = Tokenizer.train([SOURCE], 700, special_tokens=["<|sep|>"], workers=1)
    tokenizer.save(folder)
    return tokenizer, folder


def test_whorl_vocabulary_warns_and_keeps_merge_order(whorl_tokenizer: tuple[Tokenizer, Path]) -> None:
    tokenizer, folder = whorl_tokenizer
    assert (PATTERNS["whorl"], PATTERNS["gpt2"]) == (
        WHORL_PATTERN,
        GPT2_PATTERN,
    )  # models cannot import tokens
    with pytest.warns(UserWarning, match="2 tokens in 100"):
        found = read_vocabulary(folder, tokenizer.vocab_size)
    assert found.pre == FALLBACK_PRE
    assert found.special_ids == {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    assert found.add_bos and not found.add_eos
    assert found.token_types == [1] * tokenizer.n_ordinary + [3] * 4
    merges = [" ".join(m) for m in json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]]
    assert sorted(found.merges) == sorted(merges) and found.merges != merges
    letters = [m for m in merges if any(c.isascii() and c.isalnum() for c in m)]
    assert len(letters) > 200
    assert [m for m in found.merges if m in set(letters)] == letters  # in the original order
    first = found.merges.index(letters[0])
    assert all(m in found.merges[:first] for m in ("( )", ") :", "Ġ =", "Ċ ĠĠĠĠ") if m in merges)
    assert first > 10


def test_whorl_ids_nearly_match_llama_cpp(whorl_tokenizer: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    tokenizer, folder = whorl_tokenizer
    engine = llama_cpp(write_vocabulary(folder, tokenizer.vocab_size, tmp_path / "v.gguf"), vocab_only=True)

    def boundaries(ids: list[int]) -> set[int]:
        return set(np.cumsum([len(tokenizer.token_bytes[i]) for i in ids]).tolist())

    for text in TEXTS:
        assert tokenizer.decode(ids_of(engine, text)) == text.encode()
    want, found = tokenizer.encode(HELD_OUT).tolist(), ids_of(engine, HELD_OUT)
    kept, wanted = boundaries(found), boundaries(want)
    assert len(kept & wanted) > 0.97 * len(wanted) and len(found) < 1.01 * len(want)
    injected = ids_of(engine, "a<|eos|>b")
    assert injected == tokenizer.encode("a<|eos|>b").tolist() and tokenizer.eos_id not in injected
    document = [tokenizer.bos_id, *tokenizer.encode("a<|sep|>b", allow_special=True).tolist()]
    assert ids_of(engine, "a<|sep|>b", special=True, add_bos=True) == document
    assert (engine.token_bos(), engine.token_eos()) == (tokenizer.bos_id, tokenizer.eos_id)
    engine.close()


def test_llama_cpp_continues_like_whorl(whorl_tokenizer: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    tokenizer, folder = whorl_tokenizer
    heads = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8, qk_norm=True)
    config = transformer_config(vocab_size=tokenizer.vocab_size, mixers={"full": heads})
    model, file = Transformer(config, torch.Generator().manual_seed(0)), tmp_path / "m.gguf"
    for p in model.parameters():  # large, so that the best id is far from the second
        p.data *= 1.0 if p.dim() == 1 else 10.0
    with pytest.warns(UserWarning, match="2 tokens in 100"):
        export_gguf(model, file, source=folder)
    engine = llama_cpp(file, n_ctx=64, type_k=0, type_v=0, flash_attn=False)
    prompt = ids_of(engine, "def main(", add_bos=True)
    assert prompt == [tokenizer.bos_id, *tokenizer.encode("def main(").tolist()]
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model.logits(model(torch.tensor([ids])))[0, -1].argmax()))
    found_ids = list(itertools.islice(engine.generate(prompt, temp=0.0, top_k=1), 12))
    assert found_ids == ids[len(prompt) :] and len(set(found_ids)) > 3
    engine.close()


@pytest.mark.filterwarnings("ignore:.*2 tokens in 100")
def test_vocabulary_rejects_unsupported_tokenizers(whorl_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer, folder = whorl_tokenizer
    with pytest.raises(CheckpointError, match="below 600"):
        read_vocabulary(folder, 600)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_vocabulary(tmp_path, 600)
    data = json.loads((folder / "tokenizer.json").read_text())

    def rejects(path: list[Any], value: Any, message: str) -> None:
        changed = at = copy.deepcopy(data)
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises((ConfigError, CheckpointError), match=message):
            read_vocabulary(tmp_path, tokenizer.vocab_size)

    rejects(["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], r"\w+", "pre_tokenizer is")
    rejects(["normalizer"], {"type": "Lowercase"}, "normalizer is Lowercase")
    rejects(["model", "type"], "Unigram", "model.type is Unigram")
    rejects(["model", "merges"], None, "cannot be read as a tokenizer")
    rejects(["added_tokens", 1, "content"], "<|end|>", "no token ends a text")
    rejects(["added_tokens", 1, "content"], "<|bos|>", "stands for two ids")
