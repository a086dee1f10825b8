"""Tokenizers in the format of Hugging Face `transformers`, for imported models.

The `tokenizers` library encodes. This file adds the bytes of every token, since the engine returns and holds back bytes (a
token may end in the middle of a character). Two alphabets are supported: byte-level BPE (GPT-2, Llama 3, Qwen), where each
byte is a printable character, and SentencePiece (Llama 2, Gemma), where a space is U+2581 and a byte without a character is
<0xE2>. A WordPiece vocabulary does not spell bytes and is rejected.

Three files may name end-of-text ids, and may disagree; the union is used, without ids that the vocabulary lacks. A
vocabulary may have gaps: unused ids, which must not be sampled.

A file may hold settings of its last caller: truncation, padding and dropout. They are cleared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from whorl.errors import DataError
from whorl.store.files import load_json, require_regular
from whorl.tokens.bpe import BYTE_OF_CHAR
from whorl.tokens.template_source import compile_template, read_template, turn_end
from whorl.tokens.tokenizer import TOKENIZER_FILE, Tokenizer
from whorl.tokens.vocabulary import HealedPrompt, Vocabulary, join_tokens, without_last_token

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_UNUSED_IDS = 1 << 16  # gaps of a vocabulary beyond its own size; every id below the largest takes memory


class HFTokenizer(Vocabulary):
    """The tokenizer in `folder`: tokenizer.json, and the ids in the files next to it.

    vocab_size: the largest id + 1. token_bytes: of each id, b"" for special and unused ids. end_ids: those that end a text.
    control_ids: special and unused ids, which must not be sampled.

    Raises:
        DataError: no tokenizer.json, or one that does not spell bytes; an id far above the number of tokens; a file next
            to it is damaged or has no ids.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Core

        path = folder / TOKENIZER_FILE
        try:
            self._core = Core.from_file(str(require_regular(path)))
            self._tokenizer_json: dict[str, Any] = load_json(path)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{path} cannot be read as a tokenizer: {error}",
                expected="a tokenizer.json from `save_pretrained`",
                do="copy the tokenizer's files next to the weights, and import again",
            ) from error
        self._core.no_truncation()
        self._core.no_padding()
        if getattr(self._core.model, "dropout", None):
            self._core.model.dropout = None
        self.folder = folder
        used_ids = set(self._core.get_vocab(with_added_tokens=True).values())
        self.vocab_size: int = max(used_ids, default=-1) + 1
        if self.vocab_size > 2 * len(used_ids) + _MAX_UNUSED_IDS:
            raise DataError(
                f"{path}: the largest id of {len(used_ids):,} tokens is {self.vocab_size - 1:,}",
                expected="ids near the number of tokens",
                do="copy the tokenizer's files again",
            )
        self.all_special_ids = frozenset(
            i for i, t in self._core.get_added_tokens_decoder().items() if t.special
        )
        self.end_ids = self._read_end_ids()
        self.end_ids += tuple(self._turn_ends())
        silent = self.all_special_ids | (set(range(self.vocab_size)) - used_ids)
        self.control_ids = tuple(sorted(silent - set(self.end_ids)))

    def _read_end_ids(self) -> tuple[int, ...]:
        end_ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            value = _read_json_object(path).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(i) is not int or i < 0 for i in ids):
                raise DataError(
                    f"{path}: field 'eos_token_id' is {value!r}", expected="an id, or a list of ids"
                )
            end_ids += ids
        end_ids += [] if self.eos_id is None else [self.eos_id]
        return tuple(dict.fromkeys(i for i in end_ids if i < self.vocab_size))

    def _turn_ends(self) -> list[int]:
        """Return the id that ends a turn in the folder's chat template; none if it is damaged, which chats report."""
        try:
            source, names = read_template(self.folder)
            texts = {"bos_token": "", "eos_token": "", **names}
            end = turn_end(compile_template(source), texts, self.added_tokens) if source else None
        except DataError:
            return []
        return [] if end is None or end in self.end_ids else [end]

    @cached_property
    def bos_id(self) -> int | None:
        """The id of `bos_token` in tokenizer_config.json, or None."""
        return self._configured_id("bos_token")

    @cached_property
    def eos_id(self) -> int | None:
        """The id of `eos_token` in tokenizer_config.json, or None."""
        return self._configured_id("eos_token")

    def _configured_id(self, field: str) -> int | None:
        path = self.folder / "tokenizer_config.json"
        token = _read_json_object(path).get(field)
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None and not isinstance(text, str):
            raise DataError(f"{path}: field {field!r} is {token!r}", expected="the text of a token")
        token_id: int | None = None if text is None else self._core.token_to_id(text)
        return token_id

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id."""
        decoder = self._tokenizer_json.get("decoder") or {}
        parts = [decoder, *decoder.get("decoders", [])]
        kinds = {part.get("type") for part in parts}
        spell: Callable[[str], bytes]
        if "ByteLevel" in kinds:
            spell = _byte_level_bytes
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            spell = partial(_sentencepiece_bytes, replacements=_replacements(parts))
        else:
            raise DataError(
                f"{self.folder / TOKENIZER_FILE}: its decoder is {decoder.get('type')!r}",
                expected="byte-level BPE or SentencePiece, whose tokens spell bytes",
                do="run this model with its own library",
            )
        raw = set(self.added_tokens.values()) if "ByteLevel" in kinds else set()  # outside that alphabet
        out = []
        for i in range(self.vocab_size):
            token = "" if i in self.all_special_ids else self._core.id_to_token(i) or ""
            out.append(token.encode() if i in raw else spell(token))
        return out

    def encode_prompt(self, text: str) -> list[int]:
        """Return a prompt's ids as in training, with the prefix that the tokenizer adds.

        Raises:
            DataError: `text` holds a lone surrogate, which has no bytes; the tokenizer fails on it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"the prompt holds {text[error.start]!r} at {error.start}",
                expected="text that UTF-8 can spell",
            ) from error
        ids = self._encode(self._core, text, add_special_tokens=True)
        while ids and ids[-1] in self.end_ids and len(ids) > 1:
            ids.pop()  # some templates append an end token
        return ids or [self.end_ids[0] if self.end_ids else 0]

    def heal_prompt(self, text: str) -> HealedPrompt:
        """Return `encode_prompt` without its last token.

        Raises:
            DataError: as `encode_prompt`.
        """
        ids = self.encode_prompt(text)
        ordinary = [i for i in ids if i not in self.all_special_ids]
        if len(ordinary) < 2:  # the first token may add a space that the text lacks
            return HealedPrompt(ids, b"", len(ids))
        return without_last_token(ids, self.token_bytes)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids by text of the tokens that are matched as a whole, special or not."""
        return {token.content: i for i, token in self._core.get_added_tokens_decoder().items()}

    @property
    def unk_token(self) -> str | None:
        """The token for text without a token, or None."""
        unknown = self._tokenizer_json["model"].get("unk_token")
        return None if unknown is None else str(unknown)

    @cached_property
    def _core_without_special(self) -> Any:
        """The same tokenizer, for which special tokens are ordinary text."""
        core = type(self._core).from_str(self._core.to_str())
        core.encode_special_tokens = True
        return core

    def encode_to_list(self, data: str) -> list[int]:
        """Return `encode`, under the name that `Tokenizer` has for it."""
        return self.encode(data)

    def encode(self, data: str, *, allow_special: bool = False) -> list[int]:
        """Return the ids of `data` without added prefix or suffix. Special tokens are text unless `allow_special`."""
        core = self._core if allow_special else self._core_without_special
        return self._encode(core, data, add_special_tokens=False)

    def _encode(self, core: Any, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._panic_as_error():
            return list(core.encode(text, add_special_tokens=add_special_tokens).ids)

    @contextmanager
    def _panic_as_error(self) -> Iterator[None]:
        """Convert a panic of the library, such as a regular expression at its retry limit, to a DataError.

        pyo3's PanicException is no `Exception`, and no module exports it.
        """
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(
                f"{self.folder / TOKENIZER_FILE}: the tokenizer fails on this text: {error}",
                expected="text that its split pattern reads within the library's limits",
                do="send other text, or use a simpler pattern",
            ) from None

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text as `transformers` encodes it, in threads. Special tokens in a text are matched.

        Args:
            add_special_tokens: with the prefix and suffix of the tokenizer's template, such as <s>.
        """
        with self._panic_as_error():
            found = self._core.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in found]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of `ids`; special tokens as their text, or without them. Unused ids have no bytes.

        Raises:
            DataError: an id outside the vocabulary.
        """
        return join_tokens(ids, self.token_bytes if skip_special_tokens else self._spelled_tokens)

    @cached_property
    def _spelled_tokens(self) -> list[bytes]:
        """The bytes of each id, special tokens as their text."""
        special = {i: text.encode() for text, i in self.added_tokens.items() if i in self.all_special_ids}
        return [special.get(i, token) for i, token in enumerate(self.token_bytes)]


AnyTokenizer = Tokenizer | HFTokenizer


def load_tokenizer(folder: Path) -> AnyTokenizer:
    """Load the tokenizer in a model's folder, a Whorl or a Hugging Face one.

    Raises:
        DataError: the tokenizer is missing or cannot be used.
    """
    try:
        return Tokenizer.load(folder)
    except DataError:
        return HFTokenizer(folder)


def _read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        data = load_json(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", expected="a JSON object", do="fetch the file again"
        ) from error
    if not isinstance(data, dict):
        raise DataError(f"{path} holds a {type(data).__name__}", expected="a JSON object")
    return data


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token in the byte-level alphabet; a token with another character is its own text."""
    if all(c in BYTE_OF_CHAR for c in token):
        return bytes(BYTE_OF_CHAR[c] for c in token)
    return token.encode()


def _replacements(parts: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (text, its replacement) of each decoder step that replaces text, in order."""
    found = []
    for part in parts:
        if part.get("type") == "Metaspace":
            found.append((str(part.get("replacement", "\u2581")), " "))
        elif part.get("type") == "Replace" and "String" in part["pattern"]:
            found.append((str(part["pattern"]["String"]), str(part["content"])))
    return found


def _sentencepiece_bytes(token: str, replacements: Iterable[tuple[str, str]]) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    for old, new in replacements:
        token = token.replace(old, new)
    return token.encode()
