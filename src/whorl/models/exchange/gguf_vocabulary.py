"""The vocabulary of a GGUF file, converted from a `tokenizer.json`.

GGUF cannot store a split pattern. It stores a name, `tokenizer.ggml.pre`, and llama.cpp has one pattern per name. So a
byte-level vocabulary (tokens and merges, as in GPT-2) is exact only if its pattern is in the table `SPLITS`.
SentencePiece vocabularies (Llama 2, Gemma) have no pattern; they merge by the score of the result, while
`tokenizer.json` merges by the rank of the pair. The two agree if all pairs that spell a token are listed and adjacent,
which is checked.

The subtle part is Whorl's own tokenizers, whose pattern llama.cpp lacks: a run of signs includes the following blanks, so
"):", a line break and the indentation are one token. Nearly all of llama.cpp's patterns cut there (7 of 10 tokens agree
with Llama 3's). Only "superbpe" splits at digits alone. With it, the order of merges replaces the pattern: merges of signs
and blanks never meet those of letters within a piece, so they can all come first. Then " = " is complete before its last
blank can join the next word. 98 of 100 tokens agree in Python source and prose, and 81 in lists of long numbers. The rest
costs a small model 0.2 % more bits per byte of source, and a warning reports it. The
differences: numbers of more than three digits, split from the end instead of the start, and runs of signs before a word.
Input as token ids is exact.

llama.cpp leaves out Unicode normalization (Qwen's NFC): ids agree for normalized text.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from whorl.errors import CheckpointError, ConfigError
from whorl.models.exchange.safetensors_io import read_json

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WHORL_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^ \t\r\n\p{L}\p{N}]+[\r\n]*[ \t]*|[\r\n]+[ \t]*|[ \t]+"
)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Split patterns, in order -> llama.cpp's name. "GPT-2" is the pattern built into the byte-level step, "digits" the step that
# makes every digit a piece.
SPLITS: dict[tuple[str, ...], str] = {
    ("GPT-2",): "gpt-2",
    (GPT2_PATTERN,): "gpt-2",
    ("digits", "GPT-2"): "smollm",
    (_WORDS + r"\p{N}{1,3}" + _SIGNS,): "llama-bpe",
    (_WORDS + r"\p{N}" + _SIGNS,): "qwen2",
    (
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}|{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}"
        rf"|\p{{N}}{{1,3}}{_CASED_SIGNS}",
    ): "gpt-4o",
    (rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_CASED_SIGNS}",): "tekken",
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): "deepseek-v3",
}
FALLBACK_PRE = "superbpe"
_SIGNS_ONLY = re.compile(
    r"[!-/:-@\[-`{-~\u0120\u010a\u0109\u010d]+"
)  # the last four: blank, line breaks, tab, byte-level
SPACE = "\u2581"  # SentencePiece's blank
BYTE = re.compile("<0x[0-9A-F]{2}>")
SPECIAL_IDS = {"bos": "<|bos|>", "eos": "<|eos|>", "pad": "<|pad|>"}  # and their text in Whorl's tokenizers


class TokenType(IntEnum):
    """Kinds of tokens, by GGUF's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class GGUFVocabulary:
    """The tokenizer fields of a GGUF file.

    model: "gpt2" (byte-level merges), "llama" (merges by score) or "none"; pre: the name of the pattern; special_ids: by
    "bos", "eos", "pad", "unk", "eot" (the end of a turn).
    """

    model: str
    pre: str | None = None
    tokens: list[str] = field(default_factory=list)
    token_types: list[int] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special_ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    chat_template: str | None = None

    def add_to(self, writer: Any) -> None:
        """Write the fields into a `gguf.GGUFWriter`."""
        writer.add_tokenizer_model(self.model)
        if self.model == "none":
            return
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        if self.model == "llama":
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.add_space_prefix)
        else:
            writer.add_token_merges(self.merges)
        add = {
            "bos": writer.add_bos_token_id,
            "eos": writer.add_eos_token_id,
            "pad": writer.add_pad_token_id,
            "unk": writer.add_unk_token_id,
            "eot": writer.add_eot_token_id,
        }
        for name, number in self.special_ids.items():
            add[name](number)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(source: Path | None, vocab_size: int, turn_end: int | None = None) -> GGUFVocabulary:
    """Return the vocabulary of a folder with `tokenizer.json`, filled up to the rows of the model.

    Args:
        source: None for a file without a vocabulary, whose users pass ids.
        turn_end: the id that ends a turn of a chat.

    Raises:
        CheckpointError: a file is missing or damaged, or has more tokens than the model has rows.
        ConfigError: a tokenizer that llama.cpp cannot express; no id ends a text.
    """
    if source is None:
        return GGUFVocabulary("none")
    path = source / "tokenizer.json"
    data = read_json(path)
    try:
        found = _read(data, source, vocab_size)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a tokenizer: {type(error).__name__}: {error}",
            expected="a tokenizer.json of the `tokenizers` library",
        ) from error
    if turn_end is not None and turn_end != found.special_ids["eos"]:
        found.special_ids["eot"] = turn_end
    return found


