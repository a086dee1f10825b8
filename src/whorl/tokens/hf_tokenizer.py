"""Tokenizers of others, as `transformers` keeps them: what an imported model needs to be sampled from.

Encoding is the `tokenizers` library's business. What the house adds is the bytes of every token, since text is handed to
people, and held back, as bytes (a token may end in the middle of a character). Two alphabets are known: byte-level BPE
(GPT-2, Llama 3, Qwen), where each byte is written as a printable character, and SentencePiece's (Llama 2, Gemma), where
a space is written U+2581 and a byte without a character of its own as <0xE2>. A WordPiece vocabulary does not spell
bytes and is refused.

Which ids end a text is said in three files that need not agree; all that any of them names end it here. And ids need not
be without gaps: a vocabulary may leave numbers out, which stand for nothing, and which a model should not write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from whorl.errors import DataError
from whorl.tokens.healing import HealedPrompt
from whorl.tokens.tokenizer import BYTE_OF_CHAR, TOKENIZER_FILE, Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HFTokenizer:
    """The tokenizer in `folder`: tokenizer.json, and what stands about ids in the files beside it.

    vocab_size: the largest id + 1. token_bytes: of each id, b"" for special tokens and for ids that stand for nothing.
    end_ids: those that end a text. control_ids: special ids, and ids that stand for nothing, which a model should not write.

    Raises:
        DataError: no tokenizer.json, or one that does not spell bytes; a file beside it is damaged, or names no ids.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Core

        path = folder / TOKENIZER_FILE
        try:
            self._core = Core.from_file(str(path))
            self._tokenizer_json: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises the bare class
            raise DataError(
                f"{path} cannot be read as a tokenizer: {error}",
                expected="a tokenizer.json as `save_pretrained` writes it",
                do="put the tokenizer's files beside the weights, and import again",
            ) from error
        self.folder = folder
        known = set(self._core.get_vocab(with_added_tokens=True).values())
        self.vocab_size: int = max(known, default=-1) + 1
        self.all_special_ids = frozenset(
            i for i, t in self._core.get_added_tokens_decoder().items() if t.special
        )
        self.end_ids = self._read_end_ids()
        silent = self.all_special_ids | (set(range(self.vocab_size)) - known)
        self.control_ids = tuple(sorted(silent - set(self.end_ids)))

    def _read_end_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            given = _read_json_object(path).get("eos_token_id")
            ids = given if isinstance(given, list) else [] if given is None else [given]
            if any(type(i) is not int or i < 0 for i in ids):
                raise DataError(
                    f"{path}: field 'eos_token_id' is {given!r}", expected="an id, or a list of ids"
                )
            found += ids
        path = self.folder / "tokenizer_config.json"
        token = _read_json_object(path).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None and not isinstance(text, str):
            raise DataError(f"{path}: field 'eos_token' is {token!r}", expected="the text of a token")
        number = None if text is None else self._core.token_to_id(text)
        found += [] if number is None else [number]
        return tuple(dict.fromkeys(found))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id."""
        parts = self._tokenizer_json.get("decoder") or {}
        kinds = {part.get("type") for part in (parts, *parts.get("decoders", []))}
        added = {i: t.content for i, t in self._core.get_added_tokens_decoder().items()}
        if "ByteLevel" in kinds:
            spell = _byte_level_bytes
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            spell = _sentencepiece_bytes
        else:
            raise DataError(
                f"{self.folder / TOKENIZER_FILE}: its decoder is {parts.get('type')!r}",
                expected="byte-level BPE or SentencePiece, whose tokens spell bytes",
                do="sample from this model with the library that it comes from",
            )
        out = []
        for i in range(self.vocab_size):
            if i in self.all_special_ids:
                out.append(b"")
            elif i in added:
                out.append(added[i].encode())
            else:
                out.append(spell(self._core.id_to_token(i) or ""))
        return out

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt's ids as the model saw them in training, with what the tokenizer puts before a text.

        Raises:
            DataError: `text` holds half of a surrogate pair, which no bytes spell.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"the prompt holds {text[error.start]!r} at {error.start}",
                expected="text that UTF-8 can spell",
            ) from error
        ids = list(self._core.encode(text, add_special_tokens=True).ids)
        while ids and ids[-1] in self.end_ids and len(ids) > 1:
            ids.pop()  # some templates close the text
        return ids or [self.end_ids[0] if self.end_ids else 0]

    def heal_prompt(self, text: str) -> HealedPrompt:
        """A prompt ready for generation: `whole`, the last token taken back (see `heal`).

        Raises:
            DataError: as `whole`.
        """
        ids = self.encode_prompt(text)
        ordinary = [i for i in ids if i not in self.all_special_ids]
        if len(ordinary) < 2:  # the first token may carry a space that the text has not
            return HealedPrompt(ids, b"")
        return HealedPrompt(ids[:-1], self.token_bytes[ids[-1]])

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids of tokens that are found in text as a whole, special or not, by their text."""
        return {token.content: i for i, token in self._core.get_added_tokens_decoder().items()}

    @property
    def unk_token(self) -> str | None:
        """What stands for text that has no token, if the vocabulary has such a thing."""
        unknown = self._tokenizer_json["model"].get("unk_token")
        return None if unknown is None else str(unknown)

    @cached_property
    def _core_without_special(self) -> Any:
        """The same, but for it special tokens are ordinary text."""
        core = type(self._core).from_str(self._core.to_str())
        core.encode_special_tokens = True
        return core

    def encode(self, data: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `data` as it stands, nothing put before or behind. Special tokens are text unless `allow_special`."""
        core = self._core if allow_special else self._core_without_special
        return list(core.encode(data, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes that `ids` stand for; special tokens have none."""
        table = self.token_bytes
        return b"".join(table[i] for i in ids if 0 <= i < len(table))


def load_tokenizer(folder: Path) -> Tokenizer | HFTokenizer:
    """The tokenizer in a model's folder, ours or that of others.

    Raises:
        DataError: there is none, or it cannot be used.
    """
    try:
        return Tokenizer.load(folder)
    except DataError:
        return HFTokenizer(folder)


def _read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", expected="a JSON object", do="fetch the file again"
        ) from error
    if not isinstance(data, dict):
        raise DataError(f"{path} holds a {type(data).__name__}", expected="a JSON object")
    return data


def _byte_level_bytes(token: str) -> bytes:
    return bytes(BYTE_OF_CHAR[c] for c in token if c in BYTE_OF_CHAR)


def _sentencepiece_bytes(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()
