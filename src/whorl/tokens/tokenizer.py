"""The tokenizer: bytes to token ids and back, exactly, for any bytes.

Ids: the 256 bytes in order, then the merged tokens by rank, then the special tokens. Encoding runs in tiktoken's core,
which uses ranks as ids; `tokenizer.json` is the Hugging Face form of the same tokenizer.

Subtle:
- *No injection.* A special token's text in ordinary input is ordinary text. Only `allow_special=True` maps it to the
  special id, the longest first where several start at one position (tiktoken's own search may take any).
- *Any bytes.* tiktoken's core needs valid text. Runs of bytes that are not UTF-8 are separate pieces, encoded from their
  bytes; decoding returns bytes, never replacement characters.
- *The standard file.* Hugging Face merges by a list of pairs, tiktoken by the rank of the result. So the file lists, for
  each token by rank, every pair that spells it. `ignore_merges` takes a pre-token that is a token whole, as tiktoken does.
- *Streams.* A pre-token that ends before the end of the text so far is final (see `pretokens`), so a stream is encoded up to
  such a position and gives the ids of the whole. Memory is bounded by the chunk and the longest pre-token; time is linear.
  Named patterns (GPT-2's, cl100k, Qwen2's, o200k) are cut at safe borders; memory is bounded by the chunk and the longest
  text without one. With any other pattern, a stream is held until a special token or its end.
- *pad is not eos*: a model must learn to end, and must never learn from padding.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from whorl.errors import ConfigError, DataError
from whorl.machine.device_probe import usable_cores
from whorl.store.files import load_json
from whorl.tokens import bpe, pretokens
from whorl.tokens.vocabulary import (
    MAX_HEALED_BYTES,
    HealedPrompt,
    Vocabulary,
    join_tokens,
    without_last_token,
)

Ids = NDArray[np.unsignedinteger[Any]]  # uint16 while the vocabulary fits, else uint32

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
TOKENIZER_FILE = "tokenizer.json"
LIST_PORTION = 1 << 16


class Tokenizer(Vocabulary):
    """Byte-level BPE with special tokens.

    Args:
        tokens: byte strings by rank, the 256 single bytes first.
        special_tokens: further special tokens, after `<|bos|>`, `<|eos|>` and `<|pad|>`.
        pattern: regular expression of the pre-tokens, or a name of `pretokens.PATTERNS`.

    Raises:
        ConfigError: a special token or the pattern cannot be used.
        DataError: the tokens are no byte-level vocabulary.
    """

    def __init__(
        self, tokens: Sequence[bytes], special_tokens: Sequence[str] = (), *, pattern: str = "whorl"
    ) -> None:
        ranks = {token: rank for rank, token in enumerate(tokens)}
        if len(ranks) != len(tokens) or list(tokens[:256]) != [bytes([i]) for i in range(256)]:
            raise DataError(
                "these tokens are not a byte-level vocabulary",
                expected="the 256 single bytes in order, then distinct longer byte strings",
                do="train the tokenizer again",
            )
        for special in special_tokens:
            if not (special.isascii() and special.isprintable() and special):
                raise ConfigError(
                    f"the special token {special!r} cannot be used",
                    expected="one or more printable ASCII characters",
                    do="write it as <|name|>",
                )
        self.pattern = pretokens.PATTERNS.get(pattern, pattern)
        pretokens.compile_pattern(self.pattern)
        self.special_tokens = [BOS, EOS, PAD, *(s for s in special_tokens if s not in (BOS, EOS, PAD))]
        self.special_token_ids = {special: len(tokens) + i for i, special in enumerate(self.special_tokens)}
        self.token_bytes: list[bytes] = [*tokens, *(s.encode() for s in self.special_tokens)]
        self.n_ordinary = len(tokens)
        self.bos_id, self.eos_id, self.pad_id = (self.special_token_ids[s] for s in (BOS, EOS, PAD))
        self.dtype: Any = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self._special_pattern = pretokens.special_token_pattern(self.special_tokens)
        self._longest_special = max(map(len, self.special_tokens))
        # The core receives the special tokens although they are encoded here: without any, it searches for the empty
        # string at every character, which halves its speed.
        try:
            self._core = tiktoken.Encoding(
                "whorl", pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=self.special_token_ids
            )._core_bpe
        except ValueError as error:
            raise ConfigError(
                f"the split pattern {self.pattern!r} cannot be used: {error}",
                expected="a regular expression that Python's regex and Rust's fancy-regex both read",
            ) from error

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text: <|eos|>, and the end of a turn in a vocabulary with the markers of ChatML."""
        turn_end = self.special_token_ids.get("<|im_end|>")
        return (self.eos_id,) if turn_end is None else (self.eos_id, turn_end)

    @property
    def control_ids(self) -> tuple[int, ...]:
        """Special ids that must not be sampled."""
        return (self.pad_id, self.bos_id)

    @property
    def vocab_size(self) -> int:
        """Number of ids: bytes, merged tokens and special tokens."""
        return len(self.token_bytes)

    @property
    def n_spelled(self) -> int:
        return self.n_ordinary

    @classmethod
    def train(
        cls,
        texts: Iterable[str | bytes],
        vocab_size: int,
        *,
        special_tokens: Sequence[str] = (),
        pattern: str = "whorl",
        workers: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Tokenizer:
        """Learn a vocabulary of at most `vocab_size` ids (special tokens and bytes included).

        A small or uniform text gives fewer: read `vocab_size` of the result. pattern: as of the class.

        Raises:
            ConfigError: `vocab_size` leaves no space for a merge, or is above 2**20.
        """
        all_specials = list(dict.fromkeys((BOS, EOS, PAD, *special_tokens)))
        n_fixed = 256 + len(all_specials)
        if not n_fixed < vocab_size <= 1 << 20:
            raise ConfigError(
                f"a vocabulary of {vocab_size} is impossible",
                expected=f"more than {n_fixed} (256 bytes, {len(all_specials)} special tokens), up to 1048576",
                do="choose a vocabulary between 512 and 65536",
            )
        pattern = pretokens.PATTERNS.get(pattern, pattern)
        counts = pretokens.count_pretokens(texts, all_specials, workers, pattern)
        tokens = bpe.train(counts, vocab_size - len(all_specials), progress=progress)
        return cls(tokens, special_tokens, pattern=pattern)

    def encode(self, data: str | bytes, *, allow_special: bool = False) -> Ids:
        """Return the ids of `data`. Special tokens in it are ordinary text unless `allow_special`."""
        parts: list[Ids] = []
        for segment in pretokens.split_invalid_utf8(data):
            if isinstance(segment, bytes):
                parts.append(np.asarray(self._core.encode_single_piece(segment), dtype=self.dtype))
            elif allow_special:
                parts.extend(self._encode_with_special(segment))
            else:
                parts.append(self._encode_text(segment))
        if len(parts) == 1:  # the common case: no copy
            return parts[0]
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def encode_to_list(self, data: str | bytes) -> list[int]:
        """`encode` as a list, converted in portions: one conversion of millions of ids holds the interpreter's lock."""
        ids, out = self.encode(data), list[int]()
        for start in range(0, len(ids), LIST_PORTION):
            out += ids[start : start + LIST_PORTION].tolist()
        return out

    def encode_prompt(self, text: str) -> list[int]:
        ids = self.encode_to_list(text)
        ids.insert(0, self.bos_id)
        return ids

    def heal_prompt(self, text: str) -> HealedPrompt:
        last = pretokens.last_pretoken(text, self.pattern)
        ids, end = self.encode_prompt(text[: len(text) - len(last)]), self.encode_to_list(last)
        if len(last.encode()) <= MAX_HEALED_BYTES:
            return HealedPrompt(ids, last.encode(), len(ids) + len(end))
        return without_last_token(ids + end, self.token_bytes)

    def encode_document(self, data: str | bytes) -> Ids:
        """Return the ids of a whole document: bos, its tokens, eos."""
        ids = self.encode(data)
        return np.concatenate(([self.bos_id], ids, [self.eos_id]), dtype=self.dtype, casting="unsafe")

    def encode_batch(self, data: Sequence[str | bytes], *, threads: int | None = None) -> list[Ids]:
        """`encode` for many, in threads (the core releases the interpreter lock). None: the available cores."""
        threads = usable_cores() if threads is None else threads
        if threads <= 1 or len(data) <= 1:
            return [self.encode(item) for item in data]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.encode, data))

    def encode_stream(self, chunks: Iterable[str | bytes], *, allow_special: bool = False) -> Iterator[Ids]:
        """Encode a text that arrives in chunks, cut anywhere.

        Yields arrays whose concatenation is `encode` of the chunks' concatenation.
        """
        parts: list[str] = []
        size = enough = 0
        for text in _decode_surrogateescape(chunks):
            parts.append(text)
            size += len(text)
            if size < enough:
                continue
            pending = "".join(parts)
            cut = self._stable_length(pending, allow_special)
            if cut:
                yield self._encode_escaped(pending[:cut], allow_special)
            parts, size = [pending[cut:]], len(pending) - cut
            # Inside a long pre-token: try again when twice as much has arrived.
            enough = 0 if cut else 2 * size
        if size:
            yield self._encode_escaped("".join(parts), allow_special)

    def decode(self, ids: Iterable[int] | Ids, *, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of `ids`; special tokens as their text, or without them.

        Raises:
            DataError: an id outside the vocabulary.
        """
        table = self.text_bytes(self.vocab_size) if skip_special_tokens else self.token_bytes
        return join_tokens(ids, table)

    def save(self, folder: Path) -> Path:
        """Write `tokenizer.json` into `folder`, with the file that `transformers` needs next to it; returns its path."""
        path = Path(folder) / TOKENIZER_FILE
        names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "clean_up_tokenization_spaces": False}
        (Path(folder) / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}, indent=1) + "\n"
        )
        path.write_text(json.dumps(self._to_hf_json(), ensure_ascii=False, indent=1), encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a `tokenizer.json` that `save` wrote, with its split pattern.

        Raises:
            DataError: no such file, or a tokenizer of another kind.
        """
        path = Path(folder) / TOKENIZER_FILE
        try:
            standard = load_json(path)
            vocabulary: dict[str, int] = standard["model"]["vocab"]
            pattern = standard["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
            added: list[dict[str, Any]] = standard["added_tokens"]
            ordinary = sorted((i, t) for t, i in vocabulary.items())
            tokens = [bytes(bpe.BYTE_OF_CHAR[c] for c in token) for _, token in ordinary]
            specials = [str(entry["content"]) for entry in sorted(added, key=lambda entry: int(entry["id"]))]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} cannot be read as a tokenizer: {type(error).__name__}: {error}",
                expected="a tokenizer.json written by whorl",
                do="check the path, or train the tokenizer again",
            ) from error
        ids = sorted([*vocabulary.values(), *(int(entry["id"]) for entry in added)])
        if specials[:3] != [BOS, EOS, PAD] or ids != list(range(len(ids))):
            raise DataError(
                f"{path} has the special tokens {specials[:3]}, or gaps between its ids",
                expected=f"a tokenizer.json written by whorl, with {BOS}, {EOS} and {PAD}",
                do="read the tokenizers of other projects with HFTokenizer",
            )
        return cls(tokens, specials, pattern=pattern)

    def _encode_text(self, text: str) -> Ids:
        try:
            ids = np.frombuffer(self._core.encode_to_tiktoken_buffer(text, set()), dtype=np.uint32)
        except ValueError as error:  # only patterns with lookaround have limits
            raise DataError(
                f"the split pattern {self.pattern!r} fails on this text: {error}",
                expected="text without a run of a million equal characters",
                do="send other text, or train the tokenizer with another pattern",
            ) from error
        if self.pattern != pretokens.PATTERN and sum(len(self.token_bytes[i]) for i in ids.tolist()) != len(
            text.encode()
        ):
            raise pretokens.incomplete_pattern(self.pattern)
        return ids.astype(self.dtype)

    def _encode_with_special(self, text: str) -> Iterator[Ids]:
        assert self._special_pattern is not None
        start = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > start:
                yield self._encode_text(text[start : match.start()])
            yield np.array([self.special_token_ids[match.group()]], dtype=self.dtype)
            start = match.end()
        if start < len(text):
            yield self._encode_text(text[start:])

    def _encode_escaped(self, text: str, allow_special: bool) -> Ids:
        """Encode text in which invalid bytes are lone surrogates (Python's "surrogateescape")."""
        data = text if text.isascii() else text.encode("utf-8", "surrogateescape")
        return self.encode(data, allow_special=allow_special)

    def _stable_length(self, text: str, allow_special: bool) -> int:
        """Length of the prefix of a stream's text that is split into the same pieces for any continuation."""
        start, limit = 0, len(text)
        if allow_special:
            # A special token that starts before `limit` is complete here; one that starts later may become another.
            assert self._special_pattern is not None
            limit = max(0, limit - self._longest_special + 1)
            for match in self._special_pattern.finditer(text):
                if match.start() >= limit:
                    break
                start = match.end()
        borders = pretokens.BORDERS.get(self.pattern)
        if start >= limit or borders is None:
            return start
        if border := borders.search(text, start, limit):
            return int(border.start())
        if self.pattern != pretokens.PATTERN:
            return start
        # No safe border: split the text as encoding does, from the last run of invalid bytes.
        for run in pretokens.INVALID_RUN.finditer(text, start):
            if run.end() == len(text):  # the run may continue
                return run.start()
            start = run.end()
        end = start
        for piece in pretokens.split_pretokens(text[start:]):
            if end + len(piece) > limit or end + len(piece) == len(text):
                break
            end += len(piece)
        return end

    def _to_hf_json(self) -> dict[str, Any]:
        """Return the content of a Hugging Face `tokenizer.json`."""
        ordinary = self.token_bytes[: self.n_ordinary]
        rank = {token: i for i, token in enumerate(ordinary)}
        merges = []
        for token in ordinary[256:]:
            halves = [(token[:i], token[i:]) for i in range(1, len(token))]
            by_rank = [(rank[a], rank[b]) for a, b in halves if a in rank and b in rank]
            merges += [
                [bpe.to_printable(ordinary[a]), bpe.to_printable(ordinary[b])] for a, b in sorted(by_rank)
            ]
        no = {"add_prefix_space": False, "use_regex": False}
        byte_level = {"type": "ByteLevel", **no, "trim_offsets": True}
        split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": s, **flags} for s, i in self.special_token_ids.items()],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,
                "vocab": {bpe.to_printable(token): i for i, token in enumerate(ordinary)},
                "merges": merges,
            },
        }


def _decode_surrogateescape(chunks: Iterable[str | bytes]) -> Iterator[str]:
    """Decode chunks to text in which invalid bytes are lone surrogates; joins characters that chunks cut."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for chunk in chunks:
        data = chunk.encode("utf-8", "surrogatepass") if isinstance(chunk, str) else chunk
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)