def _read(data: dict[str, Any], source: Path, vocab_size: int) -> GGUFVocabulary:
    path, model = source / "tokenizer.json", data["model"]
    if model.get("type", "BPE") != "BPE":
        raise _unknown(path, "model.type", model["type"], "'BPE'")
    by_id = {int(i): token for token, i in model["vocab"].items()}
    kinds = dict.fromkeys(by_id, TokenType.NORMAL)
    for entry in data.get("added_tokens") or []:
        by_id[entry["id"]] = entry["content"]
        kinds[entry["id"]] = TokenType.CONTROL if entry.get("special") else TokenType.USER_DEFINED
    if max(by_id) >= vocab_size:
        raise CheckpointError(
            f"{path}: token {by_id[max(by_id)]!r} has the id {max(by_id)}",
            expected=f"below {vocab_size}, the rows of the model's embedding",
            do="name the folder of this model's tokenizer",
        )
    for hole in set(range(vocab_size)) - by_id.keys():  # rows that no token uses
        by_id[hole], kinds[hole] = f"[PAD{hole}]", TokenType.UNUSED
    tokens = [by_id[n] for n in range(vocab_size)]
    if len(set(tokens)) < len(tokens):
        twice = next(t for n, t in enumerate(tokens) if t in tokens[:n])
        raise ConfigError(f"{path}: the token {twice!r} stands for two ids", expected="distinct tokens")
    found = GGUFVocabulary("gpt2", tokens=tokens, token_types=[int(kinds[n]) for n in range(vocab_size)])
    pairs = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    if model.get("byte_fallback"):
        _sentencepiece_scores(found, pairs, data, path)
    else:
        found.pre = _pre_tokenizer_name(data, path)
        if found.pre == FALLBACK_PRE:
            pairs.sort(key=lambda pair: _SIGNS_ONLY.fullmatch("".join(pair)) is None)  # stable
        found.merges = [" ".join(pair) for pair in pairs]
    _specials(found, data, source)
    return found


def _pre_tokenizer_name(data: dict[str, Any], path: Path) -> str:
    """Return the name of the pattern, from the steps before the merges."""
    if (data.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        raise _unknown(path, "normalizer", data["normalizer"]["type"], "none, or 'NFC'")
    before = data.get("pre_tokenizer") or {}
    steps = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    splits: list[str] = []
    for step in steps:
        kind = step.get("type")
        if kind == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
            splits.append(step["pattern"].get("Regex", ""))
        elif kind == "Digits" and step.get("individual_digits"):
            splits.append("digits")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            splits += ["GPT-2"] if step.get("use_regex", True) else []
        else:
            raise _unknown(
                path, "pre_tokenizer", kind, "'Split', 'Digits' or 'ByteLevel', without a blank before"
            )
    if splits == [WHORL_PATTERN]:
        warnings.warn(
            f"{path}: llama.cpp has no pattern that splits text as this tokenizer does. With the closest ({FALLBACK_PRE}), "
            "about 2 tokens in 100 differ, more in long numbers. Pass token ids where exact tokens are needed",
            stacklevel=5,
        )
        return FALLBACK_PRE
    if tuple(splits) not in SPLITS:
        known = ", ".join(SPLITS.values())
        raise _unknown(path, "pre_tokenizer", splits, f"one of llama.cpp's patterns ({known})")
    return SPLITS[tuple(splits)]


def _sentencepiece_scores(
    found: GGUFVocabulary, pairs: list[tuple[str, ...]], data: dict[str, Any], path: Path
) -> None:
    """Convert merges to SentencePiece scores.

    Raises:
        ConfigError: scores cannot express the merges.
    """
    found.model = "llama"
    found.add_space_prefix = _adds_space_prefix(data, path)
    rank: dict[str, int] = {}
    listed: dict[str, set[tuple[str, ...]]] = {}
    last = ""
    for pair in pairs:
        token = "".join(pair)
        if token != last and token in rank:
            raise _unknown(path, "merges", f"{token!r} in two places", "the pairs of each token together")
        rank.setdefault(token, len(rank))
        listed.setdefault(token, set()).add(pair)
        last = token
    known = {t for t, kind in zip(found.tokens, found.token_types, strict=True) if kind == TokenType.NORMAL}
    unknown = data["model"].get("unk_token")
    for n, token in enumerate(found.tokens):
        if found.token_types[n] == TokenType.USER_DEFINED:  # these are matched before blanks are replaced
            found.tokens[n] = token.replace(SPACE, " ")
        if token == unknown:
            found.token_types[n] = int(TokenType.UNKNOWN)
        elif BYTE.fullmatch(token):
            found.token_types[n] = int(TokenType.BYTE)
        elif found.token_types[n] == TokenType.NORMAL:
            halves = {(token[:i], token[i:]) for i in range(1, len(token))}
            able = {(a, b) for a, b in halves if all(len(x) == 1 or x in known for x in (a, b))}
            if missing := able - listed.get(token, set()):
                raise _unknown(path, "merges", f"no {sorted(missing)[0]}", "every pair that spells a token")
        found.scores.append(-float(rank.get(token, len(rank))))
    if unknown in found.tokens:
        found.special_ids["unk"] = found.tokens.index(unknown)


def _adds_space_prefix(data: dict[str, Any], path: Path) -> bool:
    """Return whether a blank is put before the text; check that only blanks are replaced."""
    normal, before = data.get("normalizer") or {}, data.get("pre_tokenizer") or {}
    steps = [
        *(normal["normalizers"] if normal.get("type") == "Sequence" else [normal] * bool(normal)),
        before,
    ]
    first = False
    for step in filter(None, steps):
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            first = True
        elif step["type"] == "Metaspace" and step["replacement"] == SPACE and not step.get("split", True):
            first = first or step.get("prepend_scheme", "always") != "never"
        elif step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, SPACE):
            continue
        elif step["type"] == "Split" and step["pattern"] == {"String": " "}:
            continue  # blanks are replaced earlier, so it never matches
        else:
            raise _unknown(
                path, "normalizer or pre_tokenizer", step["type"], "the replacement of blanks by \u2581 only"
            )
    return first


def _specials(found: GGUFVocabulary, data: dict[str, Any], source: Path) -> None:
    """Read ids of the special tokens, whether they are put around a text, and the chat template."""
    config, general = (
        read_json(source / name) if (source / name).is_file() else {}
        for name in ("tokenizer_config.json", "config.json")
    )
    if (source / "generation_config.json").is_file():
        general |= {k: v for k, v in read_json(source / "generation_config.json").items() if v is not None}
    number: Callable[[Any], int | None] = {t: n for n, t in enumerate(found.tokens)}.get
    for name, ours in SPECIAL_IDS.items():
        text = config.get(f"{name}_token")
        chosen = number(text["content"] if isinstance(text, dict) else text)
        if chosen is None:
            given = general.get(f"{name}_token_id")
            chosen = given[0] if isinstance(given, list) else given
        if chosen is None:
            chosen = number(ours)
        if chosen is not None:
            found.special_ids[name] = chosen
    if "eos" not in found.special_ids:
        raise ConfigError(
            f"{source}: no token ends a text",
            expected="eos_token in tokenizer_config.json, or eos_token_id in generation_config.json: "
            "without one, llama.cpp uses the id 11 or 2",
        )
    around = _ids_around_text(data.get("post_processor"))
    if SPECIAL_IDS["bos"] in found.tokens:  # every text of Whorl starts with it
        around[0].add(found.tokens.index(SPECIAL_IDS["bos"]))
    found.add_bos = bool(config.get("add_bos_token", found.special_ids.get("bos") in around[0]))
    found.add_eos = bool(config.get("add_eos_token", found.special_ids["eos"] in around[1]))
    template = config.get("chat_template")
    if (source / "chat_template.jinja").is_file():
        template = (source / "chat_template.jinja").read_text(encoding="utf-8")
    found.chat_template = template if isinstance(template, str) else None


def _ids_around_text(step: dict[str, Any] | None) -> tuple[set[int], set[int]]:
    """Return the ids that are put before a text, and after it."""
    sides: tuple[set[int], set[int]] = (set(), set())
    for inner in [step, *((step or {}).get("processors") or [])]:
        if not inner or inner.get("type") != "TemplateProcessing":
            continue
        side = 0
        for part in inner["single"]:
            if "Sequence" in part:
                side = 1
            else:
                sides[side].update(inner["special_tokens"][part["SpecialToken"]["id"]]["ids"])
    return sides


def _unknown(path: Path, name: str, found: Any, expected: str) -> ConfigError:
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return ConfigError(
        f"{path}: {name} is {text}, which llama.cpp cannot express",
        expected=expected,
        do="export without a tokenizer, and pass token ids to the model",
    )
